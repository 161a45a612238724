"""What this process waits for: its operations, and ranks that wait for each other.

Note [Ranks that wait for each other]
    Requests have names and may come in any order. Rounds of gradients are not
    negotiated: ``backward()`` waits until all ranks have come to the same round. So one
    rank may wait in a round for another that waits in a request of which the first does
    not know, or in another optimizer's round. Horovod's ``backward()`` does not wait.

    Whoever has waited for longer than its patience publishes what for, and has the root
    ask everyone twice: what it waits for, and whether it has come to what the others
    wait for. A wait counts if it was there both times, and a rank if all threads that
    ever waited or submitted anything are in such waits: so all of it was true at one
    time, between the questions, and slow ranks are never taken for stuck ones. Where
    ranks wait for each other in a circle, those in ``backward()`` *give way*: it
    returns, and its round goes on whenever the thread waits for anything else, to its
    end at ``step()`` or ``synchronize()`` at the latest.

    The first time this takes ``_FIRST_PATIENCE_S``; from then on, everyone asks sooner.
    Where orders agree nothing is published, asked or sent.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple, Self

from ronde.coordination.requests import CONNECT_PREFIX, Entry, NamedOperation, OpKind
from ronde.errors import CollectiveError, UnpairedError, UsageError, fresh

_logger = logging.getLogger("ronde")
_IN_FLIGHT = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as "
    "another tensor that is currently being processed.  If you want to request another "
    "tensor, use a different tensor name."
)
_GAVE_WAY = (
    "backward() returned before its gradients were reduced (it waited in %s), because "
    "%s. The gradients are complete after optimizer.step() or optimizer.synchronize(); "
    "call synchronize() before you read or change them. This warning is shown once."
)
_FIRST_PATIENCE_S = 0.25
_LATER_PATIENCE_S = 0.002
_LONGEST_PATIENCE_S = 5.0
_DRIVE_EVERY_S = 0.001
_EXPECT_ANSWER_S = 0.1
_LISTEN_EVERY_S = 0.002
_LISTEN_RARELY_S = 0.02


class PendingTable:
    """A process set's operations that have no result yet, by name; any thread."""

    def __init__(self) -> None:
        self.failure: CollectiveError | None = None  # why nothing can be done any more
        self.has_joined = False  # this rank
        self._entries: dict[str, Entry] = {}
        self.find = self._entries.get
        self._watches: list[tuple[str, int]] = []
        self._numbers = defaultdict[tuple[OpKind, bool], "count[int]"](count)
        self._lock = threading.Lock()

    def name(self, operation: NamedOperation) -> str:
        numbers = self._numbers[operation.kind, operation.is_group]
        return operation.wire_name(0 if operation.name else next(numbers))

    def all_joined(self) -> None:
        self.has_joined = False
        self._numbers.clear()  # those that joined early have submitted fewer

    def add(self, entry: Entry) -> None:
        """Enter an operation, if its name is free and nothing has failed."""
        with self._lock:
            if self.failure is not None:
                raise fresh(self.failure)
            if self._entries.setdefault(entry.name, entry) is not entry:
                raise UsageError(_IN_FLIGHT)

    def has_one(self) -> bool:
        return len(self._entries) == 1

    def take(self, name: str) -> Entry | None:
        """Return an operation, whose name may be used again, or None."""
        with self._lock:
            return self._entries.pop(name, None)

    def fail(self, failure: CollectiveError) -> None:
        """Fail all that is under way and to come; the first reason stays."""
        with self._lock:
            if self.failure is None:
                self.failure = failure
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in entries:
            entry.fail(self.failure)

    @contextmanager
    def watch(self, name: str) -> Generator[None]:
        watched = name, time.monotonic_ns()
        self._watches.append(watched)
        try:
            yield
        finally:
            self._watches.remove(watched)

    def is_empty(self) -> bool:
        return not (self._entries or self._watches)

    def waiting(self) -> dict[str, float]:
        """Return for how many seconds each name is waited for, the oldest first."""
        with self._lock:
            entries = list(self._entries.values())
        now = time.monotonic_ns()
        # Whoever waits to connect watches that; who has joined does not mind.
        since = {
            e.name: now if e.operation.kind is OpKind.CONNECT else e.submitted_ns
            for e in entries
        }
        since |= dict(self._watches.copy())
        oldest_first = sorted(since.items(), key=lambda item: item[1])
        return {name: (now - at_ns) * 1e-9 for name, at_ns in oldest_first}


class SyncPoint(NamedTuple):
    """Where all ranks of a process set meet: a request, or a round of gradients.

    ``number`` is the round's; 0 for a request. ``ranks`` are the set's; empty for all.
    """

    set_id: int
    name: str
    number: int = 0
    ranks: tuple[int, ...] = ()

    @property
    def is_connect(self) -> bool:
        return not self.number and self.name.startswith(CONNECT_PREFIX)


class BlockedWait(NamedTuple):
    """A wait, as other ranks see it; ``wait_id`` is used once on its rank."""

    wait_id: int
    point: SyncPoint
    can_give_way: bool


class Waiting:
    """One wait: the ``Look`` that ``thread`` calls until it is over or gives way."""

    def __init__(
        self, waits: "Waits", point: SyncPoint, thread: int, *, can_give_way: bool
    ) -> None:
        self.point = point
        self.thread = thread
        self.can_give_way = can_give_way
        self.gives_way = False
        self.number = 0
        self._waits = waits
        self._patience_s = self._ask_at_s = self._answer_by_s = 0.0

    def move_to(self, point: SyncPoint) -> None:
        self._waits.withdraw(self)
        self.point = point

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._waits.withdraw(self)

    def __call__(self) -> float | None:
        """Ask when patience is over, and drive what was put off: see ``Look``."""
        waits = self._waits
        has_put_off = waits.drive()
        if self.gives_way:
            return None
        now = time.monotonic()
        if not self._patience_s:
            self._patience_s = waits.patience_s
            self._ask_at_s = now + self._patience_s
        if now >= self._ask_at_s:
            waits.publish(self)
            waits.ask_all()
            self._patience_s = min(2 * self._patience_s, _LONGEST_PATIENCE_S)
            self._ask_at_s = now + self._patience_s
            self._answer_by_s = now + _EXPECT_ANSWER_S
        pause_s = self._ask_at_s - now
        if has_put_off:
            pause_s = min(pause_s, _DRIVE_EVERY_S)
        if self.number and self.can_give_way:
            is_soon = now < self._answer_by_s
            pause_s = min(pause_s, _LISTEN_EVERY_S if is_soon else _LISTEN_RARELY_S)
        return pause_s


class Waits:
    """The waits of one process in one session; any thread may call it."""

    def __init__(self) -> None:
        self.patience_s = _FIRST_PATIENCE_S  # after so long a wait is looked into
        self.ask_all: Callable[[], None] = lambda: None  # has the root look into all
        self._has_warned = False
        self._numbers = count(1)
        self._published: dict[int, Waiting] = {}
        self._users: set[int] = set()
        self._begun: dict[tuple[int, str], int] = {}
        self._tables = defaultdict[int, PendingTable](PendingTable)
        self.table = self._tables.__getitem__  # by the set's number
        self._put_off: dict[Callable[[], None], int] = {}

    def add_user(self) -> None:
        self._users.add(threading.get_ident())

    def begin(self, point: SyncPoint) -> None:
        """Note that this rank has come to a round, and will see it through."""
        self._begun[point.set_id, point.name] = point.number

    def waiting(
        self, point: SyncPoint, thread: int | None = None, *, can_give_way: bool = False
    ) -> Waiting:
        """Return the ``Look`` of a wait that ``thread``, or else this one, begins."""
        thread = threading.get_ident() if thread is None else thread
        return Waiting(self, point, thread, can_give_way=can_give_way)

    def publish(self, waiting: Waiting) -> None:
        if not waiting.number:
            waiting.number = next(self._numbers)
            self._published[waiting.number] = waiting

    def withdraw(self, waiting: Waiting) -> None:
        """Have nobody see a wait any more: it is over."""
        self._published.pop(waiting.number, None)
        waiting.number = 0

    def put_off(self, progress: Callable[[], None], thread: int) -> None:
        """Have ``thread`` call it when it waits; it never waits or raises itself."""
        self._put_off[progress] = thread

    def take_up(self, progress: Callable[[], None]) -> None:
        self._put_off.pop(progress, None)

    @property
    def has_put_off(self) -> bool:
        """Whether a round of this rank gave way and is not over."""
        return bool(self._put_off)

    def drive(self) -> bool:
        """Make progress on this thread's rounds; return whether there are any."""
        for progress, thread in list(self._put_off.items()):
            if thread == threading.get_ident():
                progress()
        return self.has_put_off

    def answer(
        self, points: Sequence[SyncPoint]
    ) -> list[BlockedWait] | tuple[list[int], list[bool]]:
        """Return all waits; or which there are still, and which points it came to."""
        blocked = self._blocked()
        if not points:
            return blocked
        still = [each.wait_id for each in blocked]
        return still, [self._has_come_to(point) for point in points]

    def _blocked(self) -> list[BlockedWait]:
        """Return all waits; none where some thread may still do something else."""
        published = list(self._published.values())
        users = frozenset(self._users)
        self._users -= users - {thread.ident for thread in threading.enumerate()}
        is_stuck = self._users <= {waiting.thread for waiting in published}
        if self._tables[0].has_joined or not is_stuck:
            return []
        if not all(self._has_come_to(waiting.point) for waiting in published):
            return []  # one is over, and its thread about to go on
        return [BlockedWait(w.number, w.point, w.can_give_way) for w in published]

    def give_way(self, wait_ids: Sequence[int], others: str) -> None:
        """Have waits give way, and look into the next ones sooner.

        One that cannot is of ranks that wait to connect, each with others: what it
        waits for fails. ``others`` tells the log who waits for what meanwhile.
        """
        self.patience_s = _LATER_PATIENCE_S
        found = [self._published.get(wait_id) for wait_id in wait_ids]
        for waiting in filter(None, found):
            set_id, name, *_ = waiting.point
            if waiting.can_give_way:
                if not self._has_warned:
                    self._has_warned = True
                    _logger.warning(_GAVE_WAY, name, others)
                waiting.gives_way = True
            elif entry := self.table(set_id).take(name):
                entry.fail(UnpairedError(f"{name} is not what all ranks wait for."))

    def _has_come_to(self, point: SyncPoint) -> bool:
        if point.number:
            return self._begun.get((point.set_id, point.name), 0) >= point.number
        table = self._tables.get(point.set_id)
        return table is not None and table.find(point.name) is not None
