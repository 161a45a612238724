"""Communicators and their ranks, put together from what each rank says of its start.

Only the first and the last line of a start name the communicator; those between name a
pointer or nothing. A draft holds what these say until its thread or its pointer is
heard of by name.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from ronde.topology.graph import UNKNOWN
from ronde.topology.nccl_log.log import ChannelCounts
from ronde.topology.nccl_log.messages import Message

_MAX_COMMUNICATORS = 1 << 17
_MAX_RANKS = 1 << 20
_MAX_RANKS_OF_OLD_RING = 20
"""NCCL before 2.23 names no more of a ring, and does not say so."""


@dataclass(slots=True)
class Process:
    """A process that the log speaks of.

    Attributes:
        number: In the order in which they appear.
        host: Where it runs.
        pid: Its number there.
        num_messages: That name it.
    """

    number: int
    host: str
    pid: int
    num_messages: int = 0


@dataclass(slots=True)
class RankTally:
    """A rank of a communicator; the fields are those of ``RankSeen``."""

    process: Process
    device: int = UNKNOWN
    bus_id: str = ""
    has_started: bool = False
    is_complete: bool = False
    init_s: float = 0.0
    init_phases: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class CommTally:
    """A communicator, or the draft of one.

    Attributes:
        name: NCCL's; empty for a draft.
        num_ranks: 0 where not said.
        num_nodes: ``UNKNOWN`` where not said.
        is_mnnvl: NVLink joins nodes in it.
        ranks: By number.
        rings: By channel.
        channels: Counts that its ranks said.
        processes: All that spoke of it.
    """

    name: str
    num_ranks: int = 0
    num_nodes: int = UNKNOWN
    is_mnnvl: bool = False
    ranks: dict[int, RankTally] = field(default_factory=dict[int, RankTally])
    rings: dict[int, tuple[int, ...]] = field(
        default_factory=dict[int, tuple[int, ...]]
    )
    channels: set[ChannelCounts] = field(default_factory=set[ChannelCounts])
    processes: dict[int, Process] = field(default_factory=dict[int, Process])

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
        self, process: Process, message: Message, match: re.Match[str]
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
        self, process: Process, message: Message, match: re.Match[str]
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
        self, process: Process, message: Message, match: re.Match[str]
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
        self, process: Process, message: Message, match: re.Match[str]
    ) -> None:
        """Note how many channels a communicator has."""
        if comm := self._current(process, message, 0):
            comm.channels.add(ChannelCounts(*map(int, match.groups())))

    def take_timings(
        self, process: Process, message: Message, match: re.Match[str]
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
        self, process: Process, pointer: str, split: Iterable[str | None]
    ) -> str:
        """Return a name of our own for one that was split off without a number."""
        parent_pointer, split_count, color = split
        parent = self._of_pointer.get((process.number, parent_pointer or ""))
        if parent is None or not parent.name:
            return f"#{process.host}:{process.pid}:{pointer}"
        return f"#{parent.name}/{split_count or '-'}/{color or '-'}"

    def _current(
        self, process: Process, message: Message, num_ranks: int
    ) -> CommTally | None:
        """Return what a thread starts, or its draft; None where it is another.

        Args:
            process: Who speaks.
            message: What it says.
            num_ranks: How many ranks it has; 0 where that is not said.
        """
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

    def _rank(self, comm: CommTally, rank: int, process: Process) -> RankTally | None:
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
