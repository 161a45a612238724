"""Work that waits for other ranks again and again, and can be left and taken up.

It is a generator that yields every work before it waits for it. Whoever merely exhausts
it blocks where it must.
"""

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from ronde.collectives import Look, Work
from ronde.collectives.lane import FutureWork
from ronde.collectives.torch_modes import in_mode_of_caller
from ronde.coordination.waits import Waits

T = TypeVar("T")
Steps = Generator[Work[Any], None, T]


def run(steps: Steps[T]) -> T:
    """Go through to the end, blocking."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


class Resumable:
    """Steps that may be left at any of their waits.

    Attributes:
        is_over: Whether there is nothing left to do.
        failure: What ended them, if that was an error.
    """

    def __init__(self, steps: Steps[None]) -> None:
        self.is_over = False
        self.failure: Exception | None = None
        self._steps = steps
        self._work: Work[Any] | None = None

    def run(self, look: Look) -> bool:
        """Go on to the end, or until ``look`` says to stop; say whether it is over.

        An error is kept in ``failure``.
        """
        while not self.is_over:
            if self._work is not None and not self._work.wait_watched(look):
                return False
            self._go_on()
        return True

    def carry_on(self) -> None:
        """Go on as far as that needs no waiting."""
        while not self.is_over and (self._work is None or self._work.is_done()):
            self._go_on()

    def close(self) -> None:
        """Give up."""
        self.is_over = True
        self._steps.close()

    def _go_on(self) -> None:
        try:
            self._work = next(self._steps)
        except StopIteration:
            self.is_over = True
        except Exception as error:  # noqa: BLE001  raised by whoever owns the steps
            self.is_over = True
            self.failure = error


def aside(waits: Waits | None, function: Callable[[], T]) -> Steps[T]:
    """Call what may block, in a thread where this rank has something else to do.

    Note [What may block]
        Allocating, and gathering of uneven sizes, block until all ranks do so. All have
        come to the round here, so each gets there: at once, or where it has put the
        round off, whenever it waits for anything. But were two ranks to block in two
        rounds that they had put off, each would keep the other waiting.
    """
    if waits is None or not waits.has_put_off:
        return function()
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            outcome.set_exception(error)

    thread = threading.Thread(
        target=in_mode_of_caller(call), name="ronde-aside", daemon=True
    )
    thread.start()
    work = FutureWork(outcome)
    yield work
    return work.wait()
