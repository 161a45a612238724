"""Time-outs of collectives, from the lines of torch's watchdog and its reports.

Forms: ProcessGroupNCCL.cpp of torch 1.13 to 2.13, TORCH_NCCL_DESYNC_DEBUG, the output
of torchfrtrace, and Gloo's monitored barrier.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

_MAX_KEPT = 1 << 16  # Of each kind of line.
_BEFORE_RANK = re.compile(r"(?=\[rank\d{1,9}\]:)")
_RANK = re.compile(r"\[rank(\d{1,9})\]:")
# ``[PG ID 5 PG GUID 22(TP) Rank 1]``, ``[PG 0 (default_pg) Rank 1]``, ``[Rank 1]``.
_MEMBER = re.compile(
    r"\[(?:PG (?:ID \d+ )?(?:PG GUID )?([^\]\s(]{1,80}) ?(\([^\]]{0,80}\))? )?"
    r"Rank (\d{1,9})\]"
)
_WORK = re.compile(
    r"Work\w*CCL\((?:SeqNum=(\d{1,18}), )?OpType=(\w+),(?: NumelIn=(\d{1,18}),)?"
    r".{0,200}? ?Timeout\(ms\)=(\d{1,18})\) (?:ran for|timed out)"
)
_STATUS = re.compile(
    r"(?:work(?: sequence id)?: (\d{1,18}),?(?: PG status:)? )?"
    r"[Ll]ast enqueued (?:NCCL )?work: (-?\d{1,18})"
    r"(?:, last started (?:NCCL )?work: -?\d+)?"
    r", last completed (?:NCCL )?work: (-?\d{1,20})"
)
_STUCK = re.compile(
    "no heartbeat of its|Heartbeat monitor timed out|watchdog got stuck"
)
_STORE_LOST = 'Failed to check the "should dump" flag'
_ALIVE = re.compile(
    "dump signal|signal dumping|dump debug info|have failed or timed out"
)
_TRACE = re.compile(r"dumping nccl trace to (/\S*)/")
# Verdicts of torch's own reports and of Gloo: ranks that did not take part.
_ABSENT = re.compile(
    r"\[(?P<desync>[\d, ]+)\] finished collective #\d+, but didn't join collective #"
    r"(?P<next>\d{1,18})|ranks \[(?P<never>[\d, ]+)\] are the lagging ranks"
    r"|missing ranks: \{(?P<missing>[\d, ]+)\}|Culprit rank (?P<culprit>\d{1,9});"
    r"|Ranks? (?P<barrier>[\d, ]+) failed to pass (?P<name>monitoredBarrier)"
)
_TRACED = re.compile(
    r"(?:ollective|joining collective), sequence number: (\d{1,18})"
    r"|ollective sequence number: (\d{1,18})|(?<!\w)collective: (?:nccl:)?_?(\w+)"
)


class TimedOutWork(NamedTuple):
    """A collective, as ranks name it that waited for it in vain."""

    operation: str  # ``ALLREDUCE``.
    seq: int  # Its number in the process group; -1 if unknown.
    num_elements: int  # Of the input; -1 if unknown.
    timeout_s: float  # 0 if unknown.
    ranks: tuple[int, ...]


class CollectiveTimeout(NamedTuple):
    """The collectives of one process group that did not end in time."""

    group: str  # ``0(default_pg)``; empty if unknown.
    works: tuple[TimedOutWork, ...]  # By number.
    late: tuple[int, ...] = ()  # Ranks that had not called the first of them.
    ahead: tuple[int, ...] = ()  # Ranks that had completed it.
    silent: tuple[int, ...] = ()  # Ranks of the group without a line.


class WatchdogReport(NamedTuple):
    """The content of torch's lines in a log."""

    num_lines: int = 0
    timeouts: tuple[CollectiveTimeout, ...] = ()  # The one of most ranks first.
    busy: tuple[int, ...] = ()  # Ranks that had called a collective.
    stuck: tuple[int, ...] = ()  # Ranks whose watchdog itself made no progress.
    store_lost: tuple[int, ...] = ()  # Ranks that lost the store.
    trace_folder: str = ""  # The folder of the flight recorder's files.


class _Work(NamedTuple):
    operation: str
    num_elements: int
    timeout_s: float


class WatchdogReader:
    """Takes the lines of a log one by one."""

    def __init__(self) -> None:
        self._num_lines = 0
        # By rank and number; the group is in other lines of the same two.
        self._works: dict[tuple[int, int], _Work] = {}
        self._group_of: dict[tuple[int, int], str] = {}
        # By group and rank: numbers of the last enqueued and completed work.
        self._statuses: dict[tuple[str, int], tuple[int, int]] = {}
        self._reporting: set[int] = set()
        self._stuck: set[int] = set()
        self._store_lost: set[int] = set()
        self._trace_folder = ""
        # What reports name: a number, an operation, and ranks that are not in it.
        self._named: tuple[int, str] = (-1, "")
        self._absent: set[int] = set()

    def feed(self, line: str) -> None:
        """Read one line; any other program's line does no harm."""
        for part in _BEFORE_RANK.split(line):
            is_of_torch = self._feed_member(part) or self._feed_report(part)
            self._num_lines += is_of_torch

    def _feed_member(self, part: str) -> bool:
        """Read what the watchdog of one rank reports."""
        members = list(_MEMBER.finditer(part))
        if not members or len(self._works) + len(self._statuses) > _MAX_KEPT:
            return False
        named = [each for each in members if each[1]]
        group = f"{named[0][1]}{named[0][2] or ''}" if named else ""
        global_rank = _RANK.match(part)
        rank = int(global_rank[1] if global_rank else members[-1][3])
        is_known = bool(_STUCK.search(part) or _ALIVE.search(part))
        if _STUCK.search(part):
            self._stuck.add(rank)
        if _STORE_LOST in part:
            self._store_lost.add(rank)
            is_known = True
        for seq, operation, numel, timeout_ms in _WORK.findall(part):
            work = _Work(operation, int(numel or -1), int(timeout_ms) / 1000)
            key = rank, int(seq or -1)
            self._works.setdefault(key, work)
            if group:
                self._group_of[key] = group
            is_known = True
        if status := _STATUS.search(part):
            seq, enqueued, completed = status.groups()
            self._statuses.setdefault((group, rank), (int(enqueued), int(completed)))
            if seq and group:
                self._group_of[rank, int(seq)] = group
            is_known = True
        if trace := _TRACE.search(part):
            self._trace_folder = trace[1]
        if is_known:
            self._reporting.add(rank)
        return is_known

    def _feed_report(self, part: str) -> bool:
        """Read what reports about several ranks name."""
        seq, operation = self._named
        traced, absent = _TRACED.search(part), _ABSENT.search(part)
        if traced and not self._absent:
            seq = int(traced[1] or traced[2] or seq)
            operation = (traced[3] or operation).upper()
        if absent:
            names = "desync", "never", "missing", "culprit", "barrier"
            ranks = next(filter(None, absent.group(*names)))
            self._absent |= set(map(int, ranks.split(",")))
            seq = int(absent["next"] or seq)
            operation = absent["name"] or operation
        self._named = seq, operation
        return bool(traced or absent)

    def report(self, num_ranks: int) -> WatchdogReport:
        """Return what was read; ``num_ranks`` of the job, 0 if unknown."""
        # A rank whose group is unknown waits with those that name the same call.
        groups: defaultdict[tuple[int, _Work], set[str]] = defaultdict(set)
        for (rank, seq), group in self._group_of.items():
            if work := self._works.get((rank, seq)):
                groups[seq, work].add(group)
        waiting: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for rank, seq in sorted(self._works, reverse=True):
            alike = groups[seq, self._works[rank, seq]]
            group = next(iter(alike)) if len(alike) == 1 else ""
            waiting[self._group_of.get((rank, seq), group)][rank] = seq
        found = [self._timeout(*each, num_ranks) for each in waiting.items()]
        found.sort(key=lambda each: -sum(len(work.ranks) for work in each.works))
        if self._absent:
            seq, operation = self._named
            work = TimedOutWork(operation, seq, -1, 0.0, ())
            found = found or [CollectiveTimeout("", (work,))]
            late = _sorted(self._absent.union(found[0].late))
            found[0] = found[0]._replace(late=late)
        busy = {rank for (_, rank), last in self._statuses.items() if last[0] > 0}
        busy.update(rank for rank, _ in self._works)
        return WatchdogReport(
            self._num_lines,
            tuple(found),
            _sorted(busy),
            _sorted(self._stuck),
            _sorted(self._store_lost),
            self._trace_folder,
        )

    def _timeout(
        self, group: str, waiting: dict[int, int], num_ranks: int
    ) -> CollectiveTimeout:
        """Return what ranks of a group waited for, each in its first such work."""
        ranks_of: defaultdict[tuple[int, _Work], list[int]] = defaultdict(list)
        for rank, seq in waiting.items():
            ranks_of[seq, self._works[rank, seq]].append(rank)
        works = tuple(
            TimedOutWork(work.operation, seq, *work[1:], _sorted(ranks))
            for (seq, work), ranks in sorted(ranks_of.items())
        )
        first = works[0].seq
        others = {
            rank: last
            for (name, rank), last in self._statuses.items()
            if name == group and rank not in waiting
        }
        silent: Collection[int] = ()
        # Of other groups the ranks are unknown.
        if group in ("0", "0(default_pg)") or (not group and len(works) == 1):
            known = range(num_ranks or max(self._reporting) + 1)
            silent = {*known} - self._reporting - self._absent
        return CollectiveTimeout(
            group,
            works,
            _sorted(rank for rank, last in others.items() if last[0] < first),
            # Before 2.4 the number of one that never completed may be any.
            _sorted(r for r, last in others.items() if first <= last[1] <= last[0]),
            _sorted(silent),
        )


def _sorted(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))
