"""Find time-outs of collectives in the lines of torch's watchdog, torch 1.13 to 2.13.

Source: ProcessGroupNCCL.cpp of torch.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, TypeVar

_Value = TypeVar("_Value")
_MAX_KEPT = 1 << 16  # Works and states of groups.
# Ranks without a line are blamed if this many times as many have one.
_FEW_SILENT, _FEW_OF_GROUPS = 2, 4
_RANK = re.compile(r"(?=\[rank(\d{1,6})\]:)")
# ``[PG ID 5 PG GUID 22(TP) Rank 1]``, ``[PG 0 (default_pg) Rank 1]``, ``[Rank 1]``.
_HOST = re.compile(r"([A-Za-z][\w.-]{0,253}): ")
_MEMBER = re.compile(
    r"\[(?:PG (?:ID \d+ PG GUID )?([^\]\s(]{1,80}) ?(\([^\]]{0,80}\))? )?"
    r"Rank (\d{1,6})\]"
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
_STUCK = re.compile("no heartbeat of|Heartbeat monitor timed out|watchdog got stuck")
_STORE_LOST = re.compile('Failed to check the "should dump" flag')
_ALIVE = re.compile("dump signal|signal dumping|dump debug info|failed or timed out")
_SOURCE = re.compile(r"due to a collective timeout from +rank (\d{1,6})")
_TRACE = re.compile(r"dumping nccl trace to (/\S*)/")


class TimedOutWork(NamedTuple):
    """A collective that timed out, and the ranks that waited for it."""

    operation: str  # ``ALLREDUCE``; empty if unknown.
    seq: int  # Its number in the process group; -1 if unknown.
    num_elements: int  # Of the input; -1 if unknown.
    timeout_s: float  # 0 if unknown.
    ranks: tuple[int, ...] = ()


_UNKNOWN = TimedOutWork("", -1, -1, 0.0)


class CollectiveTimeout(NamedTuple):
    """Collectives of process groups that timed out, and the ranks at fault."""

    groups: tuple[str, ...]  # ``0(default_pg)``; empty if unknown.
    works: tuple[TimedOutWork, ...]  # By number.
    late: tuple[int, ...] = ()  # Ranks that had not called the first of them.
    ahead: tuple[int, ...] = ()  # Ranks that had completed it.
    silent: tuple[int, ...] = ()  # Ranks without a line of torch's.


class WatchdogReport(NamedTuple):
    """Facts from torch's lines in a log: time-outs and states of ranks."""

    num_lines: int = 0
    timeouts: tuple[CollectiveTimeout, ...] = ()  # The one of most ranks first.
    busy: tuple[int, ...] = ()  # Ranks that had called a collective.
    stuck: tuple[int, ...] = ()  # Ranks with a watchdog that made no progress.
    store_lost: tuple[int, ...] = ()
    trace_folder: str = ""  # The folder of the flight recorder's files.


class WatchdogReader:
    """Collects time-outs from single lines; ignores lines of other programs."""

    def __init__(self) -> None:
        self.num_lines = 0
        # By rank and number; another line may name the group.
        self._works: dict[tuple[int, int], TimedOutWork] = {}
        self._group_of: dict[tuple[int, int], str] = {}
        # By group and rank: numbers of the last enqueued and completed work.
        self._statuses: dict[tuple[str, int], tuple[int, int]] = {}
        # Ranks by the kind of line that they have.
        self._ranks: defaultdict[re.Pattern[str], set[int]] = defaultdict(set)
        self._hosts: defaultdict[int, set[str]] = defaultdict(set)  # By rank.
        self._trace_folder = ""
        self._sources: set[int] = set()  # Ranks that others name.

    def feed(self, line: str) -> None:
        for part in _RANK.sub("\n", line).split("\n") if "[rank" in line else [line]:
            members = _MEMBER.findall(part)
            if members and len(self._works) + len(self._statuses) < _MAX_KEPT:
                rank = _RANK.match(part)
                if rank and (host := _HOST.match(line)):
                    self._hosts[int(rank[1])].add(host[1])
                self._feed_rank(int(rank[1] if rank else members[-1][2]), members, part)

    def _feed_rank(self, rank: int, members: list[tuple[str, ...]], part: str) -> None:
        group = next((id_ + name for id_, name, _ in members if id_), "")
        kinds = (_STUCK, _STORE_LOST, _ALIVE, _WORK, _STATUS)
        found = [kind for kind in kinds if kind.search(part)]
        for kind in found:
            self._ranks[kind].add(rank)
        for seq, operation, numel, timeout_ms in _WORK.findall(part):
            key = rank, int(seq or -1)
            work = operation, key[1], int(numel or -1), int(timeout_ms) / 1000
            if not self._works.get(key, _UNKNOWN).operation:
                self._works[key] = TimedOutWork(*work)
            self._group_of |= {key: group} if group else {}
        for seq, enqueued, completed in _STATUS.findall(part):
            self._statuses.setdefault((group, rank), (int(enqueued), int(completed)))
            if seq:
                key = rank, int(seq)
                self._works.setdefault(key, _UNKNOWN._replace(seq=int(seq)))
                self._group_of |= {key: group} if group else {}
        if source := _SOURCE.search(part):
            self._sources.add(int(source[1]))
        if trace := _TRACE.search(part):
            self._trace_folder = trace[1]
        self.num_lines += bool(found)

    def report(
        self, known: Collection[int] = (), *, is_one_job: bool = True
    ) -> WatchdogReport:
        """Return the facts from all lines; ``known`` are the ranks in the log."""
        works = self._works or {(rank, -1): _UNKNOWN for rank in self._sources}
        # A rank on two hosts belongs to two jobs.
        is_one_job &= all(len(hosts) == 1 for hosts in self._hosts.values())
        is_one_job |= len({rank for rank, _ in works}) == len(works)
        waiting = self._by_group(works, is_one_job=is_one_job)
        reporting = self._reporting()
        silent = {*(known or range(max(reporting, default=0)))} - reporting
        folded: dict[CollectiveTimeout, CollectiveTimeout] = {}
        for group, job in sorted(waiting):
            found = self._timeout(group, waiting[group, job], is_one_job=is_one_job)
            # Ranks of other groups, and the number of ranks, are guesses.
            is_all = group in ("0", "0(default_pg)")
            is_all = is_all or (not group and len(found.works) == 1)
            most = len(reporting) / (_FEW_SILENT if is_all else _FEW_OF_GROUPS)
            # Answers to other ranks alone prove little.
            is_sure = known and is_all and self._works
            if is_one_job and (len(silent) <= most or is_sure):
                found = found._replace(silent=_sorted(silent))
            bare = tuple(work._replace(ranks=()) for work in found.works)
            # Groups that wait only for the same silent ranks have the same time-out.
            is_clear = found.silent and not (found.late or found.ahead)
            key = found._replace(groups=(), works=() if is_clear else bare)
            folded[key] = _join(folded[key], found) if key in folded else found
        found = [*folded.values()]
        found.sort(key=lambda each: -sum(len(work.ranks) for work in each.works))
        called = [rank for (_, rank), last in self._statuses.items() if last[0] > 0]
        return WatchdogReport(
            self.num_lines,
            tuple(found),
            _sorted({*called, *(rank for rank, _ in self._works)}),
            _sorted(self._ranks[_STUCK]),
            _sorted(self._ranks[_STORE_LOST]),
            self._trace_folder,
        )

    def _by_group(
        self, works: Mapping[tuple[int, int], TimedOutWork], *, is_one_job: bool
    ) -> Mapping[tuple[str, TimedOutWork], dict[int, TimedOutWork]]:
        """Return the call that each rank waits for, by process group and job."""
        # Ranks of an unknown group or call join those that name it.
        groups: defaultdict[TimedOutWork | int, set[str]] = defaultdict(set)
        calls: defaultdict[int, set[TimedOutWork]] = defaultdict(set)
        for (rank, seq), work in works.items():
            for key in (work, seq):
                groups[key] |= {self._group_of.get((rank, seq), "")} - {""}
            calls[seq] |= {work} if work.operation else set()
        waiting: defaultdict[tuple[str, TimedOutWork], dict[int, TimedOutWork]]
        waiting = defaultdict(dict)
        # Of several works of a rank the first counts.
        for key, work in sorted(works.items(), reverse=True):
            group = _only(groups[work]) or _only(groups[key[1]]) or ""
            call = work if work.operation else _only(calls[key[1]]) or work
            group = self._group_of.get(key, group)
            # With several jobs, ranks that wait for the same call are of one job.
            waiting[group, _UNKNOWN if is_one_job else call][key[0]] = call
        return waiting

    def _reporting(self) -> set[int]:
        named = self._sources if not self._works else ()
        return {rank for rank, _ in self._works}.union(named, *self._ranks.values())

    def _timeout(
        self, group: str, waiting: dict[int, TimedOutWork], *, is_one_job: bool
    ) -> CollectiveTimeout:
        ranks_of: defaultdict[TimedOutWork, list[int]] = defaultdict(list)
        for rank, work in waiting.items():
            ranks_of[work].append(rank)
        ordered = sorted(ranks_of, key=lambda work: (work.seq, work))
        first = ordered[0].seq
        late, ahead = set[int](), set[int]()
        for (name, rank), (enqueued, completed) in self._statuses.items():
            if name != group or rank in waiting or not is_one_job:
                continue
            if enqueued < first:
                late.add(rank)
            # Torch 2.3 prints any number where none was completed.
            elif first >= 0 and first <= completed <= enqueued:
                ahead.add(rank)
        works = (w._replace(ranks=_sorted(ranks_of[w])) for w in ordered)
        groups = (group,) * bool(group)
        return CollectiveTimeout(groups, tuple(works), _sorted(late), _sorted(ahead))


def _only(found: Collection[_Value]) -> _Value | None:
    return next(iter(found)) if len(found) == 1 else None


def _join(first: CollectiveTimeout, second: CollectiveTimeout) -> CollectiveTimeout:
    ranks_of: defaultdict[TimedOutWork, set[int]] = defaultdict(set)
    for work in (*first.works, *second.works):
        ranks_of[work._replace(ranks=())].update(work.ranks)
    works = (w._replace(ranks=_sorted(ranks)) for w, ranks in sorted(ranks_of.items()))
    groups = dict.fromkeys((*first.groups, *second.groups))
    return first._replace(groups=tuple(groups), works=tuple(works))


def _sorted(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))
