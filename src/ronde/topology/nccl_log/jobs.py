"""What a collector took -> jobs.

Processes belong to one job where a communicator joins them. Who is in none belongs to
the job of its host, if there is one there and no other.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from ronde.topology.nccl_log.collector import (
    Collector,
    CommTally,
    EdgeTally,
    Kind,
    NcclProcess,
    RankTally,
    SizeTally,
    Value,
    WarningTally,
)
from ronde.topology.nccl_log.log import (
    EdgesSeen,
    GraphSeen,
    NcclCommunicator,
    NcclJob,
    PathSeen,
    RankSeen,
    Reported,
    TreeLink,
    Tuning,
    WarningSeen,
)
from ronde.topology.nccl_log.patterns import Topic

_MAX_MISREAD = 3


def mend_hosts(processes: Iterable[NcclProcess]) -> None:
    """Give processes that were named a few times alone the host that they are of."""
    sure: dict[int, list[str]] = {}
    rare: dict[int, list[NcclProcess]] = {}
    for process in processes:
        if process.num_messages > _MAX_MISREAD:
            sure.setdefault(process.pid, []).append(process.host)
        else:
            rare.setdefault(process.pid, []).append(process)
    for pid, few in rare.items():
        if hosts := sure.get(pid):
            backwards = sorted(host[::-1] for host in hosts)
            for process in few:
                process.host = _own_host(process.host, backwards)


def _own_host(name: str, backwards: Sequence[str]) -> str:
    """Return the longest host that a name ends with, or the one that ends with it."""
    end = name[::-1]
    for length in range(len(end), 0, -1):
        at = bisect_left(backwards, end[:length])
        if at < len(backwards) and backwards[at] == end[:length]:
            return end[:length][::-1]
    at = bisect_left(backwards, end)
    longer = [each for each in backwards[at : at + 2] if each.startswith(end)]
    return longer[0][::-1] if len(longer) == 1 else name


K = TypeVar("K")
T = TypeVar("T")

_MAX_JOBS = 1000


class _Part:
    """What a collector took of one job."""

    def __init__(self) -> None:
        self.processes: dict[int, NcclProcess] = {}
        self.communicators: list[CommTally] = []
        self.edges: dict[str, dict[int, EdgeTally]] = {}
        self.tunings: dict[Kind, dict[int, SizeTally]] = {}
        self.warnings: dict[str, dict[int, int]] = {}
        self._said: dict[Topic, dict[Value, set[int]]] = {}

    def note(self, topic: Topic, value: Value, number: int) -> None:
        """Note what one of the job's processes said."""
        values = self._said.setdefault(topic, {})
        values.setdefault(value, set()).add(number)

    def values(self, topic: Topic) -> Iterable[tuple[Value, set[int]]]:
        """Return values with the numbers of the processes that said them."""
        return self._said.get(topic, {}).items()

    def said(self, topic: Topic, words: str = "{}") -> tuple[Reported, ...]:
        """Return what was said on a topic, with its parts put into words."""
        merged: dict[str, set[int]] = {}
        for value, numbers in self.values(topic):
            text = words.format(*("" if part is None else part for part in value))
            merged.setdefault(text, set()).update(numbers)
        return tuple(
            Reported(text, self.places(numbers), len(numbers))
            for text, numbers in sorted(merged.items())
        )

    def places(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Return the hosts of processes."""
        return tuple(sorted({self.processes[number].host for number in numbers}))


def make_jobs(collector: Collector) -> tuple[tuple[NcclJob, ...], int]:
    """Return the jobs, the one with most processes first, and how many are left out."""
    parts = _divide(collector)
    largest = sorted(parts, key=lambda part: -len(part.processes))[:_MAX_JOBS]
    jobs = tuple(_job(part, collector.warnings) for part in largest)
    return jobs, len(parts) - len(jobs)


def _divide(collector: Collector) -> Collection[_Part]:
    """Return what was taken, job by job.

    Everything is gone through once: there may be thousands of jobs.
    """
    communicators = collector.starts.communicators()
    number_of = _number_jobs(collector.processes.values(), communicators)
    parts = {number: _Part() for number in number_of.values()}

    def part_of(number: int) -> _Part:
        return parts[number_of[number]]

    for process in collector.processes.values():
        part_of(process.number).processes[process.number] = process
    for comm in communicators:
        part_of(next(iter(comm.processes))).communicators.append(comm)
    for topic, values in collector.said.items():
        for value, numbers in values.items():
            for number in numbers:
                part_of(number).note(topic, value, number)
    _deal(collector.edges, lambda number: part_of(number).edges)
    _deal(collector.tunings, lambda number: part_of(number).tunings)
    times = {like: each.num_times for like, each in collector.warnings.items()}
    _deal(times, lambda number: part_of(number).warnings)
    return parts.values()


def _deal(
    told: Mapping[K, Mapping[int, T]],
    own_of: Callable[[int], dict[K, dict[int, T]]],
) -> None:
    """Give what was told by process to the job of each process."""
    for key, by_process in told.items():
        for number, each in by_process.items():
            own_of(number).setdefault(key, {})[number] = each


def _number_jobs(
    processes: Iterable[NcclProcess], communicators: Iterable[CommTally]
) -> dict[int, int]:
    """Return the number of each process's job, by the process's number."""
    above = {process.number: process.number for process in processes}

    def top(number: int) -> int:
        while above[number] != number:
            above[number] = above[above[number]]
            number = above[number]
        return number

    joined: set[int] = set()
    for comm in communicators:
        first = top(next(iter(comm.processes)))
        for number in comm.processes:
            above[top(number)] = first
            joined.add(number)
    of_host: dict[str, set[int]] = {}
    for process in processes:
        if process.number in joined:
            of_host.setdefault(process.host, set()).add(top(process.number))
    alone: dict[str, int] = {}
    for process in processes:
        if process.number not in joined:
            tops = of_host.get(process.host, set())
            home = alone.setdefault(process.host, process.number)
            above[process.number] = next(iter(tops)) if len(tops) == 1 else home
    return {number: top(number) for number in above}


def _job(part: _Part, warnings: Mapping[str, WarningTally]) -> NcclJob:
    said = part.said
    return NcclJob(
        hosts=part.places(part.processes),
        num_processes=len({(p.host, p.pid) for p in part.processes.values()}),
        communicators=_communicators(part.communicators),
        versions=said(Topic.VERSION),
        drivers=said(Topic.DRIVER),
        bootstrap=said(Topic.BOOTSTRAP),
        networks=said(Topic.NETWORK),
        candidates=_candidates(part),
        plugins=said(Topic.PLUGIN) + said(Topic.LIBRARY),
        gdr=said(Topic.GDR, "{0} {2} {1}"),
        uses=said(Topic.USES),
        nvls=_nvls(part),
        mnnvl=said(Topic.MNNVL, "state {3} uuid {1}"),
        p2p=said(Topic.P2P_REFUSED),
        settings=said(Topic.SETTING, "{}={}"),
        retries=said(Topic.RETRY),
        aborts=said(Topic.ABORT, "aborted"),
        trees=_placed(part, Topic.TREE_LINK, TreeLink),
        paths=_placed(part, Topic.PATHS, PathSeen),
        graphs=_graphs(part),
        edges=_edges(part),
        tunings=_tunings(part),
        warnings=_warnings(part, warnings),
    )


def _communicators(tallies: Iterable[CommTally]) -> tuple[NcclCommunicator, ...]:
    found = [
        NcclCommunicator(
            name=tally.name,
            num_ranks=tally.num_ranks,
            num_nodes=tally.num_nodes,
            is_mnnvl=tally.is_mnnvl,
            ranks=tuple(_rank(r, seen) for r, seen in sorted(tally.ranks.items())),
            rings=tuple(order for _, order in sorted(tally.rings.items())),
            channels=tuple(sorted(tally.channels)),
        )
        for tally in tallies
    ]
    return tuple(sorted(found, key=lambda comm: -comm.num_ranks))


def _rank(rank: int, seen: RankTally) -> RankSeen:
    return RankSeen(
        rank=rank,
        host=seen.process.host,
        pid=seen.process.pid,
        device=seen.device,
        bus_id=seen.bus_id,
        has_started=seen.has_started,
        is_complete=seen.is_complete,
        init_s=seen.init_s,
        init_phases=seen.init_phases,
    )


def _candidates(part: _Part) -> tuple[Reported, ...]:
    return (
        *part.said(Topic.IB_FOUND, "{} {}"),
        *part.said(Topic.NONE_FOUND, "{} none"),
        *part.said(Topic.SOCKET_FOUND, "{} {}"),
        *part.said(Topic.OFI_FOUND, "Libfabric {} ({} adapters)"),
    )


def _nvls(part: _Part) -> tuple[Reported, ...]:
    return (
        *part.said(Topic.NVLS, "{}available on dev {}"),
        *part.said(Topic.NVLS_LOST, "lost: {}"),
    )


def _placed(part: _Part, topic: Topic, kind: Callable[..., T]) -> tuple[T, ...]:
    """Return values whose last field is the hosts."""
    return tuple(
        kind(*value, part.places(numbers)) for value, numbers in part.values(topic)
    )


def _graphs(part: _Part) -> tuple[GraphSeen, ...]:
    found: list[GraphSeen] = []
    for value, numbers in part.values(Topic.GRAPH):
        pattern, channels, intra, inter, intra_type, inter_type = map(str, value)
        found.append(
            GraphSeen(
                int(pattern),
                int(channels),
                float(intra),
                float(inter),
                intra_type,
                inter_type,
                part.places(numbers),
            )
        )
    return tuple(found)


def _edges(part: _Part) -> tuple[EdgesSeen, ...]:
    found: list[EdgesSeen] = []
    for transport, tallies in part.edges.items():
        num_edges = sum(tally.num_edges for tally in tallies.values())
        example = tallies[min(tallies)].example
        found.append(EdgesSeen(transport, num_edges, example, part.places(tallies)))
    return tuple(sorted(found, key=lambda edges: -edges.num_edges))


def _tunings(part: _Part) -> tuple[Tuning, ...]:
    return tuple(
        sorted(
            Tuning(
                *kind,
                min(size.min_bytes for size in sizes.values()),
                max(size.max_bytes for size in sizes.values()),
                sum(size.num_operations for size in sizes.values()),
            )
            for kind, sizes in part.tunings.items()
        )
    )


def _warnings(
    part: _Part, tallies: Mapping[str, WarningTally]
) -> tuple[WarningSeen, ...]:
    found: list[WarningSeen] = []
    for like, times in part.warnings.items():
        text, place = tallies[like].text, tallies[like].place
        found.append(WarningSeen(text, place, sum(times.values()), part.places(times)))
    return tuple(found)
