"""The process group of a reducer: connecting, interruptible waits, joined ranks.

Code that waits for other ranks several times is a generator, which yields each work
before it waits for the work. Exhausting the generator blocks at each wait.
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
    """An identifier of a reducer, equal on all of its ranks."""

    set_id: int
    number: int  # unique within the set
    size: int  # number of ranks in the set


class GroupConnector(Protocol):
    """Connects a reducer with its counterparts on other ranks, at its first use.

    ``waits`` has the waits of this process. ``start`` begins to connect and returns the
    sync point of all ranks. ``connect`` is collective; with ``is_watched`` the stall
    inspector watches it. It raises if there is no session, a rank is lost, or the
    ranks' models differ. ``give_up`` makes a running ``connect`` fail.
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
    """The connected ranks of a reducer; also a connector that returns itself."""

    communicator: Communicator  # used by this reducer only
    coordinator: Coordinator | None = None  # watches the reducer's waits
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
    """Exhaust a generator, blocking at each wait; return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def result_of(work: Work[T]) -> Steps[T]:
    yield work
    return work.wait()


class RoundCoroutine:
    """A generator of works that can be interrupted at each wait.

    ``failures`` has the generator's exception. Remove the exception before raising it,
    as its traceback refers to this object and keeps a communicator's memory alive.
    """

    def __init__(self, steps: Steps[None]) -> None:
        self.is_over = False
        self.failures: list[Exception] = []
        self._steps = steps
        self._work: Work[Any] | None = None

    def run(self, poll: PollCallback) -> bool:
        """Run to the end, or until ``poll`` stops a wait; return True at the end."""
        while not self.is_over:
            if self._work is not None and not self._work.wait_watched(poll):
                return False
            self._resume()
        return True

    def progress(self) -> None:
        """Run as far as possible without waiting."""
        while not self.is_over and (self._work is None or self._work.is_done()):
            self._resume()

    def close(self) -> None:
        self.is_over = True
        self._steps.close()

    def _resume(self) -> None:
        try:
            self._work = next(self._steps)
        except StopIteration:
            self.is_over = True
        except Exception as error:  # noqa: BLE001  raised by the owner
            self.is_over = True
            self.failures.append(error)


def run_blocking(waits: Waits, function: Callable[[], T]) -> Steps[T]:
    """Call a function that may block, in a background thread if rounds are postponed.

    Note [Blocking calls]
        Allocating memory and gathering uneven sizes block until all ranks do the same.
        A rank does so at once or, if it has postponed the round, at its next wait. But
        two ranks that block in different postponed rounds would deadlock.
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
    threading.Thread(target=target, name="ronde-blocking", daemon=True).start()
    return (yield from result_of(FutureWork(outcome)))


class JoinParticipant(Protocol):
    """An object that reduces over ranks without a coordinator.

    ``last_round`` is the number of the last reduction that this rank contributed to.
    ``start_connecting`` returns at once. ``participate_with_zeros`` adds zeros until
    all ranks do so, or a reduction fails. ``unbind`` disconnects; with ``is_abrupt``,
    calls in progress fail on all ranks.
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
    """Participate with zeros until all ranks have joined; collective.

    Each participant has a thread, as ranks may use participants in any order. Those
    that do not exist on all ranks, such as an old optimizer that only this rank keeps,
    are disconnected at the end.

    Returns a rank that took the last step, if possible the rank that joined last.
    Raises ``CollectiveError`` if a reduction failed or a rank is lost.
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
        # Before this rank joins, so that it is counted as a participant.
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
        # First those that do not exist on all ranks.
        for each in sorted(threads, key=lambda participant: participant.key in living):
            if each.key not in living:
                each.unbind(is_abrupt=True)
            threads[each].join()
    failures = [error for key, error in errors if key in living]
    errors.clear()  # the tracebacks refer to the list
    if failures:
        raise failures.pop(0)
    num_rounds = [0] * coordinator.size
    for rank, *key, last_round in everyone:
        if ReducerKey(*key) in living and key[2] == coordinator.size:
            num_rounds[rank] += last_round
    most = max(num_rounds)
    return last if num_rounds[last] == most else num_rounds.index(most)
