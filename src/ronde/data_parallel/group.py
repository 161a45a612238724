"""What connects a reducer to other ranks, waits that can be left, and joined ranks.

Work that waits for other ranks again and again is a generator that yields every work
before it waits for it. Whoever merely exhausts it blocks where it must.
"""

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

from ronde.collectives import Communicator, Look, Work
from ronde.collectives.lane import FutureWork
from ronde.collectives.torch_modes import in_mode_of_caller
from ronde.coordination.coordinator import Coordinator
from ronde.coordination.waits import SyncPoint, Waits
from ronde.errors import CollectiveError

T = TypeVar("T")
Steps = Generator[Work[Any], None, T]


class ReducerKey(NamedTuple):
    """Names what reduces over ranks on its own; equal on all ranks that have it."""

    set_id: int
    number: int  # among those of the set
    size: int  # ranks in the set


class ReducerGroup(NamedTuple):
    """The ranks of a reducer: the ``GroupConnector`` of one that is connected."""

    communicator: Communicator  # nobody else may use it
    coordinator: Coordinator | None = None  # sees what is waited for
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
    ``waits`` are those of this process; None where nobody sees them. ``start`` begins
    to connect, if that was not done, and returns where the ranks meet. ``connect`` is
    collective; the stall inspector counts it if it is watched. ``give_up`` has a
    connection that is under way fail on this rank.
    """

    @property
    def key(self) -> ReducerKey: ...
    @property
    def waits(self) -> Waits | None: ...
    def start(self) -> SyncPoint: ...
    def connect(self, *, is_watched: bool = True) -> Steps[ReducerGroup]: ...
    def give_up(self) -> None: ...


def run(steps: Steps[T]) -> T:
    """Go through to the end, blocking."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def result_of(work: Work[T]) -> Steps[T]:
    yield work
    return work.wait()


class Resumable:
    """Steps that may be left at any of their waits; ``failure`` is what ended them."""

    def __init__(self, steps: Steps[None]) -> None:
        self.is_over = False
        self.failure: Exception | None = None
        self._steps = steps
        self._work: Work[Any] | None = None

    def run(self, look: Look) -> bool:
        """Go on to the end, or until ``look`` stops it; return whether it is over."""
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
    return (yield from result_of(FutureWork(outcome)))


class JoinProgress(NamedTuple):
    """How far a rank went with one participant: its key, and ``last_round``."""

    set_id: int
    number: int
    size: int
    last_round: int

    @property
    def key(self) -> ReducerKey:
        return ReducerKey(*self[:3])


class JoinParticipant(Protocol):
    """Something that reduces over ranks on its own, outside any coordinator.

    ``last_round`` is the number of the last reduction that this rank added something
    to. ``start_connecting`` begins to connect with the other ranks and returns at once.
    ``participate_with_zeros`` takes part, adding nothing, until all ranks do so, or a
    reduction fails. ``unbind`` leaves the other ranks; if abruptly, what is under way
    fails everywhere.
    """

    @property
    def key(self) -> ReducerKey: ...
    @property
    def last_round(self) -> int: ...
    def start_connecting(self) -> None: ...
    def participate_with_zeros(self) -> None: ...
    def unbind(self, *, is_abrupt: bool = False) -> None: ...


def participate_until_all_joined(
    participants: Iterable[JoinParticipant],
    *,
    join: Callable[[], int],
    exchange: Callable[[list[JoinProgress]], list[list[JoinProgress]]],
) -> int:
    """Take part with zeros until all have joined; collective.

    Each participant has a thread: they need each other in no order. One that another
    rank has given up already is never called by anybody again. Here it may still be
    there, say because only this rank keeps an old optimizer; its thread waits in vain,
    until it is given up too.

    Args:
        participants: What this rank has.
        join: Returns once all ranks have joined, with the one that did so last.
        exchange: Returns what every rank gives it, by rank; called after that.

    Returns:
        The rank that went on longest: of those that took part in the last step the one
        that ``join`` returned, if it is one of them. Steps are not negotiated, so news
        of who has joined may be overtaken by them.

    Raises:
        CollectiveError: A reduction failed, or a rank is gone.
    """
    threads: dict[JoinParticipant, threading.Thread] = {}
    errors: list[tuple[ReducerKey, CollectiveError]] = []
    living: set[ReducerKey] = set()

    def participate(participant: JoinParticipant) -> None:
        try:
            participant.participate_with_zeros()
        except CollectiveError as error:
            errors.append((participant.key, error))

    for each in participants:
        # Before this rank joins: where it asks for nothing, it has nothing to give.
        each.start_connecting()
        threads[each] = threading.Thread(
            target=participate, args=(each,), name="ronde-join", daemon=True
        )
        threads[each].start()
    try:
        last = join()
        everyone = exchange([JoinProgress(*p.key, p.last_round) for p in threads])
        counts = Counter(each.key for progress in everyone for each in progress)
        living.update(key for key, number in counts.items() if number == key.size)
    finally:
        for each, thread in threads.items():
            if each.key not in living:
                each.unbind(is_abrupt=True)
                thread.join()
        for thread in threads.values():
            thread.join()
    for key, error in errors:
        if key in living:
            raise error
    size = len(everyone)
    num_rounds = [
        sum(p.last_round for p in progress if p.key in living and p.size == size)
        for progress in everyone
    ]
    most = max(num_rounds)
    return last if num_rounds[last] == most else num_rounds.index(most)
