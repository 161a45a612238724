"""Messages -> what each process said, in bounded memory.

What many ranks say alike is kept once, with the numbers of the processes that said it.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from ronde.topology.graph import UNKNOWN
from ronde.topology.nccl_log.log import ChannelCounts
from ronde.topology.nccl_log.messages import NcclMessage
from ronde.topology.nccl_log.patterns import Topic, recognise, split_paths

_MAX_COMMUNICATORS = 1 << 17
_MAX_RANKS = 1 << 20
_MAX_RANKS_OF_OLD_RING = 20
"""NCCL before 2.23 names no more of a ring, and does not say so."""


@dataclass(slots=True)
class NcclProcess:
    """A process that the log speaks of."""

    number: int  # In the order in which they appear.
    host: str  # Where it runs.
    pid: int  # Its number there.
    num_messages: int = 0  # That name it.


@dataclass(slots=True)
class RankTally:
    """A rank of a communicator; the fields are those of ``RankSeen``."""

    process: NcclProcess
    device: int = UNKNOWN
    bus_id: str = ""
    has_started: bool = False
    is_complete: bool = False
    init_s: float = 0.0
    init_phases: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class CommTally:
    """A communicator, or the draft of one."""

    name: str  # NCCL's; empty for a draft.
    num_ranks: int = 0  # 0 where not said.
    num_nodes: int = UNKNOWN  # ``UNKNOWN`` where not said.
    is_mnnvl: bool = False  # NVLink joins nodes in it.
    # By number.
    ranks: dict[int, RankTally] = field(default_factory=dict[int, RankTally])
    # By channel.
    rings: dict[int, tuple[int, ...]] = field(
        default_factory=dict[int, tuple[int, ...]]
    )
    # Counts that its ranks said.
    channels: set[ChannelCounts] = field(default_factory=set[ChannelCounts])
    # All that spoke of it.
    processes: dict[int, NcclProcess] = field(default_factory=dict[int, NcclProcess])

    def absorb(self, draft: "CommTally") -> None:
        """Take over what a draft holds; what is here already stays."""
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

    def may_be(self, draft: "CommTally") -> bool:
        """Return whether a draft of a process of its own hosts fits."""
        return draft.num_ranks in (0, self.num_ranks) and all(
            rank not in self.ranks or self.ranks[rank].process is seen.process
            for rank, seen in draft.ranks.items()
        )


class Starts:
    """Takes what ranks say of their start.

    Attributes:
        num_left_out: Communicators and ranks that were too many.
    """

    def __init__(self) -> None:
        self.num_left_out = 0
        self._named: dict[tuple[str, int], CommTally] = {}
        self._drafts: dict[int, CommTally] = {}
        self._of_thread: dict[tuple[int, int], CommTally] = {}
        self._of_pointer: dict[tuple[int, str], CommTally] = {}
        self._num_ranks = 0

    def take_init(
        self, process: NcclProcess, message: NcclMessage, match: re.Match[str]
    ) -> None:
        """Note that the start of a rank began or is complete."""
        _, pointer, rank, num_ranks, device, bus_id, *split, name, word = match.groups()
        thread, at = (process.number, message.thread), (process.number, pointer)
        name = name or self._split_name(process, pointer, split)
        comm = self._named.get((name, int(num_ranks)))
        if comm is None:
            if len(self._named) >= _MAX_COMMUNICATORS:
                self.num_left_out += 1
                return
            comm = self._named[name, int(num_ranks)] = CommTally(name, int(num_ranks))
        for draft in (self._of_thread.get(thread), self._of_pointer.get(at)):
            if draft is not None and not draft.name:
                if draft.num_ranks in (0, comm.num_ranks):
                    comm.absorb(draft)
                self._drafts.pop(id(draft), None)
        self._of_thread[thread] = self._of_pointer[at] = comm
        if seen := self._rank(comm, int(rank), process):
            seen.device, seen.bus_id = int(device), bus_id
            seen.has_started |= word == "START"
            seen.is_complete |= word == "COMPLETE"

    def take_layout(
        self, process: NcclProcess, message: NcclMessage, match: re.Match[str]
    ) -> None:
        """Note on how many nodes a communicator is."""
        pointer, rank, num_ranks, num_nodes, _, mnnvl = match.groups()
        comm = self._of_pointer.get((process.number, pointer))
        if comm is None or comm.num_ranks not in (0, int(num_ranks)):
            comm = self._current(process, message, int(num_ranks))
        if comm is None:
            return
        self._of_pointer[process.number, pointer] = comm
        comm.num_nodes, comm.is_mnnvl = int(num_nodes), mnnvl == "1"
        self._rank(comm, int(rank), process)

    def take_ring(
        self, process: NcclProcess, message: NcclMessage, match: re.Match[str]
    ) -> None:
        """Note in what order the ranks of a channel stand."""
        order = tuple(map(int, match.group(3).split()))
        may_be_cut = len(order) == _MAX_RANKS_OF_OLD_RING
        comm = self._current(process, message, 0 if may_be_cut else len(order))
        is_cut = may_be_cut and comm and comm.num_ranks not in (0, len(order))
        if comm is None or is_cut or not self._has_room(len(order)):
            return
        comm.rings[int(match.group(1))] = order

    def take_channels(
        self, process: NcclProcess, message: NcclMessage, match: re.Match[str]
    ) -> None:
        """Note how many channels a communicator has."""
        if comm := self._current(process, message, 0):
            comm.channels.add(ChannelCounts(*map(int, match.groups())))

    def take_timings(
        self, process: NcclProcess, message: NcclMessage, match: re.Match[str]
    ) -> None:
        """Note how long the start of a rank took."""
        comm = self._current(process, message, int(match.group(2)))
        seen = self._rank(comm, int(match.group(1)), process) if comm else None
        if seen is None:
            return
        phases = [each.split(" ") for each in match.group(4).split(", ")]
        ordered = sorted(((n, float(s)) for n, s in phases), key=lambda p: -p[1])
        seen.init_s, seen.init_phases = float(match.group(3)), tuple(ordered)

    def communicators(self) -> list[CommTally]:
        """Return all, drafts put to those they can only belong to."""
        named = list(self._named.values())
        of_host: dict[str, list[CommTally]] = {}
        for comm in named:
            for host in {process.host for process in comm.processes.values()}:
                of_host.setdefault(host, []).append(comm)
        loose: dict[tuple[str, int, int], CommTally] = {}
        for draft in self._drafts.values():
            host = next(iter(draft.processes.values())).host
            all_fitting = (c for c in of_host.get(host, ()) if c.may_be(draft))
            fitting = list(islice(all_fitting, 2))
            if len(fitting) == 1:
                fitting[0].absorb(draft)
            else:
                key = (host, draft.num_ranks, draft.num_nodes)
                number = len(loose) + 1
                loose.setdefault(key, CommTally(f"#{number}")).absorb(draft)
        return [*named, *loose.values()]

    def _split_name(
        self, process: NcclProcess, pointer: str, split: Iterable[str | None]
    ) -> str:
        """Return a name of our own for one that was split off without a number."""
        parent_pointer, split_count, color = split
        parent = self._of_pointer.get((process.number, parent_pointer or ""))
        if parent is None or not parent.name:
            return f"#{process.host}:{process.pid}:{pointer}"
        return f"#{parent.name}/{split_count or '-'}/{color or '-'}"

    def _current(
        self, process: NcclProcess, message: NcclMessage, num_ranks: int
    ) -> CommTally | None:
        """Return what a thread starts, or its draft; None where it is another."""
        thread = (process.number, message.thread)
        comm = self._of_thread.get(thread)
        if comm is None:
            if len(self._drafts) >= _MAX_COMMUNICATORS:
                self.num_left_out += 1
                return None
            comm = self._of_thread[thread] = CommTally("")
            self._drafts[id(comm)] = comm
        comm.num_ranks = comm.num_ranks or num_ranks
        comm.processes[process.number] = process
        return comm if num_ranks in (0, comm.num_ranks) else None

    def _rank(
        self, comm: CommTally, rank: int, process: NcclProcess
    ) -> RankTally | None:
        """Return a rank, new where it is; None where another process has it."""
        comm.processes[process.number] = process
        seen = comm.ranks.get(rank)
        if seen is None:
            if not self._has_room(1):
                return None
            seen = comm.ranks[rank] = RankTally(process)
        return seen if seen.process is process else None

    def _has_room(self, num_more: int) -> bool:
        if self._num_ranks + num_more > _MAX_RANKS:
            self.num_left_out += 1
            return False
        self._num_ranks += num_more
        return True


_MAX_PROCESSES = 1 << 17
_MAX_VALUES = 1 << 12
_MAX_KEPT_TEXT = 400
# What a level of a tree may be off by: people paste, and lose a blank.
_SLACK = 2
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
Kind = tuple[str, str, str]
"""Of an operation: its collective, algorithm and protocol."""


@dataclass(slots=True)
class EdgeTally:
    """Ends of channels that one process has on one transport."""

    example: tuple[int, int]  # Two ranks that it joins.
    num_edges: int = 0  # How many.


@dataclass(slots=True)
class SizeTally:
    """Operations of one kind that one process told of."""

    min_bytes: int  # Of the smallest.
    max_bytes: int  # Of the largest.
    num_operations: int = 0  # How many.


@dataclass(slots=True)
class WarningTally:
    """A warning, and who said the like of it."""

    text: str  # As first said.
    place: str  # File and line of NCCL's source.
    num_times: dict[int, int] = field(default_factory=dict[int, int])  # By process.


class _Branch(NamedTuple):
    """An element of a topology that is being printed."""

    indent: int
    name: str


class Collector:
    """Takes messages one by one.

    Attributes:
        processes: By host and number.
        said: By topic, values to the numbers of the processes that said them.
        starts: Communicators and their ranks.
        edges: By transport, then by process.
        tunings: By kind, then by process.
        warnings: By their text without its numbers.
        loose_versions: Versions in no process's name.
        num_messages: Taken so far.
        num_left_out: Things that were too many.
    """

    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], NcclProcess] = {}
        self.said: dict[Topic, dict[Value, set[int]]] = {}
        self.starts = Starts()
        self.edges: dict[str, dict[int, EdgeTally]] = {}
        self.tunings: dict[Kind, dict[int, SizeTally]] = {}
        self.warnings: dict[str, WarningTally] = {}
        self.loose_versions: list[str] = []
        self.num_messages = 0
        self.num_left_out = 0
        self._branches: dict[tuple[int, int], list[_Branch]] = {}
        # The number of one process stands for its host where all see the same.
        self._number_of_host: dict[str, int] = {}
        self._takers: dict[
            Topic, Callable[[NcclProcess, NcclMessage, re.Match[str]], None]
        ] = {
            Topic.IB_FOUND: self._take_found,
            Topic.SOCKET_FOUND: self._take_found,
            Topic.SYSTEM: self._take_system,
            Topic.TREE_ROOT: self._take_root,
            Topic.TREE_LINK: self._take_link,
            Topic.PATHS: self._take_paths,
            Topic.EDGE: self._take_edge,
            Topic.TUNING: self._take_tuning,
            Topic.OLD_TUNING: self._take_old_tuning,
            Topic.RING: self.starts.take_ring,
            Topic.LAYOUT: self.starts.take_layout,
            Topic.INIT: self.starts.take_init,
            Topic.TIMINGS: self.starts.take_timings,
            Topic.CHANNELS: self.starts.take_channels,
        }

    def take(self, message: NcclMessage) -> None:
        """Note what a message says."""
        self.num_messages += 1
        if not message.host:
            self._take_loose(message.text)
            return
        process = self._process(message.host, message.pid)
        if process is None:
            return
        process.num_messages += 1
        if message.is_warning:
            self._take_warning(process, message)
        if (statement := recognise(message.text)) is None:
            return
        topic, match = statement
        if taker := self._takers.get(topic):
            taker(process, message, match)
        else:
            self._note(topic, match.groups(), process.number)

    def _process(self, host: str, pid: int) -> NcclProcess | None:
        process = self.processes.get((host, pid))
        if process is None:
            if len(self.processes) >= _MAX_PROCESSES:
                self.num_left_out += 1
                return None
            process = NcclProcess(len(self.processes), host, pid)
            self.processes[host, pid] = process
            self._number_of_host.setdefault(host, process.number)
        return process

    def _note(self, topic: Topic, value: Value, number: int) -> None:
        values = self.said.setdefault(topic, {})
        numbers = values.get(value)
        if numbers is None:
            if len(values) >= _MAX_VALUES:
                self.num_left_out += 1
                return
            numbers = values[value] = set()
        numbers.add(number)

    def _take_loose(self, text: str) -> None:
        version = text.rpartition(" ")[2]
        if version not in self.loose_versions and len(self.loose_versions) < 100:
            self.loose_versions.append(version)

    def _take_warning(self, process: NcclProcess, message: NcclMessage) -> None:
        like = _NUMBER.sub("#", message.text[:_MAX_KEPT_TEXT])
        tally = self.warnings.get(like)
        if tally is None:
            if len(self.warnings) >= _MAX_VALUES:
                self.num_left_out += 1
                return
            text = message.text[:_MAX_KEPT_TEXT]
            tally = self.warnings[like] = WarningTally(text, message.place)
        times = tally.num_times
        times[process.number] = times.get(process.number, 0) + 1

    def _take_found(
        self, process: NcclProcess, _: NcclMessage, match: re.Match[str]
    ) -> None:
        topic = Topic.IB_FOUND if match.group(1) != "Socket" else Topic.SOCKET_FOUND
        for device in _DEVICE.findall(match.group(2)):
            # Sockets have an address behind their names, which tells nothing.
            name = device if topic is Topic.IB_FOUND else device.partition(":")[0]
            self._note(topic, (match.group(1), name), process.number)

    def _take_system(
        self, process: NcclProcess, message: NcclMessage, _: object
    ) -> None:
        if len(self._branches) < _MAX_PROCESSES:
            self._branches[process.number, message.thread] = []

    def _take_root(
        self, process: NcclProcess, message: NcclMessage, match: re.Match[str]
    ) -> None:
        branches = self._branches.get((process.number, message.thread))
        if branches is not None:
            branches[:] = [_Branch(0, match.group(1))]

    def _take_link(
        self, process: NcclProcess, message: NcclMessage, match: re.Match[str]
    ) -> None:
        blanks, kind, gb_per_s, target, port = match.groups()
        branches = self._branches.get((process.number, message.thread), [])
        # What hangs below a link begins where the link's own words end.
        while branches and branches[-1].indent > len(blanks) + _SLACK:
            branches.pop()
        is_below = bool(branches) and len(blanks) - branches[-1].indent <= _SLACK
        source = branches[-1].name if is_below else ""
        below = match.start(4)
        branches.append(_Branch(below, target))
        port_gb_per_s = _number(port or "") if target.startswith("NET/") else 0.0
        value = (kind, _number(gb_per_s), source, target, port_gb_per_s)
        self._note(Topic.TREE_LINK, value, self._number_of_host[process.host])

    def _take_paths(
        self, process: NcclProcess, _: NcclMessage, match: re.Match[str]
    ) -> None:
        number = self._number_of_host[process.host]
        for item in split_paths(match.group(2)):
            self._note(Topic.PATHS, (match.group(1), *item), number)

    def _take_edge(
        self, process: NcclProcess, _: NcclMessage, match: re.Match[str]
    ) -> None:
        source, target, transport = match.groups()
        if transport.startswith("NET/"):
            transport = _NIC.sub("", transport, count=1)
        tallies = self.edges.get(transport)
        if tallies is None:
            if len(self.edges) >= _MAX_VALUES:
                self.num_left_out += 1
                return
            tallies = self.edges[transport] = {}
        tally = tallies.get(process.number)
        if tally is None:
            # A switch of the network has no rank.
            ends = (int(source), int(target or source))
            tally = tallies[process.number] = EdgeTally(ends)
        tally.num_edges += 1

    def _take_tuning(
        self, process: NcclProcess, _: NcclMessage, match: re.Match[str]
    ) -> None:
        collective, size, algorithm, protocol = match.groups()
        self._tally(process, (collective, algorithm, protocol), int(size))

    def _take_old_tuning(
        self, process: NcclProcess, _: NcclMessage, match: re.Match[str]
    ) -> None:
        size, algorithm, protocol = map(int, match.groups())
        names = (_named(algorithm, _ALGORITHMS), _named(protocol, _PROTOCOLS))
        self._tally(process, ("", *names), size)

    def _tally(self, process: NcclProcess, kind: Kind, size: int) -> None:
        tallies = self.tunings.get(kind)
        if tallies is None:
            if len(self.tunings) >= _MAX_VALUES:
                self.num_left_out += 1
                return
            tallies = self.tunings[kind] = {}
        tally = tallies.setdefault(process.number, SizeTally(size, size))
        tally.min_bytes = min(tally.min_bytes, size)
        tally.max_bytes = max(tally.max_bytes, size)
        tally.num_operations += 1


def _named(number: int, names: tuple[str, ...]) -> str:
    return names[number] if number < len(names) else str(number)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
