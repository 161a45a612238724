"""Requests for tokens, and the tokens that answer them."""

import json
from math import isfinite
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.plain_values import from_plain, to_plain
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


class Response(NamedTuple):
    """An answer, or a part of one, to a request."""

    id: int
    tokens: tuple[int, ...] = ()  # made since the response before
    is_final: bool = False  # the id may be used again
    finish: str | None = (
        None  # "stop", "length", "cancel"; None if not final or refused
    )
    logprobs: tuple[float, ...] = ()  # of the tokens
    error: str = ""  # the request was refused


class Statistics(NamedTuple):
    """Figures of one iteration."""

    iteration: int
    num_running: int
    num_waiting: int
    num_blocks: int  # that running requests take at most
    max_blocks: int
    max_requests: int
    step_s: float = 0.0  # in the engine
    frame_s: float = 0.0  # of the broadcast


def counts_of(request: InferenceRequest) -> TokenCounts:
    return TokenCounts(len(request.prompt), request.max_tokens)


def require_servable(request: InferenceRequest, capacity: Capacity) -> None:
    """Raise ``UsageError``, with the field, if this capacity never serves it."""
    try:
        from_plain(InferenceRequest, json.loads(json.dumps(to_plain(request))), "it")
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"a request must have the types of its fields: {error}"
        ) from None
    num_prompt, tokens = len(request.prompt), {*request.prompt, *request.stop_ids}
    room, num_blocks = (
        capacity.max_len - num_prompt,
        counts_of(request).most_blocks(capacity),
    )
    unknown = [token for token in tokens if not 0 <= token < capacity.vocabulary]
    rules = {
        "id": (f"from 0 to {_MOST_ID}", request.id, 0 <= request.id <= _MOST_ID),
        "prompt": ("at least one token", "none", num_prompt > 0),
        "prompt and stop_ids": (
            f"tokens from 0 to {capacity.vocabulary - 1}", unknown[:1], not unknown
        ),
        "max_tokens": (
            f"from 1 to {max(room, 0)} after a prompt of {num_prompt} tokens",
            request.max_tokens, 1 <= request.max_tokens <= room,
        ),
        "temperature": (
            "a number from 0", request.temperature,
            isfinite(request.temperature) and request.temperature >= 0,
        ),
        "top_k": ("a whole number from 0", request.top_k, request.top_k >= 0),
        "top_p": ("above 0 and at most 1", request.top_p, 0 < request.top_p <= 1),
        "num_made": (
            f"from 0 to {num_prompt}", request.num_made,
            0 <= request.num_made <= num_prompt,
        ),
        "prompt and max_tokens": (
            f"at most {capacity.num_blocks} blocks of {capacity.block_tokens} tokens",
            num_blocks, num_blocks <= capacity.num_blocks,
        ),
    }  # fmt: skip
    for name, (rule, value, is_kept) in rules.items():
        if not is_kept:
            raise UsageError(f"{name} must be {rule}, got {value}.")
