"""Engines: hold the requests of a running batch and take its steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ronde.errors import UsageError
from ronde.serve.policy import Capacity
from ronde.serve.requests import InferenceRequest, Token
from ronde.serve.sampling import choose_token


class InferenceEngine(Protocol):
    """A model with a running batch.

    All ranks make the same calls, so an engine must be deterministic: no clock, no
    order of sets, no generator that something else uses as well.
    """

    @property
    def capacity(self) -> Capacity: ...

    @property
    def has_work(self) -> bool:
        """True while a request is in progress."""
        ...

    def add(self, request: InferenceRequest) -> None:
        """Let a request join the batch at the next step."""

    def cancel(self, request_id: int) -> None:
        """Forget a request; unknown ones are ignored, as they may have finished."""

    def step(self) -> list[Token]:
        """Return the tokens of one step, in the order of the batch."""
        ...


@dataclass(slots=True, eq=False)
class StepRow:
    """One request of a batch, for the functions of ``StepEngine``."""

    request: InferenceRequest
    tokens: list[int] = field(
        default_factory=list[int]
    )  # made so far, after the prompt
    cache: Any = None  # for ``prefill`` and ``decode`` alone


Compute = Callable[[Sequence[StepRow]], Tensor]


class StepEngine:
    """An engine of two functions, for a model of your own.

    Args:
        prefill: Gets the rows that are new; returns the logits after their prompts,
            shape ``(rows, vocabulary)``. Called on all ranks alike.
        decode: Gets all other rows, of which each has one token more than at the last
            step; returns the logits after it, of the same shape.
        capacity: The requests that the model can hold.
        stop_ids: Tokens that end every request.
    """

    def __init__(
        self,
        prefill: Compute,
        decode: Compute,
        capacity: Capacity,
        stop_ids: Sequence[int] = (),
    ) -> None:
        if capacity.evicts:
            raise UsageError("evicts must be False for a StepEngine, got True.")
        self._prefill, self._decode = prefill, decode
        self._capacity, self._stop_ids = capacity, frozenset(stop_ids)
        self._rows: dict[int, StepRow] = {}

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    def add(self, request: InferenceRequest) -> None:
        self._rows[request.id] = StepRow(request)

    def cancel(self, request_id: int) -> None:
        self._rows.pop(request_id, None)

    def step(self) -> list[Token]:
        rows = list(self._rows.values())
        new = [row for row in rows if not row.tokens]
        old = [row for row in rows if row.tokens]
        made: list[Token] = []
        for compute, part in ((self._decode, old), (self._prefill, new)):
            if part:
                logits = compute(part)
                made += [
                    self._advance(*each) for each in zip(part, logits, strict=True)
                ]
        return made

    def _advance(self, row: StepRow, logits: Tensor) -> Token:
        request, num_made = row.request, row.request.num_made + len(row.tokens)
        token, logprob = choose_token(logits, request, num_made)
        row.tokens.append(token)
        finish = None
        if token in self._stop_ids or token in request.stop_ids:
            finish = "stop"
        elif len(row.tokens) == request.max_tokens:
            finish = "length"
        if finish is not None:
            del self._rows[request.id]
        return Token(request.id, token, finish, logprob)
