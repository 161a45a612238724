"""Collectives of torch's under way."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

from ronde.collectives.engine import Look, Work
from ronde.collectives.error_context import ErrorContext

_FOR_EVER = timedelta(0)
"""What torch takes for it."""
_SHORTEST_PAUSE_S = 0.001


class Pending(Protocol):
    """The part of ``torch.distributed.Work`` that is used here."""

    def is_completed(self) -> bool:
        """Say whether the bytes have arrived."""
        ...

    def wait(self, timeout: timedelta = _FOR_EVER) -> object:
        """Block until they have; raises ``RuntimeError`` after the timeout."""
        ...


class TorchWork(Work[None]):
    """One or more of torch's works and what is left to do after them.

    Only one thread at a time may wait for it.
    """

    __slots__ = ("_after", "_context", "_pending")

    def __init__(
        self,
        pending: Sequence[Pending],
        context: ErrorContext,
        after: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(None, is_over=False)
        self._pending = pending
        self._context = context
        self._after = after

    def _poll(self) -> bool:
        return all(pending.is_completed() for pending in self._pending)

    def _block(self, look: Look | None) -> bool:
        if look is not None:
            # Only wait() orders the stream that is current then.
            return self._watch(look)
        try:
            for pending in self._pending:
                pending.wait()
        except RuntimeError as error:
            self.failure = self._context.explain(error)
            self.failure.__cause__ = error
        else:
            if self._after is not None:
                self._after()
        self.is_over = True
        self._pending, self._after = (), None
        return True

    def _watch(self, look: Look) -> bool:
        """Wait until all is there or ``look`` says to stop."""
        for pending in self._pending:
            while not pending.is_completed():
                pause_s = look()
                if pause_s is None:
                    return False
                with suppress(RuntimeError):  # also of a failure: it is raised later
                    pause_s = max(pause_s, _SHORTEST_PAUSE_S)
                    pending.wait(timedelta(seconds=pause_s))
        return True


class Awaited:
    """A send or receive: torch tells only whoever waits that it is over.

    So a thread waits, from the first ``is_completed()`` on.
    """

    __slots__ = ("_inner", "_outcome")

    def __init__(self, inner: Pending) -> None:
        self._inner = inner
        self._outcome: Future[object] | None = None

    def is_completed(self) -> bool:
        """Say whether the waiting thread is through; start it."""
        if self._outcome is None:
            self._outcome = Future()
            threading.Thread(
                target=self._wait_into, args=(self._outcome,), daemon=True
            ).start()
        return self._outcome.done()

    def wait(self, timeout: timedelta = _FOR_EVER) -> object:
        """Block until the bytes are there, or gone."""
        if self._outcome is None:
            return self._inner.wait(timeout)
        return _result(self._outcome, timeout)

    def _wait_into(self, outcome: Future[object]) -> None:
        try:
            outcome.set_result(self._inner.wait())
        except RuntimeError as error:
            outcome.set_exception(error)


class Submitted:
    """Pending work that a thread of ours does."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: Future[None]) -> None:
        self._outcome = outcome

    def is_completed(self) -> bool:
        """Say whether the thread has done it."""
        return self._outcome.done()

    def wait(self, timeout: timedelta = _FOR_EVER) -> object:
        """Block until the thread has done it; raise what it raised."""
        try:
            return _result(self._outcome, timeout)
        except CancelledError as error:
            raise RuntimeError("the communicator was closed") from error


def _result(outcome: Future[Any], timeout: timedelta) -> object:
    if timeout and not wait((outcome,), timeout.total_seconds()).done:
        raise RuntimeError("Operation timed out!")
    return outcome.result()
