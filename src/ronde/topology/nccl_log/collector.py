"""Messages -> what each process said, in bounded memory.

What many ranks say alike is kept once, with the numbers of the processes that said it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ronde.topology.nccl_log.messages import Message
from ronde.topology.nccl_log.started import Process, Starts
from ronde.topology.nccl_log.statements import Topic, recognise, split_paths

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
    """Ends of channels that one process has on one transport.

    Attributes:
        example: Two ranks that it joins.
        num_edges: How many.
    """

    example: tuple[int, int]
    num_edges: int = 0


@dataclass(slots=True)
class SizeTally:
    """Operations of one kind that one process told of.

    Attributes:
        min_bytes: Of the smallest.
        max_bytes: Of the largest.
        num_operations: How many.
    """

    min_bytes: int
    max_bytes: int
    num_operations: int = 0


@dataclass(slots=True)
class WarningTally:
    """A warning, and who said the like of it.

    Attributes:
        text: As first said.
        place: File and line of NCCL's source.
        num_times: By process.
    """

    text: str
    place: str
    num_times: dict[int, int] = field(default_factory=dict[int, int])


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
        self.processes: dict[tuple[str, int], Process] = {}
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
        self._takers: dict[Topic, Callable[[Process, Message, re.Match[str]], None]] = {
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

    def take(self, message: Message) -> None:
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

    def _process(self, host: str, pid: int) -> Process | None:
        process = self.processes.get((host, pid))
        if process is None:
            if len(self.processes) >= _MAX_PROCESSES:
                self.num_left_out += 1
                return None
            process = Process(len(self.processes), host, pid)
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

    def _take_warning(self, process: Process, message: Message) -> None:
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

    def _take_found(self, process: Process, _: Message, match: re.Match[str]) -> None:
        topic = Topic.IB_FOUND if match.group(1) != "Socket" else Topic.SOCKET_FOUND
        for device in _DEVICE.findall(match.group(2)):
            # Sockets have an address behind their names, which tells nothing.
            name = device if topic is Topic.IB_FOUND else device.partition(":")[0]
            self._note(topic, (match.group(1), name), process.number)

    def _take_system(self, process: Process, message: Message, _: object) -> None:
        if len(self._branches) < _MAX_PROCESSES:
            self._branches[process.number, message.thread] = []

    def _take_root(
        self, process: Process, message: Message, match: re.Match[str]
    ) -> None:
        branches = self._branches.get((process.number, message.thread))
        if branches is not None:
            branches[:] = [_Branch(0, match.group(1))]

    def _take_link(
        self, process: Process, message: Message, match: re.Match[str]
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

    def _take_paths(self, process: Process, _: Message, match: re.Match[str]) -> None:
        number = self._number_of_host[process.host]
        for item in split_paths(match.group(2)):
            self._note(Topic.PATHS, (match.group(1), *item), number)

    def _take_edge(self, process: Process, _: Message, match: re.Match[str]) -> None:
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

    def _take_tuning(self, process: Process, _: Message, match: re.Match[str]) -> None:
        collective, size, algorithm, protocol = match.groups()
        self._tally(process, (collective, algorithm, protocol), int(size))

    def _take_old_tuning(
        self, process: Process, _: Message, match: re.Match[str]
    ) -> None:
        size, algorithm, protocol = map(int, match.groups())
        names = (_named(algorithm, _ALGORITHMS), _named(protocol, _PROTOCOLS))
        self._tally(process, ("", *names), size)

    def _tally(self, process: Process, kind: Kind, size: int) -> None:
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
