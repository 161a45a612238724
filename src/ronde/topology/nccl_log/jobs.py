"""What a collector took -> jobs.

Processes belong to one job where a communicator joins them. Who is in none belongs to
the job of its host, if there is one there and no other.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from ronde.topology.nccl_log.collector import Collector, SizeTally, Value
from ronde.topology.nccl_log.log import (
    Communicator,
    EdgesSeen,
    GraphSeen,
    Job,
    PathSeen,
    RankSeen,
    Said,
    TreeLink,
    Tuning,
    WarningSeen,
)
from ronde.topology.nccl_log.started import CommTally, Process, RankTally
from ronde.topology.nccl_log.statements import Topic

T = TypeVar("T")

_MAX_JOBS = 1000


class _View(NamedTuple):
    """What a collector took, as far as one job goes."""

    collector: Collector
    processes: dict[int, Process]

    def values(self, topic: Topic) -> Iterator[tuple[Value, set[int]]]:
        """Yield values with the numbers of the job's processes that said them."""
        for value, numbers in self.collector.said.get(topic, {}).items():
            if own := self.own(numbers):
                yield value, own

    def own(self, numbers: Collection[int]) -> set[int]:
        """Return those numbers that are of the job."""
        # From the smaller side: of a log with many jobs, each has few processes.
        if len(numbers) > len(self.processes):
            return {number for number in self.processes if number in numbers}
        return {number for number in numbers if number in self.processes}

    def said(self, topic: Topic, words: str = "{}") -> tuple[Said, ...]:
        """Return what was said on a topic, with its parts put into words."""
        merged: dict[str, set[int]] = {}
        for value, numbers in self.values(topic):
            text = words.format(*("" if part is None else part for part in value))
            merged.setdefault(text, set()).update(numbers)
        return tuple(
            Said(text, self.places(numbers), len(numbers))
            for text, numbers in sorted(merged.items())
        )

    def places(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Return the hosts of processes."""
        return tuple(sorted({self.processes[number].host for number in numbers}))


def make_jobs(collector: Collector) -> tuple[tuple[Job, ...], int]:
    """Return the jobs, the one with most processes first, and how many are left out."""
    communicators = collector.starts.communicators()
    number_of = _number_jobs(collector.processes.values(), communicators)
    members: dict[int, dict[int, Process]] = {}
    for process in collector.processes.values():
        members.setdefault(number_of[process.number], {})[process.number] = process
    of_job: dict[int, list[CommTally]] = {}
    for comm in communicators:
        of_job.setdefault(number_of[next(iter(comm.processes))], []).append(comm)
    largest = sorted(members.items(), key=lambda item: -len(item[1]))[:_MAX_JOBS]
    jobs = tuple(
        _job(_View(collector, processes), of_job.get(number, []))
        for number, processes in largest
    )
    return jobs, len(members) - len(jobs)


def _number_jobs(
    processes: Iterable[Process], communicators: Iterable[CommTally]
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


def _job(view: _View, communicators: list[CommTally]) -> Job:
    said = view.said
    return Job(
        hosts=view.places(view.processes),
        num_processes=len({(p.host, p.pid) for p in view.processes.values()}),
        communicators=_communicators(communicators),
        versions=said(Topic.VERSION),
        drivers=said(Topic.DRIVER),
        bootstrap=said(Topic.BOOTSTRAP),
        networks=said(Topic.NETWORK),
        candidates=_candidates(view),
        plugins=said(Topic.PLUGIN) + said(Topic.LIBRARY),
        gdr=said(Topic.GDR, "{0} {2} {1}"),
        uses=said(Topic.USES),
        nvls=_nvls(view),
        mnnvl=said(Topic.MNNVL, "state {3} uuid {1}"),
        p2p=said(Topic.P2P_REFUSED),
        settings=said(Topic.SETTING, "{}={}"),
        trees=_placed(view, Topic.TREE_LINK, TreeLink),
        paths=_placed(view, Topic.PATHS, PathSeen),
        graphs=_graphs(view),
        edges=_edges(view),
        tunings=_tunings(view, view.collector.tunings),
        warnings=_warnings(view),
    )


def _communicators(tallies: Iterable[CommTally]) -> tuple[Communicator, ...]:
    found = [
        Communicator(
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


def _candidates(view: _View) -> tuple[Said, ...]:
    return (
        *view.said(Topic.IB_FOUND, "{} {}"),
        *view.said(Topic.NONE_FOUND, "{} none"),
        *view.said(Topic.SOCKET_FOUND, "{} {}"),
    )


def _nvls(view: _View) -> tuple[Said, ...]:
    return (
        *view.said(Topic.NVLS, "{}available on dev {}"),
        *view.said(Topic.NVLS_LOST, "lost: {}"),
    )


def _placed(view: _View, topic: Topic, kind: Callable[..., T]) -> tuple[T, ...]:
    """Return values whose last field is the hosts."""
    return tuple(
        kind(*value, view.places(numbers)) for value, numbers in view.values(topic)
    )


def _graphs(view: _View) -> tuple[GraphSeen, ...]:
    found: list[GraphSeen] = []
    for value, numbers in view.values(Topic.GRAPH):
        pattern, channels, intra, inter, intra_type, inter_type = map(str, value)
        found.append(
            GraphSeen(
                int(pattern),
                int(channels),
                _number(intra),
                _number(inter),
                intra_type,
                inter_type,
                view.places(numbers),
            )
        )
    return tuple(found)


def _edges(view: _View) -> tuple[EdgesSeen, ...]:
    found: list[EdgesSeen] = []
    for transport, tallies in view.collector.edges.items():
        if own := view.own(tallies):
            num_edges = sum(tallies[number].num_edges for number in own)
            example = tallies[min(own)].example
            found.append(EdgesSeen(transport, num_edges, example, view.places(own)))
    return tuple(sorted(found, key=lambda edges: -edges.num_edges))


def _tunings(
    view: _View, tallies: Mapping[tuple[str, str, str], SizeTally]
) -> tuple[Tuning, ...]:
    return tuple(
        sorted(
            Tuning(*kind, tally.min_bytes, tally.max_bytes, tally.num_operations)
            for kind, tally in tallies.items()
            if view.own(tally.processes)
        )
    )


def _warnings(view: _View) -> tuple[WarningSeen, ...]:
    found: list[WarningSeen] = []
    for tally in view.collector.warnings.values():
        if own := view.own(tally.num_times):
            num_times = sum(tally.num_times[number] for number in own)
            places = view.places(own)
            found.append(WarningSeen(tally.text, tally.place, num_times, places))
    return tuple(found)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
