"""Requests for tokens, and the tokens that answer them."""

from math import isfinite
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.serve.policy import Capacity, TokenCounts

_MOST_ID = (1 << 64) - 1


class InferenceRequest(NamedTuple):
    """A request for the tokens that follow a prompt."""

    id: int  # not that of another request in progress
    prompt: tuple[int, ...]  # token ids
    max_tokens: int
    temperature: float = 0.0  # 0: always the most likely token
    top_k: int = 0  # only the k most likely tokens; 0: all
    top_p: float = 1.0  # only the most likely tokens that have this share together
    seed: int = 0  # the same seed draws the same tokens, in any batch
    stop_ids: tuple[int, ...] = ()  # a token of these ends it
    num_made: int = 0  # tokens at the end of the prompt that were made before


class Token(NamedTuple):
    """A token that a step has made for a request."""

    id: int  # of the request
    token: int
    finish: str | None = None  # "stop" or "length" with the last token
    logprob: float = 0.0


def load_of(request: InferenceRequest) -> TokenCounts:
    return TokenCounts(len(request.prompt), request.max_tokens)


def require_servable(request: InferenceRequest, capacity: Capacity) -> None:
    """Raise ``UsageError``, with the field, if this capacity never serves it."""
    room, worst = capacity.max_len - len(request.prompt), load_of(request)
    num_blocks = worst.most_blocks(capacity)
    rules = {
        "id": (f"from 0 to {_MOST_ID}", request.id, 0 <= request.id <= _MOST_ID),
        "prompt": ("at least one token", "none", len(request.prompt) > 0),
        "max_tokens": (
            f"from 1 to {max(room, 0)} after a prompt of {len(request.prompt)} tokens",
            request.max_tokens,
            1 <= request.max_tokens <= room,
        ),
        "temperature": (
            "a number from 0", request.temperature,
            isfinite(request.temperature) and request.temperature >= 0,
        ),
        "top_k": ("a whole number from 0", request.top_k, request.top_k >= 0),
        "top_p": ("above 0 and at most 1", request.top_p, 0 < request.top_p <= 1),
        "prompt and max_tokens": (
            f"at most {capacity.num_blocks} blocks of {capacity.block_tokens} tokens",
            num_blocks, num_blocks <= capacity.num_blocks,
        ),
    }  # fmt: skip
    for name, (rule, value, is_kept) in rules.items():
        if not is_kept:
            raise UsageError(f"{name} must be {rule}, got {value}.")
