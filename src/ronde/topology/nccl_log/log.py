"""Parse NCCL's debug log in bounded memory.

Equal reports of several ranks are stored once, with their hosts. Processes that share a
communicator form a job, together with the other processes on their hosts.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

from ronde.topology.graph import UNKNOWN
from ronde.topology.nccl_log.failures import RankFailure
from ronde.topology.nccl_log.messages import (
    MessageReader,
    NcclMessage,
    read_lines,
    recognise,
)
from ronde.topology.nccl_log.watchdog import WatchdogReport

_MAX_VALUES = 1 << 12  # Of each topic.
_MAX_KEPT_TEXT = 400
# A pasted tree may have lost a blank.
_SLACK = 2
# A host in so few messages may be a cut word.
_MAX_MISREAD = 3
_DEVICE = re.compile(r"\[\d+\] ?([^\s\[={},]+)")
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_NIC = re.compile(r"/-?\d+(?:\(\d+\))?")
_GPU_PATH = re.compile(r"GPU/[0-9a-fA-F-]+ \(\d+/[\d.]+/(\w+)\)")


class Reported(NamedTuple):
    """A value that processes of a job report, such as a version or a setting."""

    value: str  # A version, a device, a setting.
    hosts: tuple[str, ...]  # By name.


class RankSeen(NamedTuple):
    """A rank of a communicator, and the progress of its initialisation."""

    rank: int
    host: str
    bus_id: str = ""  # ``83000`` for 0000:83:00.0, as NCCL writes it.
    has_started: bool = False  # Its start began.
    is_complete: bool = False  # Its start was complete.
    init_s: float = 0.0  # Duration of its start; 0 if unknown.
    init_phases: tuple[tuple[str, float], ...] = ()  # The same by phase, longest first.


class ChannelCounts(NamedTuple):
    """The numbers of channels of a communicator, by use."""

    coll: int  # For rings and trees.
    nvls: int  # For reductions in the NVLink switches.
    p2p: int  # For sends and receives.


class NcclCommunicator(NamedTuple):
    """A communicator, its size, and the ranks in the log."""

    name: str  # NCCL's number of it, or one of the log's own that begins with ``#``.
    num_ranks: int  # 0 if unknown.
    num_nodes: int  # By NCCL's own count.
    is_mnnvl: bool  # NVLink joins nodes in it.
    ranks: tuple[RankSeen, ...]  # Those in the log, by number.
    channels: tuple[ChannelCounts, ...]  # Distinct ones.

    @property
    def hosts(self) -> list[str]:
        return sorted({rank.host for rank in self.ranks})


class TreeLink(NamedTuple):
    """A link of the topology that NCCL found."""

    kind: str  # ``PCI``, ``NVL``, ``XGMI``, ``SYS``, ``C2C``, ``NET``, ...
    gb_per_s: float  # By NCCL's count.
    source: str  # Above it: ``CPU/0-0``.
    target: str  # Below it: ``GPU/0-3000``.
    port_gb_per_s: float  # Of the network port below; 0 for other targets.
    hosts: tuple[str, ...]


class EdgesSeen(NamedTuple):
    """All connections between ranks that use the same transport."""

    # ``P2P/CUMEM/read``, ``SHM/direct``, ``NET/IB/GDRDMA``, ``COLLNET/SHARP``.
    transport: str
    num_edges: int  # Channels in the log.
    example: tuple[int, int]  # Two ranks; one twice with a switch at the other end.
    hosts: tuple[str, ...]  # Of its ends in the log.

    @property
    def is_between_nodes(self) -> bool:
        return self.transport.startswith(("NET/", "COLLNET/"))


class Tuning(NamedTuple):
    """NCCL's choice of algorithm and protocol for a collective."""

    collective: str  # ``AllReduce``.
    algorithm: str  # ``RING``, ``TREE``, ``NVLS``, ...
    protocol: str  # ``LL``, ``LL128`` or ``SIMPLE``.
    min_bytes: int
    max_bytes: int


class WarningSeen(NamedTuple):
    """A line that NCCL marked as a warning."""

    text: str  # As one process wrote it.
    location: str  # File and line of NCCL's source.
    num_times: int  # Numbers in the text may differ.
    hosts: tuple[str, ...]


class NcclJob(NamedTuple):
    """Hosts with common communicators, and the reports of their processes."""

    hosts: tuple[str, ...] = ()  # By name.
    num_processes: int = 0
    communicators: tuple[NcclCommunicator, ...] = ()  # The one with most ranks first.
    versions: tuple[Reported, ...] = ()  # Of NCCL.
    drivers: tuple[Reported, ...] = ()  # Of CUDA's driver: ``13020`` is 13.2.
    bootstrap: tuple[Reported, ...] = ()  # Interfaces of the rendezvous.
    networks: tuple[Reported, ...] = ()  # ``IB``, ``Socket``, a plugin's name.
    # ``IB mlx5_0:1/IB``, ``IB none``, ``Libfabric efa (32 adapters)``.
    candidates: tuple[Reported, ...] = ()
    plugins: tuple[Reported, ...] = ()  # On plugins for the network.
    gdr: tuple[Reported, ...] = ()  # Of GPUDirect RDMA: ``IB mlx5_0 Enabled``.
    nvls: tuple[Reported, ...] = ()  # ``available on dev 0``, ``lost: CUDA error ...``.
    # Of GPUs in NVLink's fabric: bus id, UUID, clique, state and health.
    fabric: tuple[Reported, ...] = ()
    p2p: tuple[Reported, ...] = ()  # GPUs without peer access.
    settings: tuple[Reported, ...] = ()  # ``NCCL_IB_HCA=mlx5``.
    # ``10.0.0.1<4567> returned Connection refused``.
    retries: tuple[Reported, ...] = ()
    gpu_paths: tuple[Reported, ...] = ()  # Kinds of paths between GPUs: ``NVL``.
    trees: tuple[TreeLink, ...] = ()  # In the order of the log, like the next fields.
    warnings: tuple[WarningSeen, ...] = ()
    edges: tuple[EdgesSeen, ...] = ()  # Most first.
    tunings: tuple[Tuning, ...] = ()  # By collective and size.


class NcclLog(NamedTuple):
    """Everything known from a log: jobs, time-outs, failures and lost messages."""

    jobs: tuple[NcclJob, ...]  # The one with most processes first.
    num_lines: int = 0
    num_messages: int = 0  # Of NCCL's, those put together from pieces included.
    num_mended: int = 0  # Those put together from pieces.
    num_lost: int = 0  # Pieces of NCCL's lines that nothing fitted to.
    num_left_out: int = 0  # Things that were too many to keep.
    watchdog: WatchdogReport = WatchdogReport()  # torch's lines.
    failures: tuple[RankFailure, ...] = ()  # Ranks that ended, the first one first.


_Match = re.Match[str]
_Topic = tuple[str, Any]  # With one of the values that are reported.


class _Process:
    def __init__(self, host: str, pid: int) -> None:
        self.host, self.pid, self.num_messages = host, pid, 0
        # Its reports: a count, and details of the topic.
        self.notes: dict[_Topic, list[Any]] = {}
        # Its ranks, by the thread that starts one and by NCCL's pointer.
        self.parts: dict[int | str, _Part] = {}
        # Of each thread that prints a topology: indent and name of open branches.
        self.branches: dict[int, list[tuple[int, str]]] = {}

    @property
    def name(self) -> tuple[str, int]:
        return self.host, self.pid


_Notes = dict[_Process, list[Any]]


@dataclass(eq=False)
class _Part:
    process: _Process
    name: str | None = None
    num_ranks: int | None = None
    rank: int | None = None
    num_nodes: int = UNKNOWN
    is_mnnvl: bool = False
    channels: set[ChannelCounts] = field(default_factory=set[ChannelCounts])
    seen: dict[str, Any] = field(default_factory=dict[str, Any])  # Of ``RankSeen``.


@dataclass(eq=False)
class _Comm:
    """A communicator under construction; ``ranks`` has the first part of each rank."""

    name: str
    num_ranks: int | None
    parts: list[_Part] = field(default_factory=list[_Part])
    ranks: dict[int, _Part] = field(default_factory=dict[int, _Part])

    def add(self, part: _Part) -> None:
        self.parts.append(part)
        if part.rank is not None:
            self.ranks.setdefault(part.rank, part)

    def may_have(self, part: _Part) -> bool:
        owner = None if part.rank is None else self.ranks.get(part.rank)
        is_free = owner is None or owner.process.name == part.process.name
        return is_free and part.num_ranks in (None, self.num_ranks)


class _Collector:
    """Collects messages; the method ``on_X`` handles messages of topic X."""

    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], _Process] = {}
        self.values: dict[_Topic, int] = {}  # In order.
        self.parts: list[_Part] = []
        # The process that reports facts common to its host.
        self._first_of_host: dict[str, _Process] = {}
        self.num_messages = 0
        self.num_left_out = 0
        self._num_values: Counter[str] = Counter()

    def add(self, message: NcclMessage) -> None:
        self.num_messages += 1
        host, pid, thread, is_warning, location, text = message
        process = self.processes.get((host, pid))
        if process is None:
            process = self.processes[host, pid] = _Process(host, pid)
            self._first_of_host.setdefault(host, process)
        process.num_messages += 1
        if is_warning:
            kept = text[:_MAX_KEPT_TEXT]
            self._note(process, "warnings", _NUMBER.sub("#", kept), kept, location)
        topic, words, match = recognise(text) or ("", "", None)
        if match and (handler := getattr(self, f"on_{topic}", None)):
            handler(process, thread, match)
        elif match and match.lastindex:
            value = words.format(*match.groups()) if words else match[1]
            self._note(process, topic, value)

    def _note(
        self, process: _Process, topic: str, value: object, *details: object
    ) -> list[Any] | None:
        """Count a reported value; return its note, or None if there are too many."""
        key = topic, value
        if key not in self.values:
            if self._num_values[topic] >= _MAX_VALUES:
                self.num_left_out += 1
                return None
            self._num_values[topic] += 1
            self.values[key] = len(self.values)
        note = process.notes.setdefault(key, [0, *details])
        note[0] += 1
        return note

    def on_found(self, process: _Process, _: int, match: _Match) -> None:
        network, devices = match.groups()
        for device in _DEVICE.findall(devices):
            # The address behind a socket's name is of no use.
            name = device.partition(":")[0] if network == "Socket" else device
            self._note(process, "candidates", f"{network} {name}")

    def on_tree_root(self, process: _Process, thread: int, match: _Match) -> None:
        process.branches[thread] = [(0, match[1])]

    def on_tree_link(self, process: _Process, thread: int, match: _Match) -> None:
        blanks, kind, gb_per_s, target, port = match.groups()
        branches = process.branches.get(thread, [])
        # The children of a link begin where its own text ends.
        while branches and branches[-1][0] > len(blanks) + _SLACK:
            branches.pop()
        is_below = bool(branches) and len(blanks) - branches[-1][0] <= _SLACK
        source = branches[-1][1] if is_below else ""
        branches.append((match.start(4), target))
        port_gb_per_s = float(port or 0) if target.startswith("NET/") else 0.0
        value = (kind, float(gb_per_s), source, target, port_gb_per_s)
        self._note(self._first_of_host[process.host], "trees", value)

    def on_paths(self, process: _Process, _: int, match: _Match) -> None:
        source, targets = match.groups()
        for kind in _GPU_PATH.findall(targets) if source.startswith("GPU/") else ():
            self._note(self._first_of_host[process.host], "gpu_paths", kind)

    def on_edge(self, process: _Process, _: int, match: _Match) -> None:
        source, target, way, transport = match.groups()
        if transport.startswith("NET/"):
            transport = _NIC.sub("", transport, count=1)
        # A network switch has no rank.
        note = self._note(process, "edges", transport, source, target or source, 0)
        if note and way == "receive":
            note[3] += 1

    def on_tuning(self, process: _Process, _: int, match: _Match) -> None:
        collective, text, algorithm, protocol = match.groups()
        kind, size = (collective, algorithm, protocol), int(text)
        if note := self._note(process, "tunings", kind, size, size):
            note[1:] = min(note[1], size), max(note[2], size)

    def on_init(self, process: _Process, thread: int, match: _Match) -> None:
        pointer, rank, num_ranks, bus_id, parent, *split, name, word = match.groups()
        if not name:
            # Split communicators have no number.
            above = process.parts.get(parent or "")
            name = f"#{process.host}:{process.pid}:{pointer}"
            if above and above.name:
                name = "/".join([f"#{above.name}", *(each or "-" for each in split)])
        keys = pointer, thread
        part = self._part(process, keys, int(num_ranks), int(rank), name)
        mark = "has_started" if word == "START" else "is_complete"
        part.seen |= {"bus_id": bus_id, mark: True}

    def on_layout(self, process: _Process, thread: int, match: _Match) -> None:
        rank, num_ranks, num_nodes, mnnvl = map(int, match.groups()[1:])
        part = self._part(process, (match[1], thread), num_ranks, rank)
        part.num_nodes, part.is_mnnvl = num_nodes, mnnvl == 1

    def on_channels(self, process: _Process, thread: int, match: _Match) -> None:
        counts = ChannelCounts(*map(int, match.groups()))
        self._part(process, (thread,)).channels.add(counts)

    def on_timings(self, process: _Process, thread: int, match: _Match) -> None:
        part = self._part(process, (thread,), int(match[2]), int(match[1]))
        phases = (each.split(" ") for each in match[4].split(", "))
        ordered = sorted(((n, float(s)) for n, s in phases), key=lambda p: -p[1])
        part.seen |= {"init_s": float(match[3]), "init_phases": tuple(ordered)}

    def _part(
        self,
        process: _Process,
        keys: Sequence[int | str],
        num_ranks: int | None = None,
        rank: int | None = None,
        name: str | None = None,
    ) -> _Part:
        """Return the rank's part of a communicator for a message, or a new one."""
        for key in keys:
            part = process.parts.get(key)
            if part is not None and (
                (num_ranks is None or part.num_ranks in (None, num_ranks))
                and (rank is None or part.rank in (None, rank))
                and (name is None or part.name in (None, name))
            ):
                break
        else:
            part = _Part(process)
            self.parts.append(part)
        process.parts |= dict.fromkeys(keys, part)
        part.num_ranks = part.num_ranks or num_ranks
        part.rank = rank if part.rank is None else part.rank
        part.name = part.name or name
        return part

    def communicators(self) -> list[_Comm]:
        """Return all communicators; unnamed parts join the only one that they fit."""
        comms: dict[tuple[object, ...], _Comm] = {}
        of_host: defaultdict[str, dict[_Comm, None]] = defaultdict(dict)
        for part in sorted(self.parts, key=lambda part: part.name is None):
            host, size = part.process.host, part.num_ranks
            new = _Comm(part.name or f"#{len(comms)}", size)
            if part.name is None:
                fitting = (comm for comm in of_host[host] if comm.may_have(part))
                found = list(islice(fitting, 2))
                key = host, size, part.num_nodes
                comm = found[0] if len(found) == 1 else comms.setdefault(key, new)
            else:
                comm = comms.setdefault((part.name, size), new)
                of_host[host][comm] = None
            comm.add(part)
        return list(comms.values())


def read_nccl_log(files: Iterable[BinaryIO]) -> NcclLog:
    """Return the content of a log that consists of one or several files.

    Raises:
        OSError: A file cannot be read.
        UsageError: A packed file is damaged.
    """
    collector, reader = _Collector(), MessageReader()
    for file in files:
        for line in read_lines(file):
            for message in reader.feed(line):
                collector.add(message)
                if message.text.endswith("Destroy COMPLETE"):
                    reader.failures.feed_nccl(message.text)
        # Lines of different files do not break each other.
        reader.end()
    processes = collector.processes.values()
    _mend_hosts(processes)
    comms = collector.communicators()
    jobs: defaultdict[_Process, list[_Process]] = defaultdict(list)
    comms_of: defaultdict[_Process, list[_Comm]] = defaultdict(list)
    job_of = _job_of(processes, comms)
    for process in processes:
        jobs[job_of[process]].append(process)
    for comm in comms:
        comms_of[job_of[comm.parts[0].process]].append(comm)
    # With several jobs, torch's lines cannot be assigned.
    largest = max(comms, key=lambda comm: comm.num_ranks or 0, default=None)
    ranks = largest.ranks if largest and len(comms_of) == 1 else {}
    report = reader.watchdog.report(ranks, is_one_job=len(comms_of) <= 1)
    for rank in ranks.keys() & report.busy:
        # A collective is called after the start.
        ranks[rank].seen["is_complete"] = True
    ordered = sorted(jobs, key=lambda job: -len(jobs[job]))
    return NcclLog(
        tuple(_job(jobs[job], comms_of[job], collector.values) for job in ordered),
        watchdog=report,
        failures=_located(reader.failures.report(ranks), ranks),
        num_messages=collector.num_messages,
        num_left_out=collector.num_left_out,
        num_lines=reader.num_lines,
        num_mended=reader.num_mended,
        num_lost=reader.num_lost,
    )


def _located(
    found: Iterable[RankFailure], ranks: dict[int, _Part]
) -> tuple[RankFailure, ...]:
    hosts = {rank: part.process.host for rank, part in ranks.items()}
    of_pid = {part.process.pid: rank for rank, part in ranks.items()}
    is_one = len(of_pid) == len(ranks)  # Containers may have the same.
    located: dict[object, RankFailure] = {}
    # An exception shows more than the exit code behind it.
    for each in sorted(found, key=lambda each: bool(each.pid or each.host)):
        rank = each.rank
        if rank < 0 and is_one:
            rank = of_pid.get(each.pid, -1)
        task = each.name.removeprefix("task ")
        # A task of Slurm is a rank, or starts several.
        if task.isdecimal() and hosts.get(int(task)) == each.host:
            rank = int(task)
        key = rank if rank >= 0 else (each.name, each.host, each.pid)
        host = each.host or hosts.get(rank, "")
        old = located.setdefault(key, each._replace(rank=rank, host=host))
        located[key] = old._replace(outcome=min(old.outcome, each.outcome))
    return tuple(located.values())


def _mend_hosts(processes: Collection[_Process]) -> None:
    """Correct damaged host names of processes with only a few lines.

    The right host name is the longest suffix of the name that is a known host, else the
    known host that ends with the name.
    """
    of_host: Counter[str] = Counter()
    for process in processes:
        of_host[process.host] += process.num_messages
    sure = {p.name for p in processes if p.num_messages > _MAX_MISREAD}
    # Reversed names sort by their ends; -1 is any process.
    named = sorted(
        [(process.pid, process.host[::-1]) for process in processes]
        + [(-1, host[::-1]) for host, num in of_host.items() if num > _MAX_MISREAD]
    )

    def longer(pid: int, host: str) -> str:
        at = bisect_right(named, (pid, host[::-1]))
        near = [name[::-1] for each, name in named[at : at + 2] if each == pid]
        found = [name for name in near if name.endswith(host)]
        return found[0] if len(found) == 1 else ""

    for process in [each for each in processes if each.name not in sure]:
        host, pid = process.name
        ends = [host[at:] for at in range(len(host)) if (host[at:], pid) in sure]
        whole = "" if of_host[host] > _MAX_MISREAD else longer(-1, host)
        process.host = (*ends, longer(pid, host) or whole or host)[0]


def _job_of(
    processes: Iterable[_Process], comms: Iterable[_Comm]
) -> dict[_Process, _Process]:
    """Return, for each process, the process that represents its job."""
    above: dict[_Process, _Process] = {}

    def top(process: _Process) -> _Process:
        while (upper := above.setdefault(process, process)) is not process:
            above[process] = above[upper]
            process = upper
        return process

    of_host: defaultdict[str, set[_Process]] = defaultdict(set)
    for comm in comms:
        for part in comm.parts:
            above[top(part.process)] = top(comm.parts[0].process)
    for process in above:
        of_host[process.host].add(top(process))
    alone: dict[str, _Process] = {}
    for process in processes:
        if process not in above:
            tops = of_host[process.host]
            home = alone.setdefault(process.host, process)
            above[process] = next(iter(tops)) if len(tops) == 1 else home
    return {process: top(process) for process in above}


def _hosts(processes: Iterable[_Process]) -> tuple[str, ...]:
    return tuple(sorted({process.host for process in processes}))


def _job(
    processes: Sequence[_Process], comms: Iterable[_Comm], order: dict[_Topic, int]
) -> NcclJob:
    reports: defaultdict[_Topic, _Notes] = defaultdict(dict)
    for process in processes:
        for key, note in process.notes.items():
            reports[key][process] = note
    fields: defaultdict[str, list[Any]] = defaultdict(list)
    for topic, value in sorted(reports, key=order.__getitem__):
        fields[topic].append(_reported(topic, value, reports[topic, value]))
    for topic, values in fields.items():
        if topic == "edges":
            values.sort(key=lambda edges: -edges.num_edges)
        elif topic not in ("trees", "warnings"):
            values.sort()
    found = sorted(map(_communicator, comms), key=lambda comm: -comm.num_ranks)
    return NcclJob(
        hosts=_hosts(processes),
        num_processes=len({process.name for process in processes}),
        communicators=tuple(found),
        **{name: tuple(values) for name, values in fields.items()},
    )


def _reported(topic: str, value: Any, notes: _Notes) -> object:  # noqa: ANN401 - values of any kind
    hosts = _hosts(notes)
    nums, *details = zip(*notes.values(), strict=True)
    if topic == "trees":
        return TreeLink(*value, hosts=hosts)
    if topic == "edges":
        # Connections between hosts have two ends, of which a log may lack one.
        num_received = sum(details[2])
        num_edges = max(sum(nums) - num_received, num_received)
        ends = int(details[0][0]), int(details[1][0])
        return EdgesSeen(value, num_edges, ends, hosts)
    if topic == "tunings":
        return Tuning(*value, min_bytes=min(details[0]), max_bytes=max(details[1]))
    if topic == "warnings":
        return WarningSeen(details[0][0], details[1][0], sum(nums), hosts)
    return Reported(value, hosts)


def _communicator(comm: _Comm) -> NcclCommunicator:
    num_nodes = (p.num_nodes for p in comm.parts if p.num_nodes != UNKNOWN)
    return NcclCommunicator(
        comm.name,
        comm.num_ranks or 0,
        next(num_nodes, UNKNOWN),
        any(part.is_mnnvl for part in comm.parts),
        ranks=tuple(
            RankSeen(rank, part.process.host, **part.seen)
            for rank, part in sorted(comm.ranks.items())
        ),
        channels=tuple(sorted({each for p in comm.parts for each in p.channels})),
    )
