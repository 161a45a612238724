"""Messages -> jobs, in bounded memory.

What many ranks report alike is kept once, with the numbers of their processes. A job is
the processes that communicators join, and all others of their hosts, if no other job is
there.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, BinaryIO

from ronde.topology.graph import UNKNOWN
from ronde.topology.nccl_log.log import (
    ChannelCounts,
    EdgesSeen,
    GraphSeen,
    NcclCommunicator,
    NcclJob,
    NcclLog,
    PathSeen,
    RankSeen,
    Reported,
    TreeLink,
    Tuning,
    WarningSeen,
)
from ronde.topology.nccl_log.messages import (
    MessageReader,
    NcclMessage,
    read_lines,
    recognise,
    split_paths,
)

_MAX_COMMUNICATORS = _MAX_PROCESSES = 1 << 17
_MAX_RANKS = 1 << 20
_MAX_VALUES = 1 << 12
_MAX_JOBS = 1000
_MAX_KEPT_TEXT = 400
# NCCL before 2.23 names no more of a ring, and does not say so.
_MAX_RANKS_OF_OLD_RING = 20
# What a level of a tree may be off by: people paste, and lose a blank.
_SLACK = 2
# A host that is named in so few messages may be a word that was cut.
_MAX_MISREAD = 3
# By the numbers that older releases log.
_ALGORITHMS = (
    "TREE",
    "RING",
    "COLLNET_DIRECT",
    "COLLNET_CHAIN",
    "NVLS",
    "NVLS_TREE",
    "PAT",
)
_PROTOCOLS = ("LL", "LL128", "SIMPLE")
_DEVICE = re.compile(r"\[\d+\] ?([^\s\[={},]+)")
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_NIC = re.compile(r"/-?\d+(?:\(\d+\))?")

Value = tuple[str | int | float | None, ...]
Counts = dict[str, dict[Value, dict[int, int]]]
"""By topic and value, the processes (by number) that reported it.

Edges, tunings and warnings are counted; all others have 0.
"""


@dataclass(slots=True)
class _Process:
    number: int  # In the order in which they appear.
    host: str
    pid: int
    num_messages: int = 0


_Entry = tuple[_Process, tuple[int, int], re.Match[str]]
"""A message of a known form: process, numbers of process and thread, and match."""


@dataclass(slots=True)
class _Comm:
    """A communicator, or a draft of one: what a thread reports before its name."""

    name: str  # NCCL's; empty for a draft.
    num_ranks: int = 0  # 0 if unknown.
    num_nodes: int = UNKNOWN
    is_mnnvl: bool = False
    ranks: dict[int, tuple[_Process, RankSeen]] = field(
        default_factory=dict[int, tuple[_Process, RankSeen]]
    )
    rings: dict[int, tuple[int, ...]] = field(
        default_factory=dict[int, tuple[int, ...]]
    )
    channels: set[ChannelCounts] = field(default_factory=set[ChannelCounts])
    processes: dict[int, _Process] = field(default_factory=dict[int, _Process])

    def absorb(self, draft: "_Comm") -> None:
        """Add what a draft holds; what is here already stays."""
        self.num_ranks = self.num_ranks or draft.num_ranks
        if self.num_nodes == UNKNOWN:
            self.num_nodes = draft.num_nodes
        self.is_mnnvl |= draft.is_mnnvl
        # One by one: what a draft holds is little, and this may hold thousands.
        for rank, seen in draft.ranks.items():
            self.ranks.setdefault(rank, seen)
        for channel, order in draft.rings.items():
            if self.num_ranks in (0, len(order)):
                self.rings.setdefault(channel, order)
        self.channels |= draft.channels
        self.processes |= draft.processes

    def may_be(self, draft: "_Comm") -> bool:
        return draft.num_ranks in (0, self.num_ranks) and all(
            rank not in self.ranks or self.ranks[rank][0] is process
            for rank, (process, _) in draft.ranks.items()
        )

    def to_communicator(self) -> NcclCommunicator:
        return NcclCommunicator(
            self.name,
            self.num_ranks,
            self.num_nodes,
            self.is_mnnvl,
            ranks=tuple(
                seen._replace(host=process.host)
                for _, (process, seen) in sorted(self.ranks.items())
            ),
            rings=tuple(order for _, order in sorted(self.rings.items())),
            channels=tuple(sorted(self.channels)),
        )


class _Starts:
    """Takes what ranks report of their start."""

    def __init__(self) -> None:
        self.num_left_out = 0
        self._named: dict[tuple[str, int], _Comm] = {}
        self._drafts: dict[int, _Comm] = {}
        self._of_thread: dict[tuple[int, int], _Comm] = {}
        self._of_pointer: dict[tuple[int, str], _Comm] = {}
        self._num_ranks = 0

    def take_init(self, entry: _Entry) -> None:
        process, thread, match = entry
        _, pointer, rank, num_ranks, device, bus_id, *split, name, word = match.groups()
        at = process.number, pointer
        name = name or self._split_name(process, pointer, split)
        comm = self._named.get((name, int(num_ranks)))
        if comm is None:
            if len(self._named) >= _MAX_COMMUNICATORS:
                self.num_left_out += 1
                return
            comm = self._named[name, int(num_ranks)] = _Comm(name, int(num_ranks))
        for draft in (self._of_thread.get(thread), self._of_pointer.get(at)):
            if draft is not None and not draft.name:
                if draft.num_ranks in (0, comm.num_ranks):
                    comm.absorb(draft)
                self._drafts.pop(id(draft), None)
        self._of_thread[thread] = self._of_pointer[at] = comm
        mark = "has_started" if word == "START" else "is_complete"
        values = {"device": int(device), "bus_id": bus_id, mark: True}
        self._see(comm, int(rank), process, values)

    def take_layout(self, entry: _Entry) -> None:
        process, _, match = entry
        pointer, rank, num_ranks, num_nodes, _, mnnvl = match.groups()
        comm = self._of_pointer.get((process.number, pointer))
        if comm is None or comm.num_ranks not in (0, int(num_ranks)):
            comm = self._current(entry, int(num_ranks))
        if comm is not None:
            self._of_pointer[process.number, pointer] = comm
            comm.num_nodes, comm.is_mnnvl = int(num_nodes), mnnvl == "1"
            self._see(comm, int(rank), process, {})

    def take_ring(self, entry: _Entry) -> None:
        match = entry[2]
        order = tuple(map(int, match.group(3).split()))
        may_be_cut = len(order) == _MAX_RANKS_OF_OLD_RING
        comm = self._current(entry, 0 if may_be_cut else len(order))
        is_cut = may_be_cut and comm and comm.num_ranks not in (0, len(order))
        if comm is not None and not is_cut and self._has_room(len(order)):
            comm.rings[int(match.group(1))] = order

    def take_channels(self, entry: _Entry) -> None:
        if comm := self._current(entry, 0):
            comm.channels.add(ChannelCounts(*map(int, entry[2].groups())))

    def take_timings(self, entry: _Entry) -> None:
        process, _, match = entry
        if comm := self._current(entry, int(match.group(2))):
            phases = [each.split(" ") for each in match.group(4).split(", ")]
            ordered = sorted(((n, float(s)) for n, s in phases), key=lambda p: -p[1])
            values = {"init_s": float(match.group(3)), "init_phases": tuple(ordered)}
            self._see(comm, int(match.group(1)), process, values)

    def communicators(self) -> list[_Comm]:
        """Return all; drafts are added to those they can only belong to."""
        named = list(self._named.values())
        of_host: dict[str, list[_Comm]] = {}
        for comm in named:
            for host in {process.host for process in comm.processes.values()}:
                of_host.setdefault(host, []).append(comm)
        loose: dict[tuple[str, int, int], _Comm] = {}
        for draft in self._drafts.values():
            host = next(iter(draft.processes.values())).host
            all_fitting = (c for c in of_host.get(host, ()) if c.may_be(draft))
            fitting = list(islice(all_fitting, 2))
            if len(fitting) == 1:
                fitting[0].absorb(draft)
            else:
                key = (host, draft.num_ranks, draft.num_nodes)
                loose.setdefault(key, _Comm(f"#{len(loose) + 1}")).absorb(draft)
        return [*named, *loose.values()]

    def _split_name(
        self, process: _Process, pointer: str, split: Iterable[str | None]
    ) -> str:
        """Return a name of our own for one that was split off without a number."""
        parent_pointer, split_count, color = split
        parent = self._of_pointer.get((process.number, parent_pointer or ""))
        if parent is None or not parent.name:
            return f"#{process.host}:{process.pid}:{pointer}"
        return f"#{parent.name}/{split_count or '-'}/{color or '-'}"

    def _current(self, entry: _Entry, num_ranks: int) -> _Comm | None:
        """Return what a thread starts, or its draft; None where it is another."""
        process, thread, _ = entry
        comm = self._of_thread.get(thread)
        if comm is None:
            if len(self._drafts) >= _MAX_COMMUNICATORS:
                self.num_left_out += 1
                return None
            comm = self._of_thread[thread] = _Comm("")
            self._drafts[id(comm)] = comm
        comm.num_ranks = comm.num_ranks or num_ranks
        comm.processes[process.number] = process
        return comm if num_ranks in (0, comm.num_ranks) else None

    def _see(
        self, comm: _Comm, rank: int, process: _Process, values: dict[str, Any]
    ) -> None:
        comm.processes[process.number] = process
        if rank not in comm.ranks and self._has_room(1):
            comm.ranks[rank] = process, RankSeen(rank, "", process.pid)
        owner, seen = comm.ranks.get(rank, (None, None))
        if owner is process and seen:
            comm.ranks[rank] = process, seen._replace(**values)

    def _has_room(self, num_more: int) -> bool:
        if self._num_ranks + num_more > _MAX_RANKS:
            self.num_left_out += 1
            return False
        self._num_ranks += num_more
        return True


class _Collector:
    """Takes messages one by one."""

    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], _Process] = {}
        self.counts: Counts = defaultdict(dict)
        self.starts = _Starts()
        # By transport or kind of operation, and number of the process: two ranks that
        # an edge joins, and bytes of the smallest and largest operation.
        self.examples: dict[tuple[Value, int], tuple[int, int]] = {}
        self.sizes: dict[tuple[Value, int], tuple[int, int]] = {}
        # First warning and its place, by the text without its numbers.
        self.warnings: dict[Value, tuple[str, str]] = {}
        self.loose_versions: list[str] = []
        self.num_messages = 0
        self.num_left_out = 0
        # Of each thread that prints a topology: indent and name of what is open.
        self._branches: dict[tuple[int, int], list[tuple[int, str]]] = {}
        # The number of one process stands for its host where all see the same.
        self._number_of_host: dict[str, int] = {}
        self._takers: dict[str, Callable[[_Entry], None]] = {
            "ib_found": self._take_found,
            "socket_found": self._take_found,
            "system": self._take_system,
            "tree_root": self._take_root,
            "tree_link": self._take_link,
            "paths": self._take_paths,
            "graph": self._take_graph,
            "edge": self._take_edge,
            "tuning": self._take_tuning,
            "old_tuning": self._take_old_tuning,
            "ring": self.starts.take_ring,
            "layout": self.starts.take_layout,
            "init": self.starts.take_init,
            "timings": self.starts.take_timings,
            "channels": self.starts.take_channels,
        }

    def take(self, message: NcclMessage) -> None:
        self.num_messages += 1
        host, pid, thread, is_warning, place, text = message
        if not host:
            version = text.rpartition(" ")[2]
            if version not in self.loose_versions and len(self.loose_versions) < 100:
                self.loose_versions.append(version)
            return
        process = self.processes.get((host, pid)) or self._add_process(host, pid)
        if process is None:
            return
        process.num_messages += 1
        if is_warning:
            kept = text[:_MAX_KEPT_TEXT]
            like = (_NUMBER.sub("#", kept),)
            if self._count("warning", like, process.number):
                self.warnings.setdefault(like, (kept, place))
        if found := recognise(text):
            topic, match = found
            if taker := self._takers.get(topic):
                taker((process, (process.number, thread), match))
            else:
                self._note(topic, match.groups(), process.number)

    def _add_process(self, host: str, pid: int) -> _Process | None:
        if len(self.processes) >= _MAX_PROCESSES:
            self.num_left_out += 1
            return None
        process = _Process(len(self.processes), host, pid)
        self.processes[host, pid] = process
        self._number_of_host.setdefault(host, process.number)
        return process

    def _note(self, topic: str, value: Value, number: int) -> dict[int, int] | None:
        """Note that a process reported a value; return none for too many values."""
        counts = self.counts[topic].get(value)
        if counts is None:
            if len(self.counts[topic]) >= _MAX_VALUES:
                self.num_left_out += 1
                return None
            counts = self.counts[topic][value] = {}
        counts.setdefault(number, 0)
        return counts

    def _count(self, topic: str, value: Value, number: int) -> int:
        """Count a value of a process; return the count, 0 for too many values."""
        counts = self.counts[topic].get(value)
        if counts is None and (counts := self._note(topic, value, number)) is None:
            return 0
        counts[number] = count = counts.get(number, 0) + 1
        return count

    def _take_found(self, entry: _Entry) -> None:
        process, _, match = entry
        network, devices = match.group(1, 2)
        is_socket = network == "Socket"
        topic = "socket_found" if is_socket else "ib_found"
        for device in _DEVICE.findall(devices):
            # The address behind a socket's name is of no use.
            name = device.partition(":")[0] if is_socket else device
            self._note(topic, (network, name), process.number)

    def _take_system(self, entry: _Entry) -> None:
        if len(self._branches) < _MAX_PROCESSES:
            self._branches[entry[1]] = []

    def _take_root(self, entry: _Entry) -> None:
        branches = self._branches.get(entry[1])
        if branches is not None:
            branches[:] = [(0, entry[2].group(1))]

    def _take_link(self, entry: _Entry) -> None:
        process, thread, match = entry
        blanks, kind, gb_per_s, target, port = match.groups()
        branches = self._branches.get(thread, [])
        # What hangs below a link begins where the link's own words end.
        while branches and branches[-1][0] > len(blanks) + _SLACK:
            branches.pop()
        is_below = bool(branches) and len(blanks) - branches[-1][0] <= _SLACK
        source = branches[-1][1] if is_below else ""
        branches.append((match.start(4), target))
        port_gb_per_s = _float(port) if target.startswith("NET/") else 0.0
        value = (kind, _float(gb_per_s), source, target, port_gb_per_s)
        self._note("tree_link", value, self._number_of_host[process.host])

    def _take_paths(self, entry: _Entry) -> None:
        process, _, match = entry
        number = self._number_of_host[process.host]
        source, targets = match.groups()
        for item in split_paths(targets):
            self._note("paths", (source, *item), number)

    def _take_graph(self, entry: _Entry) -> None:
        process, _, match = entry
        pattern, num_channels, intra, inter, *types = match.groups()
        value = (int(pattern), int(num_channels), float(intra), float(inter), *types)
        self._note("graph", value, process.number)

    def _take_edge(self, entry: _Entry) -> None:
        process, _, match = entry
        source, target, transport = match.groups()
        if transport.startswith("NET/"):
            transport = _NIC.sub("", transport, count=1)
        value = (transport,)
        if self._count("edge", value, process.number) == 1:
            # A switch of the network has no rank.
            ends = int(source), int(target or source)
            self.examples[value, process.number] = ends

    def _take_tuning(self, entry: _Entry) -> None:
        collective, size, algorithm, protocol = entry[2].groups()
        self._operate(entry[0], (collective, algorithm, protocol), int(size))

    def _take_old_tuning(self, entry: _Entry) -> None:
        size, algorithm, protocol = map(int, entry[2].groups())
        kind = ("", _named(algorithm, _ALGORITHMS), _named(protocol, _PROTOCOLS))
        self._operate(entry[0], kind, size)

    def _operate(self, process: _Process, kind: Value, size: int) -> None:
        if self._count("tuning", kind, process.number):
            low, high = self.sizes.get((kind, process.number), (size, size))
            self.sizes[kind, process.number] = min(low, size), max(high, size)


def _named(number: int, names: Sequence[str]) -> str:
    return names[number] if number < len(names) else str(number)


def _float(text: str | None) -> float:
    try:
        return float(text or "0")
    except ValueError:
        return 0.0


def read_nccl_log(files: Iterable[BinaryIO]) -> NcclLog:
    """Return the content of one log that lies in one file or in several.

    Raises:
        OSError: One cannot be read.
        UsageError: One is packed, and damaged.
    """
    collector = _Collector()
    total = [0, 0, 0]
    for file in files:
        # Lines break inside each other within a file alone.
        reader = MessageReader()
        for line in read_lines(file):
            for message in reader.feed(line):
                collector.take(message)
        reader.end()
        counts = (reader.num_lines, reader.num_mended, reader.num_lost)
        total = [sum(pair) for pair in zip(total, counts, strict=True)]
    _mend_hosts(collector.processes.values())
    parts = _divide(collector)
    largest = sorted(parts, key=lambda part: -len(part.processes))[:_MAX_JOBS]
    return NcclLog(
        jobs=tuple(_job(part, collector) for part in largest),
        loose_versions=tuple(collector.loose_versions),
        num_lines=total[0],
        num_messages=collector.num_messages,
        num_mended=total[1],
        num_lost=total[2],
        num_left_out=collector.num_left_out
        + collector.starts.num_left_out
        + len(parts)
        - len(largest),
    )


def _mend_hosts(processes: Iterable[_Process]) -> None:
    """Give processes that were named a few times alone the host that they are of."""
    sure: dict[int, list[str]] = {}
    rare: list[_Process] = []
    for process in processes:
        if process.num_messages > _MAX_MISREAD:
            sure.setdefault(process.pid, []).append(process.host[::-1])
        else:
            rare.append(process)
    for hosts in sure.values():
        hosts.sort()
    for process in rare:
        if backwards := sure.get(process.pid):
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


class _Part:
    """What a collector took of one job."""

    def __init__(self) -> None:
        self.processes: dict[int, _Process] = {}
        self.communicators: list[_Comm] = []
        self.counts: Counts = {}

    def values(self, topic: str) -> Iterable[tuple[Value, dict[int, int]]]:
        return self.counts.get(topic, {}).items()

    def reported(self, topic: str, words: str) -> tuple[Reported, ...]:
        merged: dict[str, set[int]] = {}
        for value, numbers in self.values(topic):
            text = words.format(*("" if part is None else part for part in value))
            merged.setdefault(text, set()).update(numbers)
        return tuple(
            Reported(text, self.places(numbers), len(numbers))
            for text, numbers in sorted(merged.items())
        )

    def places(self, numbers: Iterable[int]) -> tuple[str, ...]:
        return tuple(sorted({self.processes[number].host for number in numbers}))


def _divide(collector: _Collector) -> list[_Part]:
    """Return what was taken by job; in one pass, for there may be thousands."""
    communicators = collector.starts.communicators()
    number_of = _number_jobs(collector.processes.values(), communicators)
    parts = {number: _Part() for number in number_of.values()}
    for process in collector.processes.values():
        parts[number_of[process.number]].processes[process.number] = process
    for comm in communicators:
        parts[number_of[next(iter(comm.processes))]].communicators.append(comm)
    for topic, values in collector.counts.items():
        for value, counts in values.items():
            for number, count in counts.items():
                own = parts[number_of[number]].counts.setdefault(topic, {})
                own.setdefault(value, {})[number] = count
    return list(parts.values())


def _number_jobs(
    processes: Iterable[_Process], communicators: Iterable[_Comm]
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


# Fields of a job: topics, and their values in words.
_REPORTED = {
    "versions": {"version": "{}"},
    "drivers": {"driver": "{}"},
    "bootstrap": {"bootstrap": "{}"},
    "networks": {"network": "{}"},
    "candidates": {
        "ib_found": "{} {}",
        "none_found": "{} none",
        "socket_found": "{} {}",
        "ofi_found": "Libfabric {} ({} adapters)",
    },
    "plugins": {"plugin": "{}", "library": "{}"},
    "gdr": {"gdr": "{0} {2} {1}"},
    "uses": {"uses": "{}"},
    "nvls": {"nvls": "{}available on dev {}", "nvls_lost": "lost: {}"},
    "mnnvl": {"mnnvl": "state {3} uuid {1}"},
    "p2p": {"p2p_refused": "{}"},
    "settings": {"setting": "{}={}"},
    "retries": {"retry": "{}"},
    "aborts": {"abort": "aborted"},
}
# Fields whose values end with the hosts.
_PLACED: dict[str, tuple[str, Callable[..., object]]] = {
    "trees": ("tree_link", TreeLink),
    "paths": ("paths", PathSeen),
    "graphs": ("graph", GraphSeen),
}


def _job(part: _Part, collector: _Collector) -> NcclJob:
    communicators = [comm.to_communicator() for comm in part.communicators]
    fields: dict[str, object] = {
        name: tuple(r for topic in topics for r in part.reported(topic, topics[topic]))
        for name, topics in _REPORTED.items()
    }
    for name, (topic, kind) in _PLACED.items():
        values = part.values(topic)
        fields[name] = tuple(kind(*v, part.places(numbers)) for v, numbers in values)
    edges = [
        EdgesSeen(
            str(value[0]),
            sum(counts.values()),
            collector.examples[value, min(counts)],
            part.places(counts),
        )
        for value, counts in part.values("edge")
    ]
    tunings: list[Tuning] = []
    for kind, counts in part.values("tuning"):
        lows, highs = zip(*(collector.sizes[kind, n] for n in counts), strict=True)
        collective, algorithm, protocol = map(str, kind)
        sizes = min(lows), max(highs)
        count = sum(counts.values())
        tunings.append(Tuning(collective, algorithm, protocol, *sizes, count))
    return NcclJob(
        hosts=part.places(part.processes),
        num_processes=len({(p.host, p.pid) for p in part.processes.values()}),
        communicators=tuple(sorted(communicators, key=lambda comm: -comm.num_ranks)),
        edges=tuple(sorted(edges, key=lambda each: -each.num_edges)),
        tunings=tuple(sorted(tunings)),
        warnings=tuple(
            WarningSeen(
                *collector.warnings[like], sum(counts.values()), part.places(counts)
            )
            for like, counts in part.values("warning")
        ),
    )._replace(**fields)
