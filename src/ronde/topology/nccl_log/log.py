"""What NCCL said of one job or several, as values.

They hold what stands in the log and nothing else: an empty field was not said, which
is no claim that it is so.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ronde.topology.graph import UNKNOWN


class Reported(NamedTuple):
    """One thing that some processes of a job said."""

    value: str  # What they said: a version, a device, a setting.
    hosts: tuple[str, ...]  # Where they run, in order of their names.
    num_processes: int  # How many they are.


class RankSeen(NamedTuple):
    """A rank of a communicator."""

    rank: int  # Its number.
    host: str  # Where it runs.
    pid: int  # Number of its process.
    device: int = UNKNOWN  # CUDA's number of its GPU; ``UNKNOWN``.
    bus_id: str = ""  # ``83000`` for 0000:83:00.0, as NCCL writes it; empty.
    has_started: bool = False  # It said that its start began.
    is_complete: bool = False  # It said that its start was complete.
    init_s: float = 0.0  # How long its start took, in seconds; 0.
    # That time by phase, longest first: a name and seconds each.
    init_phases: tuple[tuple[str, float], ...] = ()


class ChannelCounts(NamedTuple):
    """How many channels a communicator has."""

    coll: int  # For rings and trees.
    nvls: int  # For reductions in the NVLink switches.
    p2p: int  # For sends and receives.
    p2p_per_peer: int  # Of these, to one other rank.


class NcclCommunicator(NamedTuple):
    """Ranks that communicate."""

    name: str  # NCCL's number of it, or one of the log's own that begins with ``#``.
    num_ranks: int  # How many it has.
    num_nodes: int = UNKNOWN  # On how many nodes by NCCL's own count; ``UNKNOWN``.
    is_mnnvl: bool = False  # NVLink joins nodes in it.
    ranks: tuple[RankSeen, ...] = ()  # Those that the log speaks of, by number.
    # Order of the ranks in each channel's ring, by channel.
    rings: tuple[tuple[int, ...], ...] = ()
    # Distinct counts of channels that its ranks said.
    channels: tuple[ChannelCounts, ...] = ()


class TreeLink(NamedTuple):
    """A link of the topology that NCCL found."""

    kind: str  # ``PCI``, ``NVL``, ``XGMI``, ``SYS``, ``C2C``, ``NET``, ...
    gb_per_s: float  # What it carries by NCCL's count.
    source: str  # Above it: ``CPU/0-0``.
    target: str  # Below it: ``GPU/0-3000``.
    port_gb_per_s: float  # What the network port below carries; 0 for other targets.
    hosts: tuple[str, ...]  # Where it was found.


class PathSeen(NamedTuple):
    """A path between two elements that NCCL found."""

    source: str  # ``GPU/0-3000``.
    target: str  # ``NET/0-0``.
    num_hops: int  # Links on it.
    gb_per_s: float  # What its slowest link carries.
    kind: str  # ``NVL``, ``PIX``, ``SYS``, ...
    hosts: tuple[str, ...]  # Where it was found.


class GraphSeen(NamedTuple):
    """What NCCL's search for channels came to."""

    pattern: int  # Number of the pattern: 1 to 3 are trees, 4 is the ring, 5 NVLS.
    num_channels: int  # How many it found.
    intra_gb_per_s: float  # Of a channel inside a node.
    inter_gb_per_s: float  # Of a channel between nodes.
    intra_type: str  # Worst kind of path inside a node.
    inter_type: str  # Worst kind of path between a GPU and its network adapter.
    hosts: tuple[str, ...]  # Where it was found.


class EdgesSeen(NamedTuple):
    """Connections between ranks that use one transport."""

    # ``P2P/CUMEM/read``, ``SHM/direct``, ``NET/IB/GDRDMA``, ``COLLNET/SHARP``.
    transport: str
    num_edges: int  # How many ends of channels the log names.
    # Two ranks that it joins; one twice where a switch is at the other end.
    example: tuple[int, int]
    hosts: tuple[str, ...]  # Where these ends are.

    @property
    def is_between_nodes(self) -> bool:
        """Whether the network carries them, or its switches reduce."""
        return self.transport.startswith(("NET/", "COLLNET/"))


class Tuning(NamedTuple):
    """An algorithm that NCCL chose."""

    collective: str  # ``AllReduce``; empty where not said.
    algorithm: str  # ``RING``, ``TREE``, ``NVLS``, ...
    protocol: str  # ``LL``, ``LL128`` or ``SIMPLE``.
    min_bytes: int  # Of the smallest operation.
    max_bytes: int  # Of the largest.
    num_operations: int  # How often.


class WarningSeen(NamedTuple):
    """A line that NCCL marked as a warning."""

    text: str  # What it says, as one process said it.
    place: str  # File and line of NCCL's source; empty where not said.
    num_times: int  # How often the like of it was said; numbers in it may differ.
    hosts: tuple[str, ...]  # Where.


class NcclJob(NamedTuple):
    """Hosts that communicators join, and what their processes said."""

    hosts: tuple[str, ...] = ()  # Names, in order.
    num_processes: int = 0  # How many processes the log speaks of.
    communicators: tuple[NcclCommunicator, ...] = ()  # The one with most ranks first.
    versions: tuple[Reported, ...] = ()  # Of NCCL.
    drivers: tuple[Reported, ...] = ()  # Of CUDA's driver: ``13020`` is 13.2.
    # Interfaces that the processes meet on: ``eth0``.
    bootstrap: tuple[Reported, ...] = ()
    # What carries data between nodes: ``IB``, ``Socket``, a plugin's name.
    networks: tuple[Reported, ...] = ()
    # What each network found: ``IB mlx5_0:1/IB``, ``IB none``, ``Libfabric efa (32
    # adapters)``.
    candidates: tuple[Reported, ...] = ()
    plugins: tuple[Reported, ...] = ()  # What was said of plugins for the network.
    # Adapters with GPUDirect RDMA: ``IB mlx5_0 Enabled``.
    gdr: tuple[Reported, ...] = ()
    uses: tuple[Reported, ...] = ()  # Of rings: ``PXN 1 GDR 1``.
    # Of reductions in NVLink switches: ``available on dev 0``, ``lost: CUDA error
    # ...``.
    nvls: tuple[Reported, ...] = ()
    mnnvl: tuple[Reported, ...] = ()  # Of NVLink between nodes: ``state 3 uuid 0.0``.
    # Of GPUs' access to each other's memory, where it is refused.
    p2p: tuple[Reported, ...] = ()
    settings: tuple[Reported, ...] = ()  # ``NCCL_IB_HCA=mlx5``.
    # What did not answer when a rank wanted to connect, by its address where that is
    # said: ``10.0.0.1<4567> returned Connection refused``.
    retries: tuple[Reported, ...] = ()
    # Processes that gave a communicator up; one value at most.
    aborts: tuple[Reported, ...] = ()
    trees: tuple[TreeLink, ...] = ()  # Links of the topology.
    paths: tuple[PathSeen, ...] = ()  # Paths of the topology.
    graphs: tuple[GraphSeen, ...] = ()  # What the searches came to.
    edges: tuple[EdgesSeen, ...] = ()  # Connections, most first.
    tunings: tuple[Tuning, ...] = ()  # Algorithms, by collective and size.
    warnings: tuple[WarningSeen, ...] = ()  # First said first.


class NcclLog(NamedTuple):
    """What a log says."""

    jobs: tuple[NcclJob, ...]  # The one with most processes first.
    loose_versions: tuple[str, ...] = ()  # Versions that stand in no process's name.
    num_lines: int = 0  # Of the log in all.
    num_messages: int = 0  # Of NCCL's, those put together from pieces included.
    num_mended: int = 0  # Those put together from pieces.
    num_lost: int = 0  # Pieces of NCCL's lines that nothing fitted to.
    num_left_out: int = 0  # Things that were too many to keep.


_MAX_NAMES = 3


def name_some(names: Sequence[str]) -> str:
    """Return names in a row, the end of a long one counted only."""
    shown = ", ".join(names[:_MAX_NAMES])
    left = len(names) - _MAX_NAMES
    return f"{shown} and {left} more" if left > 0 else shown
