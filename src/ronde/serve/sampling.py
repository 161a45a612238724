"""Sampling as a pure function of the logits, the seed and the position.

Gumbel noise of (seed, position) makes the most likely token a sample of the
distribution. No generator travels from step to step, so a request has the same tokens
alone, in any batch, on any rank, and after it was resumed.
"""

import torch
from torch import Tensor

from ronde.serve.requests import InferenceRequest

_MASK = (1 << 64) - 1


def choose_token(
    logits: Tensor, request: InferenceRequest, num_made: int
) -> tuple[int, float]:
    """Return the next token and its log-probability without temperature.

    Args:
        logits: Of all tokens, shape ``(vocabulary,)``, of any float dtype and device.
        request: Its temperature, top_k, top_p and seed count.
        num_made: Tokens that were made for the request before, also before it was
            resumed.
    """
    scores = logits.detach().to("cpu", torch.float64)
    token = int(scores.argmax())
    if request.temperature > 0:
        scaled = _cut(scores / request.temperature, request)
        token = int((scaled + _gumbel(request.seed, num_made, len(scores))).argmax())
    return token, float(scores[token] - scores.logsumexp(0))


def _cut(scores: Tensor, request: InferenceRequest) -> Tensor:
    """Return the scores with those outside of top_k and top_p at minus infinity."""
    if request.top_k == 0 and request.top_p == 1:
        return scores
    ordered, order = scores.sort(descending=True, stable=True)
    shares = ordered.softmax(0)
    # The first is always kept, and so is the one that reaches top_p.
    is_kept = shares.cumsum(0) - shares < request.top_p
    if request.top_k:
        is_kept[request.top_k :] = False
    return torch.full_like(scores, -torch.inf).scatter(
        0, order[is_kept], ordered[is_kept]
    )


def _gumbel(seed: int, position: int, num: int) -> Tensor:
    generator = torch.Generator()
    generator.manual_seed(_mix(_mix(seed & _MASK) ^ position))
    uniform = torch.rand(num, dtype=torch.float64, generator=generator)
    return -(-uniform.log()).log()


def _mix(number: int) -> int:
    """Return another number of 64 bits: SplitMix64 (Steele, Lea, Flood 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
