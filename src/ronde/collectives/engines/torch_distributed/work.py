"""Collectives of torch's under way."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from ronde.collectives.communicator import Look
from ronde.collectives.failures import Scene
from ronde.errors import CollectiveError, fresh

T_co = TypeVar("T_co", covariant=True)
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


class TorchWork(Generic[T_co]):
    """One or more of torch's works and what is left to do after them.

    Only one thread at a time may wait for it.
    """

    __slots__ = ("_failure", "_finish", "_pending", "_result", "_scene")
    _result: T_co

    def __init__(
        self, pending: Sequence[Pending], finish: Callable[[], T_co], scene: Scene
    ) -> None:
        self._pending = pending
        self._finish: Callable[[], T_co] | None = finish
        self._scene = scene
        self._failure: CollectiveError | None = None

    def is_done(self) -> bool:
        """Say whether ``wait()`` would return without blocking."""
        return self._finish is None or all(p.is_completed() for p in self._pending)

    def wait(self) -> T_co:
        """Block until the result is there and return it; later calls return it again.

        Raises:
            CollectiveError: The collective failed; every later call raises it again.
        """
        if self._finish is not None:
            if self._failure is not None:
                raise fresh(self._failure)
            try:
                for pending in self._pending:
                    pending.wait()
            except RuntimeError as error:
                self._failure = self._scene.explain(error)
                self._failure.__cause__ = error
                raise fresh(self._failure) from error
            self._result = self._finish()
            self._finish = None
            self._pending = ()
        return self._result

    def wait_watched(self, look: Look) -> bool:
        """Block until it is over or ``look`` says to stop: see ``Work``."""
        for pending in self._pending:
            while not pending.is_completed():
                pause_s = look()
                if pause_s is None:
                    return False
                with suppress(RuntimeError):  # also of a failure: wait() raises it
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
