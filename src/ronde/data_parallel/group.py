"""What connects a reducer to other ranks, and waits for them that can be left.

Work that waits for other ranks again and again is a generator that yields every work
before it waits for it. Whoever merely exhausts it blocks where it must.
"""

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

from ronde.collectives import Communicator, Look, Work
from ronde.collectives.lane import FutureWork
from ronde.collectives.torch_modes import in_mode_of_caller
from ronde.coordination.coordinator import Coordinator
from ronde.coordination.waits import SyncPoint, Waits

T = TypeVar("T")
Steps = Generator[Work[Any], None, T]


class ReducerKey(NamedTuple):
    """Names what reduces over ranks on its own; equal on all ranks that have it.

    Attributes:
        number: Among those of the set.
        size: Number of ranks in the set.
    """

    set_id: int
    number: int
    size: int


class ReducerGroup(NamedTuple):
    """The ranks of a reducer: the ``GroupConnector`` of one that is connected.

    Attributes:
        communicator: Nobody else may use it.
        coordinator: Of the same ranks; sees what is waited for. None shows nobody.
        number: Among the reducers of the set; equal on all ranks.
    """

    communicator: Communicator
    coordinator: Coordinator | None = None
    set_id: int = 0
    number: int = 0

    @property
    def key(self) -> ReducerKey:
        return ReducerKey(self.set_id, self.number, self.communicator.size)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"gradients{self.number or ''}"

    @property
    def waits(self) -> Waits | None:
        return None if self.coordinator is None else self.coordinator.waits

    def start(self) -> SyncPoint:
        coordinator = self.coordinator
        if coordinator is None:
            return SyncPoint(self.set_id, self.name)
        return coordinator.point(self.name)

    def connect(self, *, is_watched: bool = True) -> "Steps[ReducerGroup]":  # noqa: ARG002
        return self
        yield

    def give_up(self) -> None:
        """Do nothing: it is connected."""


class GroupConnector(Protocol):
    """Connects a reducer with its like on the other ranks, when it is first used.

    It fails where there is no session, a rank is gone, or the ranks' models differ.
    """

    @property
    def key(self) -> ReducerKey:
        """Its name, equal on all ranks."""
        ...

    @property
    def waits(self) -> Waits | None:
        """Those of this process; None where nobody sees them."""
        ...

    def start(self) -> SyncPoint:
        """Begin to connect, if that was not done; return where the ranks meet."""
        ...

    def connect(self, *, is_watched: bool = True) -> Steps[ReducerGroup]:
        """Connect; collective. The stall inspector counts it if it is watched."""
        ...

    def give_up(self) -> None:
        """Have a connection that is under way fail on this rank."""
        ...


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
        failure: What ended them, if that was an error.
    """

    def __init__(self, steps: Steps[None]) -> None:
        self.is_over = False
        self.failure: Exception | None = None
        self._steps = steps
        self._work: Work[Any] | None = None

    def run(self, look: Look) -> bool:
        """Go on to the end, or until ``look`` stops it; return whether it is over.

        An error is kept in ``failure``.
        """
        while not self.is_over:
            if self._work is not None and not self._work.wait_watched(look):
                return False
            self._go_on()
        return True

    def progress(self) -> None:
        """Go on as far as that needs no waiting."""
        while not self.is_over and (self._work is None or self._work.is_done()):
            self._go_on()

    def close(self) -> None:
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
