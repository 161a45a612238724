"""What connects a reducer to other ranks, waits that can be left, and joined ranks.

Work that waits for other ranks again and again is a generator that yields every work
before it waits for it. Whoever merely exhausts it blocks where it must.
"""

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch

from ronde.collectives import Communicator, PollCallback, Work
from ronde.collectives.lane import FutureWork
from ronde.collectives.torch_modes import in_mode_of_caller
from ronde.coordination.coordinator import Coordinator
from ronde.coordination.requests import NamedOperation, OpKind
from ronde.coordination.waits import SyncPoint, Waits
from ronde.errors import CollectiveError

T = TypeVar("T")
Steps = Generator[Work[Any], None, T]


class ReducerKey(NamedTuple):
    """Names what reduces over ranks on its own; equal on all ranks that have it."""

    set_id: int
    number: int  # among those of the set
    size: int  # ranks in the set


class GroupConnector(Protocol):
    """Connects a reducer with its like on the other ranks, when it is first used.

    It fails where there is no session, a rank is gone, or the ranks' models differ.
    ``waits`` are this process's. ``start`` begins to connect and returns where the
    ranks meet. ``connect`` is collective; the stall inspector counts it if it is
    watched. ``give_up`` fails one that is under way.
    """

    @property
    def key(self) -> ReducerKey: ...
    @property
    def waits(self) -> Waits: ...
    def start(self) -> SyncPoint: ...
    def connect(self, *, is_watched: bool = True) -> "Steps[ReducerGroup]": ...
    def give_up(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReducerGroup:
    """The ranks of a reducer: the ``GroupConnector`` of one that is connected."""

    communicator: Communicator  # nobody else may use it
    coordinator: Coordinator | None = None  # sees what is waited for
    set_id: int = 0
    number: int = 0
    waits: Waits = field(default_factory=Waits)  # this process's

    @property
    def key(self) -> ReducerKey:
        return ReducerKey(self.set_id, self.number, self.communicator.size)

    @property
    def name(self) -> str:
        return f"gradients{self.number or ''}"

    def start(self) -> SyncPoint:
        if self.coordinator is None:
            return SyncPoint(self.set_id, self.name)
        return self.coordinator.point(self.name)

    def connect(self, *, is_watched: bool = True) -> "Steps[ReducerGroup]":  # noqa: ARG002
        return self
        yield

    def give_up(self) -> None:
        pass


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
    """Steps that may be left at any of their waits.

    ``failures`` has what ended them. Whoever raises it takes it out: its traceback
    holds this, and a communicator with all its memory, until Python looks for cycles.
    """

    def __init__(self, steps: Steps[None]) -> None:
        self.is_over = False
        self.failures: list[Exception] = []
        self._steps = steps
        self._work: Work[Any] | None = None

    def run(self, poll: PollCallback) -> bool:
        """Continue until over or ``poll`` stops it; return True if it is over."""
        while not self.is_over:
            if self._work is not None and not self._work.wait_watched(poll):
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
            self.failures.append(error)


def aside(waits: Waits, function: Callable[[], T]) -> Steps[T]:
    """Call what may block, in a thread where this rank has something else to do.

    Note [What may block]
        Allocating, and gathering of uneven sizes, block until all ranks do so. All come
        to it: at once, or where they have put the round off, whenever they wait for
        anything. But two ranks that block in two rounds that they had put off would
        keep each other waiting.
    """
    if not waits.put_off:
        return function()
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            outcome.set_exception(error)

    target = in_mode_of_caller(call)
    threading.Thread(target=target, name="ronde-aside", daemon=True).start()
    return (yield from result_of(FutureWork(outcome)))


class JoinParticipant(Protocol):
    """Something that reduces over ranks on its own, outside any coordinator.

    ``last_round`` is the number of the last reduction that this rank added something
    to. ``start_connecting`` returns at once. ``participate_with_zeros`` adds nothing,
    until all ranks do so, or a reduction fails. ``unbind`` leaves the other ranks; if
    abruptly, what is under way fails everywhere.
    """

    @property
    def key(self) -> ReducerKey: ...
    @property
    def last_round(self) -> int: ...
    def start_connecting(self) -> None: ...
    def participate_with_zeros(self) -> None: ...
    def unbind(self, *, is_abrupt: bool = False) -> None: ...


def participate_until_all_joined(
    participants: Iterable[JoinParticipant], coordinator: Coordinator
) -> int:
    """Take part with zeros until all ranks have joined; collective.

    Each participant has a thread: they need each other in no order. One that another
    rank has given up, such as an old optimizer that only this rank keeps, waits in vain
    until it is given up here, too.

    Returns the rank that went on longest: of those that took part in the last step the
    one that joined last, if it is one of them. Raises ``CollectiveError`` where a
    reduction failed or a rank is gone.
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
        last: int = coordinator.run(NamedOperation(OpKind.JOIN))
        rows = [(coordinator.rank, *p.key, p.last_round) for p in threads]
        sent = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 5)
        operation = NamedOperation(OpKind.ALLGATHER, (sent,), "join.standings")
        (gathered,) = coordinator.run(operation)
        everyone = cast("list[list[int]]", gathered.tolist())
        counts = Counter(ReducerKey(*row[1:4]) for row in everyone)
        living.update(key for key, number in counts.items() if number == key.size)
    finally:
        # First those that wait in vain.
        for each in sorted(threads, key=lambda participant: participant.key in living):
            if each.key not in living:
                each.unbind(is_abrupt=True)
            threads[each].join()
    failures = [error for key, error in errors if key in living]
    errors.clear()  # it is in the tracebacks of those in it
    if failures:
        raise failures.pop(0)
    num_rounds = [0] * coordinator.size
    for rank, *key, last_round in everyone:
        if ReducerKey(*key) in living and key[2] == coordinator.size:
            num_rounds[rank] += last_round
    most = max(num_rounds)
    return last if num_rounds[last] == most else num_rounds.index(most)
