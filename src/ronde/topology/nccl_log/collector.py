"""Messages -> jobs, in bounded memory.

What many ranks report alike is kept once, with their processes. A job is the processes
that communicators join, and all others of their hosts, if no other job is there.
"""

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, BinaryIO

from ronde.topology.graph import UNKNOWN
from ronde.topology.nccl_log import log
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
_MAX_LOOSE_VERSIONS = 100
_MAX_KEPT_TEXT = 400
# NCCL before 2.23 names no more of a ring, and does not say so.
_MAX_RANKS_OF_OLD_RING = 20
# What a level of a tree may be off by: people paste, and lose a blank.
_SLACK = 2
# A host that is named in so few messages may be a word that was cut.
_MAX_MISREAD = 3
_DEVICE = re.compile(r"\[\d+\] ?([^\s\[={},]+)")
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_NIC = re.compile(r"/-?\d+(?:\(\d+\))?")


_Match = re.Match[str]


class _Process:
    def __init__(self, host: str, pid: int) -> None:
        self.host = host
        self.pid = pid
        self.num_messages = 0
        # What it starts, by thread and by NCCL's pointer.
        self.comms: dict[int | str, _Comm] = {}
        # Of each thread that prints a topology: indent and name of what is open.
        self.branches: dict[int, list[tuple[int, str]]] = {}


_Notes = dict[_Process, list[Any]]
"""Who reported a value: a count, and details of the topic."""


class _Comm:
    """A communicator, or a draft of one: what a thread reports before its name."""

    def __init__(self, name: str = "", num_ranks: int = 0) -> None:
        self.name = name  # NCCL's; empty for a draft.
        self.num_ranks = num_ranks  # 0 if unknown.
        self.num_nodes = UNKNOWN
        self.is_mnnvl = False
        # By rank, with the fields of ``RankSeen``.
        self.ranks: dict[int, tuple[_Process, dict[str, Any]]] = {}
        self.channels: set[log.ChannelCounts] = set()
        self.processes: dict[_Process, None] = {}

    def absorb(self, draft: "_Comm") -> None:
        """Add what a draft holds; what is here already stays."""
        self.num_ranks = self.num_ranks or draft.num_ranks
        if self.num_nodes == UNKNOWN:
            self.num_nodes = draft.num_nodes
        self.is_mnnvl |= draft.is_mnnvl
        # One by one: what a draft holds is little, and this may hold thousands.
        for rank, seen in draft.ranks.items():
            self.ranks.setdefault(rank, seen)
        self.channels |= draft.channels
        self.processes |= draft.processes

    def may_be(self, draft: "_Comm") -> bool:
        return draft.num_ranks in (0, self.num_ranks) and all(
            rank not in self.ranks or self.ranks[rank][0] is process
            for rank, (process, _) in draft.ranks.items()
        )


class _Collector:
    """Takes messages one by one; ``take_X`` those of the topic X."""

    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], _Process] = {}
        self.notes: dict[tuple[str, Any], _Notes] = {}  # By topic and value.
        self.loose_versions: list[str] = []
        self.num_messages = 0
        self.num_left_out = 0
        self._num_values: Counter[str] = Counter()
        self._num_ranks = 0
        self._named: dict[tuple[str, int], _Comm] = {}
        self._drafts: dict[_Comm, None] = {}
        # One process stands for its host where all see the same.
        self._first_of_host: dict[str, _Process] = {}
        self._takers: dict[str, Callable[[_Process, int, _Match], None]] = {
            name.removeprefix("take_"): getattr(self, name)
            for name in dir(self)
            if name.startswith("take_")
        }

    def take(self, message: NcclMessage) -> None:
        self.num_messages += 1
        host, pid, thread, is_warning, place, text = message
        if not host:
            version = text.rpartition(" ")[2]
            is_full = len(self.loose_versions) >= _MAX_LOOSE_VERSIONS
            if not is_full and version not in self.loose_versions:
                self.loose_versions.append(version)
            return
        process = self.processes.get((host, pid))
        if process is None:
            if not self._has_room(len(self.processes), _MAX_PROCESSES):
                return
            process = self.processes[host, pid] = _Process(host, pid)
            self._first_of_host.setdefault(host, process)
        process.num_messages += 1
        if is_warning:
            kept = text[:_MAX_KEPT_TEXT]
            self._note(process, "warnings", _NUMBER.sub("#", kept), kept, place)
        if found := recognise(text):
            topic, words, match = found
            if taker := self._takers.get(topic):
                taker(process, thread, match)
            else:
                value = words.format(*match.groups()) if words else match[1]
                self._note(process, topic, value)

    def _has_room(self, num: int, most: int) -> bool:
        self.num_left_out += num >= most
        return num < most

    def _note(
        self, process: _Process, topic: str, value: object, *details: object
    ) -> list[Any] | None:
        """Count a value of a process; return its note, none for too many values."""
        notes = self.notes.get((topic, value))
        if notes is None:
            if not self._has_room(self._num_values[topic], _MAX_VALUES):
                return None
            self._num_values[topic] += 1
            notes = self.notes[topic, value] = {}
        note = notes.get(process)
        if note is None:
            note = notes[process] = [0, *details]
        note[0] += 1
        return note

    def take_found(self, process: _Process, _: int, match: _Match) -> None:
        network, devices = match.groups()
        for device in _DEVICE.findall(devices):
            # The address behind a socket's name is of no use.
            name = device.partition(":")[0] if network == "Socket" else device
            self._note(process, "candidates", f"{network} {name}")

    def take_system(self, process: _Process, thread: int, _: _Match) -> None:
        process.branches[thread] = []

    def take_tree_root(self, process: _Process, thread: int, match: _Match) -> None:
        if thread in process.branches:
            process.branches[thread] = [(0, match[1])]

    def take_tree_link(self, process: _Process, thread: int, match: _Match) -> None:
        blanks, kind, gb_per_s, target, port = match.groups()
        branches = process.branches.get(thread, [])
        # What hangs below a link begins where the link's own words end.
        while branches and branches[-1][0] > len(blanks) + _SLACK:
            branches.pop()
        is_below = bool(branches) and len(blanks) - branches[-1][0] <= _SLACK
        source = branches[-1][1] if is_below else ""
        branches.append((match.start(4), target))
        port_gb_per_s = _float(port) if target.startswith("NET/") else 0.0
        value = (kind, _float(gb_per_s), source, target, port_gb_per_s)
        self._note(self._first_of_host[process.host], "trees", value)

    def take_paths(self, process: _Process, _: int, match: _Match) -> None:
        source, targets = match.groups()
        for item in split_paths(targets):
            self._note(self._first_of_host[process.host], "paths", (source, *item))

    def take_graph(self, process: _Process, _: int, match: _Match) -> None:
        pattern, num_channels, intra, inter, *types = match.groups()
        value = (int(pattern), int(num_channels), float(intra), float(inter), *types)
        self._note(process, "graphs", value)

    def take_edge(self, process: _Process, _: int, match: _Match) -> None:
        source, target, transport = match.groups()
        if transport.startswith("NET/"):
            transport = _NIC.sub("", transport, count=1)
        # A switch of the network has no rank.
        self._note(process, "edges", transport, source, target or source)

    def take_tuning(self, process: _Process, _: int, match: _Match) -> None:
        collective, text, algorithm, protocol = match.groups()
        kind, size = (collective, algorithm, protocol), int(text)
        if note := self._note(process, "tunings", kind, size, size):
            note[1:] = min(note[1], size), max(note[2], size)

    def take_init(self, process: _Process, thread: int, match: _Match) -> None:
        pointer, rank, num_ranks, device, bus_id, *split, name, word = match.groups()
        key = name or _split_name(process, pointer, split), int(num_ranks)
        comm = self._named.get(key)
        if comm is None:
            if not self._has_room(len(self._named), _MAX_COMMUNICATORS):
                return
            comm = self._named[key] = _Comm(*key)
        for place in (thread, pointer):
            draft = process.comms.get(place)
            if draft is not None and not draft.name:
                if draft.num_ranks in (0, comm.num_ranks):
                    comm.absorb(draft)
                self._drafts.pop(draft, None)
            process.comms[place] = comm
        mark = "has_started" if word == "START" else "is_complete"
        values = {"device": int(device), "bus_id": bus_id, mark: True}
        self._see(comm, int(rank), process, values)

    def take_layout(self, process: _Process, thread: int, match: _Match) -> None:
        pointer, *numbers = match.groups()
        rank, num_ranks, num_nodes, mnnvl = map(int, numbers)
        comm = process.comms.get(pointer)
        if comm is None or comm.num_ranks not in (0, num_ranks):
            comm = self._current(process, thread, num_ranks)
        if comm is not None:
            process.comms[pointer] = comm
            comm.num_nodes, comm.is_mnnvl = num_nodes, mnnvl == 1
            self._see(comm, rank, process, {})

    def take_ring(self, process: _Process, thread: int, match: _Match) -> None:
        num_ranks = len(match[1].split())
        may_be_cut = num_ranks == _MAX_RANKS_OF_OLD_RING
        self._current(process, thread, 0 if may_be_cut else num_ranks)

    def take_channels(self, process: _Process, thread: int, match: _Match) -> None:
        if comm := self._current(process, thread, 0):
            comm.channels.add(log.ChannelCounts(*map(int, match.groups())))

    def take_timings(self, process: _Process, thread: int, match: _Match) -> None:
        if comm := self._current(process, thread, int(match[2])):
            phases = [each.split(" ") for each in match[4].split(", ")]
            ordered = sorted(((n, float(s)) for n, s in phases), key=lambda p: -p[1])
            values = {"init_s": float(match[3]), "init_phases": tuple(ordered)}
            self._see(comm, int(match[1]), process, values)

    def _current(self, process: _Process, thread: int, num_ranks: int) -> _Comm | None:
        """Return what a thread starts, or its draft; None where it is another."""
        comm = process.comms.get(thread)
        if comm is None:
            if not self._has_room(len(self._drafts), _MAX_COMMUNICATORS):
                return None
            comm = process.comms[thread] = _Comm()
            self._drafts[comm] = None
        comm.num_ranks = comm.num_ranks or num_ranks
        comm.processes[process] = None
        return comm if num_ranks in (0, comm.num_ranks) else None

    def _see(
        self, comm: _Comm, rank: int, process: _Process, values: dict[str, Any]
    ) -> None:
        comm.processes[process] = None
        if rank not in comm.ranks and self._has_room(self._num_ranks, _MAX_RANKS):
            self._num_ranks += 1
            comm.ranks[rank] = process, {}
        owner, seen = comm.ranks.get(rank) or (None, values)
        if owner is process:
            seen.update(values)

    def communicators(self) -> list[_Comm]:
        """Return all; drafts are added to those they can only belong to."""
        of_host: defaultdict[str, list[_Comm]] = defaultdict(list)
        for comm in self._named.values():
            for host in {process.host for process in comm.processes}:
                of_host[host].append(comm)
        loose: dict[tuple[str, int, int], _Comm] = {}
        for draft in self._drafts:
            host = next(iter(draft.processes)).host
            fitting = list(islice((c for c in of_host[host] if c.may_be(draft)), 2))
            if len(fitting) == 1:
                fitting[0].absorb(draft)
            else:
                key = (host, draft.num_ranks, draft.num_nodes)
                loose.setdefault(key, _Comm(f"#{len(loose) + 1}")).absorb(draft)
        return [*self._named.values(), *loose.values()]


def _split_name(process: _Process, pointer: str, split: Sequence[str | None]) -> str:
    """Return a name of our own for one that was split off without a number."""
    parent = process.comms.get(split[0] or "")
    if parent is None or not parent.name:
        return f"#{process.host}:{process.pid}:{pointer}"
    return f"#{parent.name}/{split[1] or '-'}/{split[2] or '-'}"


def _float(text: str | None) -> float:
    try:
        return float(text or "0")
    except ValueError:
        return 0.0


def read_nccl_log(files: Iterable[BinaryIO]) -> log.NcclLog:
    """Return the content of one log that lies in one file or in several.

    Raises:
        OSError: One cannot be read.
        UsageError: One is packed, and damaged.
    """
    collector = _Collector()
    total: Counter[str] = Counter()
    for file in files:
        # Lines break inside each other within a file alone.
        reader = MessageReader()
        for line in read_lines(file):
            for message in reader.feed(line):
                collector.take(message)
        reader.end()
        total["num_lines"] += reader.num_lines
        total["num_mended"] += reader.num_mended
        total["num_lost"] += reader.num_lost
    parts = _divide(collector)
    return log.NcclLog(
        jobs=tuple(map(_job, parts[:_MAX_JOBS])),
        loose_versions=tuple(collector.loose_versions),
        num_messages=collector.num_messages,
        num_left_out=collector.num_left_out + len(parts[_MAX_JOBS:]),
        **total,
    )


def _mend_hosts(processes: Iterable[_Process]) -> None:
    """Give processes that were named a few times alone the host that they are of.

    That is the longest host that the name ends with, or the one that ends with it.
    """
    rare = [each for each in processes if each.num_messages <= _MAX_MISREAD]
    sure = {(p.pid, p.host[::-1]) for p in processes if p.num_messages > _MAX_MISREAD}
    ordered = sorted(sure)
    for process in rare:
        pid, name = process.pid, process.host[::-1]
        ends = (name[:length] for length in range(len(name), 0, -1))
        at = bisect_left(ordered, (pid, name))
        longer = [h for p, h in ordered[at : at + 2] if p == pid and h.startswith(name)]
        other = longer[0] if len(longer) == 1 else name
        process.host = next((end for end in ends if (pid, end) in sure), other)[::-1]


class _Part:
    """What a collector took of one job."""

    def __init__(self) -> None:
        self.processes: list[_Process] = []
        self.communicators: list[_Comm] = []
        self.notes: defaultdict[str, dict[Any, _Notes]] = defaultdict(dict)


def _divide(collector: _Collector) -> list[_Part]:
    """Return all jobs, the largest first; in one pass, for there may be thousands."""
    processes = collector.processes.values()
    _mend_hosts(processes)
    communicators = collector.communicators()
    job_of = _job_of(processes, communicators)
    parts: dict[_Process, _Part] = {}
    for process in processes:
        parts.setdefault(job_of[process], _Part()).processes.append(process)
    for comm in communicators:
        parts[job_of[next(iter(comm.processes))]].communicators.append(comm)
    for (topic, value), notes in collector.notes.items():
        for process, note in notes.items():
            parts[job_of[process]].notes[topic].setdefault(value, {})[process] = note
    return sorted(parts.values(), key=lambda part: -len(part.processes))


def _job_of(
    processes: Iterable[_Process], communicators: Iterable[_Comm]
) -> dict[_Process, _Process]:
    """Return of each process the one that stands for its job."""
    above = {process: process for process in processes}

    def top(process: _Process) -> _Process:
        while above[process] is not process:
            above[process] = above[above[process]]
            process = above[process]
        return process

    joined: dict[_Process, None] = {}
    for comm in communicators:
        first = top(next(iter(comm.processes)))
        for process in comm.processes:
            above[top(process)] = first
        joined |= comm.processes
    of_host: defaultdict[str, set[_Process]] = defaultdict(set)
    for process in joined:
        of_host[process.host].add(top(process))
    alone: dict[str, _Process] = {}
    for process in processes:
        if process not in joined:
            tops = of_host[process.host]
            home = alone.setdefault(process.host, process)
            above[process] = next(iter(tops)) if len(tops) == 1 else home
    return {process: top(process) for process in above}


def _hosts(processes: Iterable[_Process]) -> tuple[str, ...]:
    return tuple(sorted({process.host for process in processes}))


def _total(notes: _Notes) -> int:
    return sum(note[0] for note in notes.values())


def _placed(kind: Callable[..., object], value: Any, notes: _Notes) -> object:  # noqa: ANN401 - fields of any kind
    return kind(*value, _hosts(notes))


def _edges(transport: str, notes: _Notes) -> log.EdgesSeen:
    _, first, second = next(iter(notes.values()))
    ends = int(first), int(second)
    return log.EdgesSeen(transport, _total(notes), ends, _hosts(notes))


def _tuning(kind: tuple[str, str, str], notes: _Notes) -> log.Tuning:
    _, lows, highs = zip(*notes.values(), strict=True)
    return log.Tuning(*kind, min(lows), max(highs))


def _warning(_: str, notes: _Notes) -> log.WarningSeen:
    _, text, place = next(iter(notes.values()))
    return log.WarningSeen(text, place, _total(notes), _hosts(notes))


def _communicator(comm: _Comm) -> log.NcclCommunicator:
    return log.NcclCommunicator(
        comm.name,
        comm.num_ranks,
        comm.num_nodes,
        comm.is_mnnvl,
        ranks=tuple(
            log.RankSeen(rank, process.host, **seen)
            for rank, (process, seen) in sorted(comm.ranks.items())
        ),
        channels=tuple(sorted(comm.channels)),
    )


# What the notes of a field make; what is not here is only reported.
_MAKERS: dict[str, Callable[[Any, _Notes], object]] = {
    "trees": partial(_placed, log.TreeLink),
    "paths": partial(_placed, log.PathSeen),
    "graphs": partial(_placed, log.GraphSeen),
    "edges": _edges,
    "tunings": _tuning,
    "warnings": _warning,
}


_AS_IN_LOG = ("trees", "paths", "graphs", "warnings")


def _reported(value: str, notes: _Notes) -> log.Reported:
    return log.Reported(value, _hosts(notes), len(notes))


def _job(part: _Part) -> log.NcclJob:
    communicators = map(_communicator, part.communicators)
    fields: dict[str, list[Any]] = {
        "communicators": sorted(communicators, key=lambda comm: -comm.num_ranks)
    }
    for name, notes in part.notes.items():
        make = _MAKERS.get(name, _reported)
        fields[name] = [make(*each) for each in notes.items()]
        if name == "edges":
            fields[name].sort(key=attrgetter("num_edges"), reverse=True)
        elif name not in _AS_IN_LOG:
            fields[name].sort()
    return log.NcclJob(
        hosts=_hosts(part.processes),
        num_processes=len({(p.host, p.pid) for p in part.processes}),
        **{name: tuple(values) for name, values in fields.items()},
    )
