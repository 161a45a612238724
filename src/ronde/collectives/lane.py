"""A thread that carries out what takes several steps, in the order of the calls."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from ronde.collectives.communicator import Communicator, Look
from ronde.collectives.inference import in_mode_of_caller
from ronde.errors import CollectiveError, fresh

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Lane:
    """One thread and the communicators that it alone calls.

    Once a collective has failed all later ones do, and the communicators are closed:
    ranks that wait for this one, and not for the one that is gone, learn of it so.
    """

    def __init__(self, *communicators: Communicator) -> None:
        self._communicators = communicators
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ronde-lane")
        self._lock = threading.Lock()
        self._failure: CollectiveError | None = None
        self._is_busy = False
        self._is_closed = False

    def submit(self, name: str, steps: Callable[[], T]) -> "FutureWork[T]":
        """Call ``steps`` once all earlier ones are over.

        Args:
            name: What they are, for the error that says how they failed.
            steps: What the thread is to do.

        Raises:
            CollectiveError: The lane is closed.
        """
        self.require_open()
        return FutureWork(
            self._thread.submit(in_mode_of_caller(self._call), name, steps)
        )

    def require_open(self) -> None:
        """Refuse once closed.

        Raises:
            CollectiveError: The lane is closed.
        """
        if self._is_closed:
            raise CollectiveError(
                "communicator must be open, got a closed one. Connect again."
            )

    def close(self) -> None:
        """End thread and communicators; what is under way fails."""
        # Nothing else ends a message that the thread waits for.
        self._end(is_abrupt=self._stop())

    def abort(self) -> None:
        """End thread and communicators, and tell the other ranks."""
        self._stop()
        self._end(is_abrupt=True)

    def _stop(self) -> bool:
        """Let nothing begin any more; say whether something is under way."""
        with self._lock:
            self._is_closed = True
            is_busy = self._is_busy
        self._thread.shutdown(wait=False, cancel_futures=True)
        return is_busy

    def _end(self, *, is_abrupt: bool) -> None:
        for communicator in self._communicators:
            if is_abrupt:
                communicator.abort()
            else:
                communicator.close()
        self._thread.shutdown()

    def _call(self, name: str, steps: Callable[[], T]) -> T:
        with self._lock:
            if self._is_closed:
                raise _closed_under(name)
            if self._failure is not None:
                raise fresh(self._failure)
            self._is_busy = True
        try:
            return steps()
        except CollectiveError as error:
            if self._is_closed:
                raise _closed_under(name) from error
            self._failure = type(error)(f"{name}: {error}")
            for communicator in self._communicators:
                communicator.abort()
            raise fresh(self._failure) from error
        finally:
            self._is_busy = False


class FutureWork(Generic[T_co]):
    """What another thread carries out."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: Future[T_co]) -> None:
        self._outcome = outcome

    def is_done(self) -> bool:
        """Say whether ``wait()`` would return without blocking."""
        return self._outcome.done()

    def wait(self) -> T_co:
        """Block until the thread has done it and return the result; again, later.

        Raises:
            CollectiveError: It failed, or the communicator was closed before.
        """
        try:
            failure = self._outcome.exception()
        except CancelledError as error:
            raise _closed_under("a work") from error
        if failure is not None:
            raise fresh(failure)
        return self._outcome.result()

    def wait_watched(self, look: Look) -> bool:
        """Block until it is over or ``look`` says to stop: see ``Work``."""
        while not self._outcome.done():
            pause_s = look()
            if pause_s is None:
                return False
            wait((self._outcome,), pause_s)
        return True


def _closed_under(name: str) -> CollectiveError:
    return CollectiveError(
        f"{name} must be over before close(), got a closed communicator. Wait for "
        "every work first."
    )
