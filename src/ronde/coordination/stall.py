"""What never ends: stalled operations, and ranks that wait for each other.

A rank that waits for long has the root ask all ranks, through the agreement's own
messages, one of two questions:

=========  =========================================================================
``STALLS`` What has this rank submitted, and for how long does it wait? What some ranks
           never ask for is a stall: Horovod's warning, and its shutdown.
``WAITS``  For what does this rank wait that can do nothing else? Then, of all those
           points: to which has it come? See Note [Ranks that wait for each other] in
           ``waits``.
=========  =========================================================================
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ronde.coordination.messages import format_ranks
from ronde.coordination.node import RootNode
from ronde.coordination.waits import BlockedWait, PendingTable, SyncPoint

_logger = logging.getLogger("ronde")
STALLS, WAITS = "stalls", "waits"
_ANSWER_WITHIN_S = {STALLS: 2.0, WAITS: 0.5}
"""A rank that is too busy to answer does not wait for anybody."""
_MOST_NAMES = 64
_NAMES_SHOWN = 6
BlockedRanks = Mapping[int, Sequence[BlockedWait]]
"""What each rank waits for that can do nothing else; others are not there."""


class StallReport(NamedTuple):
    """What one rank waits for: ``names``, the oldest first, each for ``ages_s``."""

    rank: int
    has_joined: bool
    names: tuple[str, ...]
    ages_s: tuple[float, ...]

    @classmethod
    def of(cls, rank: int, table: PendingTable) -> "StallReport":
        waiting = list(table.waiting().items())[:_MOST_NAMES]
        ages_s = tuple([round(age_s, 3) for _, age_s in waiting])
        return cls(rank, table.has_joined, tuple([n for n, _ in waiting]), ages_s)


class _Inquiry:
    """One of the questions, with the answers of each rank to its last asking."""

    def __init__(self, root: RootNode, kind: str) -> None:
        self.is_wanted = False
        self.answers: dict[int, list[Any]] = {}
        self._root = root
        self._kind = kind
        self._number = 0
        self._deadline_s = 0.0

    def begin(self, points: Sequence[SyncPoint] = ()) -> None:
        if not points:
            self.is_wanted = False
        self._number += 1
        self.answers.clear()
        self._deadline_s = time.monotonic() + _ANSWER_WITHIN_S[self._kind]
        self._root.order("report", self._kind, self._number, points)

    def take(self, number: int, rank: int, answer: list[Any]) -> None:
        if number == self._number:
            self.answers[rank] = answer

    def look(self, judge: Callable[[], None]) -> bool:
        """Judge what all answered or had their time for; return whether to ask anew."""
        is_full = len(self.answers) == self._root.tree.size
        if self._deadline_s and (is_full or time.monotonic() >= self._deadline_s):
            self._deadline_s = 0.0
            judge()
        return self.is_wanted and not self._deadline_s


class Inspector:
    """The root's: asks all ranks, compares, warns, ends the job or has some give way.

    Where nobody can give way, but all ranks of a set wait to connect, each with others,
    all of them learn that. Whoever drives the root's coordinator calls it.
    """

    def __init__(self, root: RootNode, warning_s: float, shutdown_s: float) -> None:
        self._root = root
        self._warning_s, self._shutdown_s = warning_s, shutdown_s
        self._stalls, self._waits = _Inquiry(root, STALLS), _Inquiry(root, WAITS)
        self._inquiries = {STALLS: self._stalls, WAITS: self._waits}
        self._blocked: dict[int, list[BlockedWait]] = {}
        self._points: list[SyncPoint] = []

    def look(self) -> None:
        """Take answers in, and go on where all are there or it is time."""
        news, self._root.inquiries = self._root.inquiries, []
        for kind, *answer in news:
            inquiry = self._inquiries[kind]
            if answer:
                inquiry.take(*answer)
            else:
                inquiry.is_wanted = True
        if self._stalls.look(self._judge_stalls):
            self._stalls.begin()
        if self._waits.look(self._judge_waits):
            self._points = []
            self._waits.begin()

    def _judge_stalls(self) -> None:
        answers = self._stalls.answers
        text, is_fatal = describe_stall(
            {rank: StallReport(*answer) for rank, answer in answers.items()},
            self._root.tree.size,
            warning_s=self._warning_s,
            shutdown_s=self._shutdown_s,
        )
        if text:
            _logger.warning("%s", text)
        if is_fatal:
            self._root.order("stop", text)

    def _judge_waits(self) -> None:
        if not self._points:
            self._blocked = {
                rank: [
                    BlockedWait(wait_id, SyncPoint._make((*point, tuple(ranks))), can)
                    for wait_id, (*point, ranks), can in waits
                ]
                for rank, waits in self._waits.answers.items()
                if waits
            }
            blocked = [each for waits in self._blocked.values() for each in waits]
            self._points = sorted({each.point for each in blocked})
            if any(each.can_give_way or each.point.is_connect for each in blocked):
                self._waits.begin(self._points)
            return
        size, answers = self._root.tree.size, self._waits.answers
        still = {
            rank: [each for each in waits if each.wait_id in answers[rank][0]]
            for rank, waits in self._blocked.items()
            if rank in answers
        }
        came = {
            (rank, point)
            for rank, (_, bits) in answers.items()
            for point, has_come in zip(self._points, bits, strict=True)
            if has_come
        }
        circles = find_circles(
            {rank: waits for rank, waits in still.items() if waits}, size, came
        )
        chosen = {
            rank: wait_ids
            for rank, waits in circles.items()
            if (wait_ids := [each.wait_id for each in waits if each.can_give_way])
        }
        chosen = chosen or find_unpaired(circles, size)
        if chosen:
            where = [(rank, w[0].point.name) for rank, w in sorted(circles.items())]
            self._root.order("give_way", list(chosen.items()), where)


def describe_stall(
    reports: Mapping[int, StallReport],
    size: int,
    *,
    warning_s: float,
    shutdown_s: float,
) -> tuple[str, bool]:
    """Return what has waited for longer than ``warning_s``, and for whom.

    Empty where nobody waits for somebody else for long. And whether the job is to end:
    whether something has waited for ``shutdown_s``, if that is not 0. A rank that did
    not answer has no report.
    """
    missing: dict[int, list[str]] = {}
    fatal: set[int] = set()
    for name, age_s in _late_names(reports, warning_s).items():
        for rank in range(size):
            report = reports.get(rank)
            if report is not None and (name in report.names or report.has_joined):
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
    lines += [f"{format_ranks(ranks)}: {what}" for what, ranks in by_activity.items()]
    return "\n".join(lines), bool(fatal)


def _late_names(
    reports: Mapping[int, StallReport], warning_s: float
) -> dict[str, float]:
    """Return the names that some rank has waited for, and for how long at most."""
    late: dict[str, float] = {}
    for report in reports.values():
        for name, age_s in zip(report.names, report.ages_s, strict=True):
            if age_s >= warning_s:
                late[name] = max(age_s, late.get(name, 0.0))
    return late


def _activity(report: StallReport | None) -> str:
    if report is None:
        return "no answer: stopped, or too busy for its other threads to run"
    if report.names:
        return f"waiting for [{_show(report.names)}]"
    return "nothing pending"


def _show(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown} ..." if len(names) > _NAMES_SHOWN else shown


def find_circles(
    waits: BlockedRanks, size: int, came: set[tuple[int, SyncPoint]]
) -> dict[int, list[BlockedWait]]:
    """Return the waits of ranks that wait for themselves in the end, for such alone."""
    missing = {
        (rank, each): {
            other
            for other in each.point.ranks or range(size)
            if (other, each.point) not in came
        }
        for rank, blocked in waits.items()
        for each in blocked
    }
    # A rank may still come anywhere if it is free, or if one of its waits can end.
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


def find_unpaired(circles: BlockedRanks, size: int) -> dict[int, list[int]]:
    """Return the waits, one a rank and set, of sets whose ranks all wait to connect."""
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
