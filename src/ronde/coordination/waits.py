"""The pending operations of this process, and deadlocks between ranks.

Note [Ranks that wait for each other]
    Requests have names, so their order may differ between ranks. Rounds of gradients
    are not negotiated: ``backward()`` waits until all ranks are in the same round. So a
    rank may wait in a round for another rank, which waits in a request that the first
    has not made, or in another optimizer's round. Horovod's ``backward()`` does not
    wait.

    A wait that exceeds its patience is published. Then the root sends all ranks two
    inquiries. The first asks for their published waits. The second asks again, and asks
    for those of the awaited points that each rank has reached. A wait counts if both
    answers include it. A rank counts if all its threads that ever waited or submitted
    are in such waits. So all these waits existed at the same moment, and a slow rank is
    never mistaken for a blocked one. If ranks wait in a circle, those in ``backward()``
    *give way*: ``backward()`` returns, and its round continues in later waits of the
    thread, until ``step()`` or ``synchronize()``. From then on all waits have less
    patience. With equal orders on all ranks nothing is published.

Note [Inquiries]
    A rank that waits long makes the root send one of two inquiries to all ranks,
    through the messages of the negotiation. ``STALLS``: which operations has this rank
    submitted, and at what age? An operation that some ranks never submit is a stall, of
    which the root warns and for which it may end the job, as in Horovod. ``WAITS``:
    which waits block all threads of this rank? Then: which of the points that blocked
    ranks wait for has it reached?
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, NamedTuple, Self

from ronde.collectives.scope import AbortScope
from ronde.coordination.messages import format_ranks
from ronde.coordination.node import GiveWayCommand, ReportCommand, RootNode, StopCommand
from ronde.coordination.requests import CONNECT_PREFIX, Entry, NamedOperation, OpKind
from ronde.errors import CollectiveError, UnpairedError, UsageError, fresh
from ronde.status.reporter import Part, add_source
from ronde.status.values import PendingCollective

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
STALLS, WAITS = "stalls", "waits"
_ANSWER_WITHIN_S = {STALLS: 2.0, WAITS: 0.5}
"""Time for answers; a rank that is too busy to answer is not blocked."""
_MOST_NAMES = 64
_NAMES_SHOWN = 6


class PendingTable:
    """Thread-safe table of the pending operations of a process set."""

    def __init__(self) -> None:
        self.failure: CollectiveError | None = None  # of later operations
        self.has_joined = False  # this rank has joined
        self.entries: dict[str, Entry] = {}
        # Name, begin (``monotonic_ns``), number and bytes.
        self.watches: list[tuple[str, int, int, int]] = []
        self.ranks: tuple[int, ...] = ()  # of the process set; empty for all
        self._numbers = defaultdict[tuple[OpKind, bool], "count[int]"](count)
        self._lock = threading.Lock()

    def name(self, operation: NamedOperation) -> str:
        if operation.name:
            return operation.wire_name(0)
        number = next(self._numbers[operation.kind, operation.is_group])
        return operation.wire_name(number)

    def all_joined(self) -> None:
        self.has_joined = False
        self._numbers.clear()  # ranks that joined early have submitted fewer

    def add(self, entry: Entry) -> None:
        with self._lock:
            if self.failure is not None:
                raise fresh(self.failure)
            if self.entries.setdefault(entry.name, entry) is not entry:
                raise UsageError(_IN_FLIGHT)

    def pop(self, name: str) -> Entry | None:
        with self._lock:
            return self.entries.pop(name, None)

    def fail(self, failure: CollectiveError, *, is_last: bool = False) -> None:
        """Fail current and later operations; ``is_last`` replaces an earlier reason."""
        with self._lock:
            if self.failure is None or is_last:
                self.failure = failure
            entries = list(self.entries.values())
            self.entries.clear()
        for entry in entries:
            entry.fail(self.failure)

    @contextmanager
    def watch(self, name: str, number: int = 0, num_bytes: int = 0) -> Generator[None]:
        watched = name, time.monotonic_ns(), number, num_bytes
        self.watches.append(watched)
        try:
            yield
        finally:
            self.watches.remove(watched)

    def ages_s(self) -> dict[str, float]:
        """Return the age of each name in seconds, the oldest first."""
        with self._lock:
            entries = list(self.entries.values())
        now = time.monotonic_ns()
        # A wait to connect is watched separately; without a wait it is not a stall.
        since = {
            e.name: now if e.operation.kind is OpKind.CONNECT else e.submitted_ns
            for e in entries
        }
        since |= {name: at_ns for name, at_ns, *_ in self.watches.copy()}
        oldest_first = sorted(since.items(), key=lambda item: item[1])
        return {name: (now - at_ns) * 1e-9 for name, at_ns in oldest_first}

    def collectives(self, group: str) -> list[PendingCollective]:
        """Return the pending operations for the rank's status; no lock is needed."""
        now = time.monotonic_ns()
        found = [
            PendingCollective(
                name=entry.name,
                group=group,
                kind=entry.operation.kind.name.lower(),
                sequence=0,
                num_bytes=sum(t.nbytes for t in entry.operation.tensors),
                age_s=(now - entry.submitted_ns) * 1e-9,
                ranks=self.ranks,
            )
            for entry in list(self.entries.values())
        ]
        names = {each.name for each in found}  # a wait to connect is also watched
        for name, at_ns, number, num_bytes in self.watches.copy():
            if name not in names:
                facts = number, num_bytes, (now - at_ns) * 1e-9, self.ranks
                found.append(PendingCollective(name, group, "allreduce", *facts))
        return found


class SyncPoint(NamedTuple):
    """A point that all ranks of a process set must reach: a request or a round."""

    set_id: int
    name: str
    number: int = 0  # of the round; 0 for a request
    ranks: tuple[int, ...] = ()  # of the set; empty for all

    @property
    def is_connect(self) -> bool:
        return not self.number and self.name.startswith(CONNECT_PREFIX)


class BlockedWait(NamedTuple):
    """A published wait, as sent to the root."""

    wait_id: int  # unique on its rank
    point: SyncPoint
    can_give_way: bool


class PolledWait:
    """A thread's blocked wait, which is its own ``PollCallback``."""

    def __init__(
        self,
        waits: "Waits",
        point: SyncPoint,
        thread: int = 0,
        *,
        can_give_way: bool = False,
    ) -> None:
        self.point = point
        self.thread = thread or threading.get_ident()
        self.can_give_way = can_give_way
        self.gives_way = False
        self.number = 0  # its id while published
        self._waits = waits
        self._patience_s = self._ask_at_s = self._answer_by_s = 0.0

    def move_to(self, point: SyncPoint) -> None:
        self.__exit__()
        self.point = point

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._waits.published.pop(self.number, None)
        self.number = 0

    def __call__(self) -> float | None:
        """Drive deferred rounds, and publish the wait once it exceeds its patience."""
        waits = self._waits
        has_put_off = waits.drive()
        if self.gives_way:
            return None
        now = time.monotonic()
        if not self._patience_s:
            self._patience_s = waits.patience_s
            self._ask_at_s = now + self._patience_s
        if now >= self._ask_at_s:
            if not self.number:
                self.number = next(waits.numbers)
                waits.published[self.number] = self
            waits.ask_all()
            self._patience_s = min(2 * self._patience_s, _LONGEST_PATIENCE_S)
            self._ask_at_s = now + self._patience_s
            self._answer_by_s = now + _EXPECT_ANSWER_S
        pause_s = self._ask_at_s - now
        if has_put_off:
            pause_s = min(pause_s, _DRIVE_EVERY_S)
        if self.number and self.can_give_way:  # the answer does not wake this thread
            is_soon = now < self._answer_by_s
            pause_s = min(pause_s, _LISTEN_EVERY_S if is_soon else _LISTEN_RARELY_S)
        return pause_s


class Waits:
    """The waits of one process in one session; thread-safe."""

    def __init__(self, scope: AbortScope | None = None) -> None:
        self.scope = scope or AbortScope()
        self.patience_s = _FIRST_PATIENCE_S  # age at which a wait is published
        self.ask_all: Callable[[], None] = lambda: None  # requests an inquiry
        self._has_warned = False
        self.numbers = count(1)
        self.published: dict[int, PolledWait] = {}
        self._users: set[int] = set()
        self._begun: dict[tuple[int, str], int] = {}
        self._tables = defaultdict[int, PendingTable](PendingTable)
        self.table = self._tables.__getitem__  # by set id
        # Rounds that gave way and are not over: a function that makes progress on each
        # without waiting, and the thread whose waits call it.
        self.put_off: dict[Callable[[], None], int] = {}
        add_source(self.report)

    def report(self) -> Part:
        found: list[PendingCollective] = []
        for set_id, table in list(self._tables.items()):
            found += table.collectives(f"set {set_id}" if set_id else "all")
        return Part(found)

    def add_user(self) -> None:
        self._users.add(threading.get_ident())

    def begin(self, point: SyncPoint) -> None:
        self._begun[point.set_id, point.name] = point.number

    def drive(self) -> bool:
        """Advance this thread's deferred rounds; return True if any are left."""
        for progress, thread in list(self.put_off.items()):
            if thread == threading.get_ident():
                progress()
        return bool(self.put_off)

    def answer(self, points: Sequence[SyncPoint]) -> Sequence[Sequence[object]]:
        """Return published waits or, given ``points``, their ids and reached points.

        Returns no waits if any thread of this rank is not blocked.
        """
        published = list(self.published.values())
        users = frozenset(self._users)
        self._users -= users - {thread.ident for thread in threading.enumerate()}
        is_stuck = self._users <= {waiting.thread for waiting in published}
        # If not, a wait is over and its thread is about to continue.
        has_come = all(self._has_come_to(waiting.point) for waiting in published)
        if self._tables[0].has_joined or not is_stuck or not has_come:
            published = []
        if points:
            still = [waiting.number for waiting in published]
            return still, [self._has_come_to(point) for point in points]
        return [BlockedWait(w.number, w.point, w.can_give_way) for w in published]

    def give_way(self, wait_ids: Sequence[int], others: str) -> None:
        """Let waits give way, and give later waits less patience.

        A wait to connect cannot give way, and fails. ``others`` describes the waits of
        the other ranks, for the log.
        """
        self.patience_s = _LATER_PATIENCE_S
        found = [self.published.get(wait_id) for wait_id in wait_ids]
        for waiting in filter(None, found):
            set_id, name, *_ = waiting.point
            if waiting.can_give_way:
                if not self._has_warned:
                    self._has_warned = True
                    _logger.warning(_GAVE_WAY, name, others)
                waiting.gives_way = True
            elif entry := self.table(set_id).pop(name):
                entry.fail(UnpairedError(f"{name}: not all ranks wait for it."))

    def _has_come_to(self, point: SyncPoint) -> bool:
        if point.number:
            return self._begun.get((point.set_id, point.name), 0) >= point.number
        table = self._tables.get(point.set_id)
        return table is not None and point.name in table.entries


BlockedWaits = Mapping[int, Sequence[BlockedWait]]
"""The waits of each blocked rank."""


class StallReport(NamedTuple):
    """The pending operations of one rank and their ages, the oldest first."""

    has_joined: bool
    ages_s: dict[str, float]

    @classmethod
    def of(cls, table: PendingTable) -> "StallReport":
        return cls(table.has_joined, dict(islice(table.ages_s().items(), _MOST_NAMES)))


class Inspector:
    """Sends inquiries from the root, one after the other, and acts on the answers.

    It warns of stalls, may end the job after a stall, and lets waits give way. If all
    ranks of a set wait to connect, but under different names, it fails these waits.
    """

    def __init__(self, root: RootNode, warning_s: float, shutdown_s: float) -> None:
        self._root = root
        self._warning_s, self._shutdown_s = warning_s, shutdown_s
        repeat_s = min(warning_s, shutdown_s / 4, 5.0) if shutdown_s else warning_s
        self._repeat_s = {STALLS: repeat_s, WAITS: 0.0}
        self._next_s = dict.fromkeys((STALLS, WAITS), 0.0)
        self._wanted: set[str] = set()
        self._asked = ""  # the kind of the current inquiry
        self._number = 0
        self._deadline_s = 0.0
        self._answers: dict[int, list[Any]] = {}  # by rank
        self._blocked: dict[int, list[BlockedWait]] = {}
        self._points: list[SyncPoint] = []

    def step(self) -> None:
        """Collect answers; evaluate them once all have arrived or at the deadline."""
        news, self._root.inquiries = self._root.inquiries, []
        for kind, *answer in news:
            if not answer:
                self._wanted.add(kind)
            elif answer[0] == self._number:
                self._answers[answer[1]] = answer[2]
        now = time.monotonic()
        is_full = len(self._answers) == self._root.tree.size
        if self._asked and (is_full or now >= self._deadline_s):
            kind, self._asked = self._asked, ""
            (self._judge_stalls if kind == STALLS else self._judge_waits)()
        for kind in (STALLS, WAITS):
            if not self._asked and kind in self._wanted and now >= self._next_s[kind]:
                self._wanted.remove(kind)
                self._next_s[kind] = now + self._repeat_s[kind]
                self._points = []
                self._inquire(kind)

    def _inquire(self, kind: str) -> None:
        self._asked = kind
        self._number += 1
        self._answers.clear()
        self._deadline_s = time.monotonic() + _ANSWER_WITHIN_S[kind]
        self._root.order(ReportCommand(kind, self._number, self._points))

    def _judge_stalls(self) -> None:
        text, is_fatal = describe_stall(
            {rank: StallReport(*answer) for rank, answer in self._answers.items()},
            self._root.tree.size,
            warning_s=self._warning_s,
            shutdown_s=self._shutdown_s,
        )
        if text:
            _logger.warning("%s", text)
        if is_fatal:
            self._root.order(StopCommand(text))

    def _judge_waits(self) -> None:
        size, answers = self._root.tree.size, self._answers
        if not self._points:
            self._blocked = {
                rank: [
                    BlockedWait(wait_id, SyncPoint._make((*point, tuple(ranks))), can)
                    for wait_id, (*point, ranks), can in waits
                ]
                for rank, waits in answers.items()
            }
            blocked = [each for waits in self._blocked.values() for each in waits]
            self._points = sorted({each.point for each in blocked})
            if any(each.can_give_way or each.point.is_connect for each in blocked):
                self._inquire(WAITS)
            return
        still: dict[int, list[BlockedWait]] = {}
        came: set[tuple[int, SyncPoint]] = set()
        for rank, (wait_ids, has_come) in answers.items():
            blocked = self._blocked.get(rank, ())
            if waits := [each for each in blocked if each.wait_id in wait_ids]:
                still[rank] = waits
            pairs = zip(self._points, has_come, strict=True)
            came.update((rank, point) for point, is_there in pairs if is_there)
        circles = find_circles(still, size, came)
        chosen = {
            rank: wait_ids
            for rank, waits in circles.items()
            if (wait_ids := [each.wait_id for each in waits if each.can_give_way])
        }
        chosen = chosen or find_unpaired(circles, size)
        if chosen:
            where = [(rank, w[0].point.name) for rank, w in sorted(circles.items())]
            self._root.order(GiveWayCommand(list(chosen.items()), where))


def describe_stall(
    reports: Mapping[int, StallReport],
    size: int,
    *,
    warning_s: float,
    shutdown_s: float,
) -> tuple[str, bool]:
    """Return Horovod's stall warning, or "", and True if the job must end.

    A stall is a name that one rank submitted at least ``warning_s`` ago, and another
    rank has not submitted. After ``shutdown_s``, if not 0, a stall ends the job. A rank
    that did not answer has no report.
    """
    missing: dict[int, list[str]] = {}
    fatal: set[int] = set()
    for name, age_s in _late_names(reports, warning_s).items():
        for rank in range(size):
            report = reports.get(rank)
            if report is not None and (name in report.ages_s or report.has_joined):
                continue
            missing.setdefault(rank, []).append(name)
            if shutdown_s and age_s >= shutdown_s:
                fatal.add(rank)
    if not missing:
        return "", False
    opening = (
        "One or more tensors were submitted to be reduced, gathered or broadcasted by "
        "subset of ranks and are waiting for remainder of ranks for more than "
        f"{warning_s:g} seconds. This may indicate that different ranks are trying to "
        "submit different tensors or that only subset of ranks is submitting tensors, "
        "which will cause deadlock. "
    )
    lines = [opening, "Missing ranks:"]
    for rank, names in sorted(missing.items()):
        lines.append(f"{rank}{'!' if rank in fatal else ''}: [{_show(names)}]")
    if fatal:
        lines.append(
            'One or more rank (marked by "!") is stalled for longer than '
            f"{shutdown_s:g} seconds. Will shutdown."
        )
    by_activity = defaultdict[str, int](int)
    for rank in missing:
        by_activity[_activity(reports.get(rank))] |= 1 << rank
    lines += [
        f"{format_ranks(ranks)}: {activity}" for activity, ranks in by_activity.items()
    ]
    return "\n".join(lines), bool(fatal)


def _late_names(
    reports: Mapping[int, StallReport], warning_s: float
) -> dict[str, float]:
    late: dict[str, float] = {}
    for report in reports.values():
        for name, age_s in report.ages_s.items():
            if age_s >= warning_s:
                late[name] = max(age_s, late.get(name, 0.0))
    return late


def _activity(report: StallReport | None) -> str:
    if report is None:
        return "no answer: stopped, or too busy for its other threads to run"
    if report.ages_s:
        return f"waiting for [{_show(list(report.ages_s))}]"
    return "nothing pending"


def _show(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown} ..." if len(names) > _NAMES_SHOWN else shown


def find_circles(
    waits: BlockedWaits, size: int, came: set[tuple[int, SyncPoint]]
) -> dict[int, list[BlockedWait]]:
    """Return the blocked waits of ranks that wait for each other in a circle."""
    missing = {
        (rank, each): {
            other
            for other in each.point.ranks or range(size)
            if (other, each.point) not in came
        }
        for rank, blocked in waits.items()
        for each in blocked
    }
    # A rank may reach any point if it is not blocked or one of its waits can end.
    stuck = set(missing)
    while True:
        held = {
            rank
            for rank, blocked in waits.items()
            if all((rank, each) in stuck for each in blocked)
        }
        ended = {key for key in stuck if not missing[key] & held}
        if not ended:
            break
        stuck -= ended
    edges = defaultdict[int, set[int]](set)
    for rank, each in stuck:
        edges[rank] |= missing[rank, each] & waits.keys()
    return {
        rank: [each for each in waits[rank] if (rank, each) in stuck]
        for rank in edges
        if rank in _reachable(edges, rank)
    }


def find_unpaired(circles: BlockedWaits, size: int) -> dict[int, list[int]]:
    """Return ids of waits, by rank, in sets in which all ranks wait to connect."""
    by_set = defaultdict[int, dict[int, BlockedWait]](dict)
    for rank, waits in circles.items():
        for each in waits:
            if each.point.is_connect:
                by_set[each.point.set_id].setdefault(rank, each)
    unpaired = defaultdict[int, list[int]](list)
    for waits in by_set.values():
        for rank, each in waits.items():
            if len(waits) == len(each.point.ranks or range(size)):
                unpaired[rank].append(each.wait_id)
    return unpaired


def _reachable(edges: Mapping[int, set[int]], start: int) -> set[int]:
    found: set[int] = set()
    left = list(edges[start])
    while left:
        rank = left.pop()
        if rank not in found:
            found.add(rank)
            left += edges.get(rank, ())
    return found
