"""A thread that carries collectives out, in the order of the calls."""

from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from ronde.collectives.communicator import Communicator
from ronde.collectives.engines.scheduled.executor import Executor
from ronde.errors import CollectiveError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Lane:
    """One thread and the communicator whose messages it alone sends and receives.

    Once a collective has failed all later ones do, and the communicator is closed:
    ranks that are not waiting for the one that is gone learn of it by that.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._executor = Executor(communicator)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ronde-scheduled")
        self._failure: CollectiveError | None = None
        self._is_closed = False

    def submit(self, name: str, steps: Callable[[Executor], T]) -> "LaneWork[T]":
        """Call ``steps`` once all earlier ones are over.

        Args:
            name: What they are, for the error that says how they failed.
            steps: What the thread is to do.

        Raises:
            CollectiveError: The lane is closed.
        """
        self.require_open()
        return LaneWork(self._thread.submit(self._call, name, steps))

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
        """End thread and communicator; what is under way fails."""
        self._is_closed = True
        # First what waits for the thread: it shall not begin once the message fails.
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._communicator.close()
        self._thread.shutdown()

    def _call(self, name: str, steps: Callable[[Executor], T]) -> T:
        if self._failure is not None:
            raise self._failure
        try:
            return steps(self._executor)
        except CollectiveError as error:
            if self._is_closed:
                raise CollectiveError(
                    f"{name} must be over before close(), got a closed communicator. "
                    "Wait for every work first."
                ) from error
            self._failure = type(error)(f"{name}: {error}")
            self._communicator.close()
            raise self._failure from error


class LaneWork(Generic[T_co]):
    """A collective that a lane does."""

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
            return self._outcome.result()
        except CancelledError as error:
            raise CollectiveError(
                "every work must be over before close(), got a closed communicator. "
                "Wait for every work first."
            ) from error
