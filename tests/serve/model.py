"""A model of two functions, and requests for it with the right answers."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from ronde.serve import Capacity, InferenceRequest, StepEngine, StepRow, choose_token

NUM_WORDS, END = 23, 5
CAPACITY = Capacity(
    num_blocks=40, block_tokens=4, max_requests=6, max_len=64, vocabulary=NUM_WORDS
)
_TABLE = torch.randn(
    101, NUM_WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
)


def logits_of(tokens: Sequence[int]) -> Tensor:
    """Return logits that depend on all tokens and their order."""
    state = 0
    for token in tokens:
        state = (31 * state + token + 1) % len(_TABLE)
    return _TABLE[state]


def compute(rows: Sequence[StepRow]) -> Tensor:
    return torch.stack([logits_of([*r.request.prompt, *r.tokens]) for r in rows])


def make_engine() -> StepEngine:
    return StepEngine(compute, compute, CAPACITY, stop_ids=(END,))


def answer_to(request: InferenceRequest) -> list[int]:
    """Return the tokens that follow, with nothing else in the batch."""
    made: list[int] = []
    while len(made) < request.max_tokens:
        logits = logits_of([*request.prompt, *made])
        made.append(choose_token(logits, request, request.num_made + len(made))[0])
        if made[-1] in (END, *request.stop_ids):
            break
    return made


def random_requests(chance: random.Random, num: int) -> list[InferenceRequest]:
    return [
        InferenceRequest(
            id=1000 + i,
            prompt=tuple(chance.choices(range(NUM_WORDS), k=chance.randint(1, 30))),
            max_tokens=chance.randint(1, 30),
            temperature=chance.choice((0.0, 0.7, 1.5)),
            top_k=chance.choice((0, 3)),
            top_p=chance.choice((1.0, 0.8)),
            seed=chance.getrandbits(64),
            stop_ids=chance.choice(((), (9,))),
        )
        for i in range(num)
    ]
