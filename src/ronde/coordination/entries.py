"""Operations under way on this rank."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ronde.collectives import Look, Work
from ronde.coordination.operations import Operation
from ronde.coordination.streams import Mark, keep_for_current_stream, mark_of


class Driver(Protocol):
    """Who carries operations on."""

    def finish(self, entry: "Entry", look: Look | None = None) -> None:
        """Carry on until ``entry`` is over, or ``look`` says to stop."""
        ...

    def stir(self) -> None:
        """See to it that somebody carries on, soon, without waiting."""
        ...


class Entry(Work[Any]):
    """One operation under way.

    Attributes:
        name: On the wire.
        operation: What was asked for.
        submitted_ns: When, by ``time.monotonic_ns()``.
        ready: From where on the inputs are there, on an accelerator; else None.
        done: From where on the outputs are, likewise.
    """

    __slots__ = (
        "_driver",
        "done",
        "name",
        "operation",
        "ready",
        "submitted_ns",
    )

    def __init__(self, driver: Driver, name: str, operation: Operation) -> None:
        super().__init__(None, is_over=False)
        self._driver = driver
        self.name = name
        self.operation = operation
        self.submitted_ns = time.monotonic_ns()
        self.ready = mark_of(operation.tensors)
        self.done: Mark | None = None

    def _poll(self) -> bool:
        self._driver.stir()
        return False

    def _block(self, look: Look | None) -> bool:
        self._driver.finish(self, look)
        return self.is_over

    def wait(self) -> Any:  # noqa: ANN401 - each operation's own
        """Block until the result is there and return it: see ``Work``."""
        result = super().wait()
        if self.done is not None:
            self.done.order()
            if not self.operation.outputs:
                # New tensors, from the stream of whoever carried it out.
                made: Sequence[Any] = result or ()
                tensors = [
                    each if isinstance(each, Tensor) else each[0] for each in made
                ]
                keep_for_current_stream(tensors)
        return result

    def connect(self, number: int) -> None:
        """Be over, with what a CONNECT makes and its number.

        Raises:
            CollectiveError: The ranks could not connect.
        """
        make = self.operation.connect
        if make is None:
            raise AssertionError(f"{self.name} connects nothing")
        with torch.inference_mode(False):  # noqa: FBT003 - it outlives the call
            self.succeed((make(number), number))

    def succeed(self, result: object) -> None:
        """Be over, with a result."""
        self._result = result
        if self.ready is not None:
            self.done = Mark(self.ready.device)
        self.is_over = True

    def fail(self, failure: Exception) -> None:
        """Be over, with an error."""
        self.failure = failure
        self.is_over = True
