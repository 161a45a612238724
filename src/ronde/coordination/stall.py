"""The root's part in finding what never ends: stalls, and ranks that wait in circles.

Both have every rank answer a question, through the agreement's own messages. A stall is
an operation that some ranks never ask for: Horovod's warning, and its shutdown. For
circles see Note [Ranks that wait for each other] in ``waits``.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ronde.coordination.messages import format_ranks
from ronde.coordination.node import Node
from ronde.coordination.root import RootNode
from ronde.coordination.waits import BlockedWait, SyncPoint

_logger = logging.getLogger("ronde")
_ANSWER_WITHIN_S = 2.0
_MOST_NAMES = 64
_NAMES_SHOWN = 6
_BUSY_AFTER_S = 0.5
"""A rank that is too busy to answer does not wait for anybody."""
BlockedRanks = Mapping[int, Sequence[BlockedWait]]
"""What each rank waits for that can do nothing else; others are not there."""


class StallReport(NamedTuple):
    """What one rank waits for: its answer to the stall inspector's question ``number``.

    Attributes:
        names: What it has submitted and waits for, the oldest first.
        ages_s: For how long, each.
    """

    rank: int
    has_joined: bool
    names: tuple[str, ...]
    ages_s: tuple[float, ...]


class StallInspector:
    """One rank's part in finding stalls; the root asks, compares and warns.

    Not thread-safe: whoever drives the coordinator calls it.
    """

    def __init__(self, node: Node, warning_s: float, shutdown_s: float) -> None:
        self._node = node
        self._warning_s, self._shutdown_s = warning_s, shutdown_s
        self._next_ask_s = 0.0
        self._asked_at_s = 0.0
        self._is_waiting = False
        self._repeat_s = warning_s
        if shutdown_s:
            self._repeat_s = min(warning_s, shutdown_s / 4, 5.0)

    def look(self, oldest_s: float | None) -> None:
        """Ask, compare or warn where it is time; call it about once a second.

        Args:
            oldest_s: For how long something is waited for here at most; None where
                nothing is.
        """
        warning_s = self._warning_s
        if not warning_s:
            return
        now = time.monotonic()
        if oldest_s is not None and oldest_s >= warning_s and now >= self._next_ask_s:
            self._next_ask_s = now + self._repeat_s
            self._node.ask_for_stalls()
        if isinstance(self._node, RootNode):
            self._look_as_root(self._node, now)

    def answer(
        self, number: int, waiting: dict[str, float], *, has_joined: bool
    ) -> None:
        """Report to the root what this rank waits for, for how many seconds each."""
        names = list(waiting)[:_MOST_NAMES]
        ages_s = [round(waiting[name], 3) for name in names]
        rank = self._node.tree.rank
        self._node.report_stall(number, [rank, has_joined, names, ages_s])

    def _look_as_root(self, root: RootNode, now: float) -> None:
        if root.is_asked_for_stalls and not self._is_waiting:
            root.ask_all_for_stalls()
            self._asked_at_s = now
            self._is_waiting = True
        if not self._is_waiting:
            return
        size, answers = root.tree.size, root.stall_answers
        if len(answers) < size and now < self._asked_at_s + _ANSWER_WITHIN_S:
            return
        self._is_waiting = False
        text, is_fatal = describe_stall(
            {rank: StallReport(rank, *answer) for rank, *answer in answers},
            size,
            warning_s=self._warning_s,
            shutdown_s=self._shutdown_s,
        )
        if text:
            _logger.warning("%s", text)
        if is_fatal:
            root.order("stop", text)


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
    lines += [f"{format_ranks(ranks)} {what}" for what, ranks in by_activity.items()]
    return "\n".join(lines), bool(fatal)


def _late_names(
    reports: Mapping[int, StallReport], warning_s: float
) -> dict[str, float]:
    """Return the names that some rank has waited for, and for how long at most."""
    late = defaultdict[str, float](float)
    for report in reports.values():
        for name, age_s in zip(report.names, report.ages_s, strict=True):
            if age_s >= warning_s:
                late[name] = max(age_s, late[name])
    return late


def _activity(report: StallReport | None) -> str:
    if report is None:
        return "gave no answer: stopped, or too busy for its other threads to run"
    if report.names:
        return f"submitted [{_show(report.names)}] and waits for that"
    return "submitted nothing that is not done"


def _show(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown} ..." if len(names) > _NAMES_SHOWN else shown


class CircleInspector:
    """Asks all ranks what they wait for, and has some give way.

    Where nobody can give way, but all ranks of a set wait to connect, each with others,
    all of them learn that, and compare what they have.

    Not thread-safe: whoever drives the root's coordinator calls it.
    """

    def __init__(self, root: RootNode) -> None:
        self._root = root
        self._size = root.tree.size
        self._is_wanted = False
        self._number = 0
        self._deadline_s = 0.0
        self._has_answered: set[int] = set()
        self._waits: dict[int, list[BlockedWait]] = {}
        self._points: list[SyncPoint] = []
        self._came: dict[int, list[bool]] = {}

    def look(self) -> None:
        """Take answers in, and go on where all are there or it is time."""
        answers, self._root.wait_answers = self._root.wait_answers, []
        for number, *answer in answers:
            if number is None:
                self._is_wanted = True
            elif number == self._number:
                self._take(*answer)
        if self._deadline_s:
            is_late = time.monotonic() >= self._deadline_s
            if len(self._has_answered) < self._size and not is_late:
                return
            self._conclude()
        if self._is_wanted and not self._deadline_s:
            self._is_wanted = False
            self._points, self._waits, self._came = [], {}, {}
            self._request_reports()

    def _request_reports(self) -> None:
        self._number += 1
        self._has_answered.clear()
        self._deadline_s = time.monotonic() + _BUSY_AFTER_S
        self._root.order("report_waits", self._number, self._points)

    def _take(self, rank: int, first: list[Any], second: list[bool]) -> None:
        """Note an answer: waits and nothing, or numbers of waits and a bit a point."""
        self._has_answered.add(rank)
        if self._points:
            still = [each for each in self._waits.get(rank, ()) if each[0] in first]
            self._waits[rank] = still
            self._came[rank] = second
        else:
            self._waits[rank] = [
                BlockedWait(
                    wait_id, SyncPoint(set_id, name, number, tuple(ranks)), can_give_way
                )
                for wait_id, (set_id, name, number, ranks), can_give_way in first
            ]

    def _conclude(self) -> None:
        self._deadline_s = 0.0
        self._waits = {
            rank: waits
            for rank, waits in self._waits.items()
            if waits and rank in self._has_answered
        }
        if not self._points:
            blocked = [each for waits in self._waits.values() for each in waits]
            self._points = sorted({each.point for each in blocked})
            if any(each.can_give_way or each.point.is_connect for each in blocked):
                self._request_reports()
            return
        circles = find_circles(self._waits, self._size, self._has_come)
        chosen = {
            rank: wait_ids
            for rank, waits in circles.items()
            if (wait_ids := [each.wait_id for each in waits if each.can_give_way])
        }
        chosen = chosen or find_unpaired(circles, self._size)
        if chosen:
            where = [(rank, w[0].point.name) for rank, w in sorted(circles.items())]
            self._root.order("give_way", list(chosen.items()), where)

    def _has_come(self, rank: int, point: SyncPoint) -> bool:
        came = self._came.get(rank)
        return came is not None and came[self._points.index(point)]


def find_circles(
    waits: BlockedRanks, size: int, has_come: Callable[[int, SyncPoint], bool]
) -> dict[int, list[BlockedWait]]:
    """Return the waits that keep each other from ending.

    Returns:
        For each rank that waits for itself in the end, its waits that nobody but such
        ranks can end.
    """
    missing = {
        (rank, each): {
            other
            for other in each.point.ranks or range(size)
            if not has_come(other, each.point)
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
    edges: dict[int, set[int]] = {}
    for rank, each in stuck:
        edges.setdefault(rank, set()).update(missing[rank, each] & waits.keys())
    return {
        rank: [each for each in waits[rank] if (rank, each) in stuck]
        for rank in edges
        if rank in _reachable(edges, rank)
    }


def find_unpaired(circles: BlockedRanks, size: int) -> dict[int, list[int]]:
    """Return the waits, one a rank and set, of sets whose ranks all wait to connect."""
    by_set: dict[int, dict[int, BlockedWait]] = {}
    for rank, waits in circles.items():
        for each in waits:
            if each.point.is_connect:
                by_set.setdefault(each.point.set_id, {}).setdefault(rank, each)
    unpaired: dict[int, list[int]] = {}
    for waits in by_set.values():
        point = next(iter(waits.values())).point
        if len(waits) == len(point.ranks or range(size)):
            for rank, each in waits.items():
                unpaired.setdefault(rank, []).append(each.wait_id)
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
