"""The content of NCCL's debug log; an empty field was not in the log."""

from collections.abc import Sequence
from typing import NamedTuple

from ronde.topology.graph import UNKNOWN


class Reported(NamedTuple):
    """One thing that some processes of a job report."""

    value: str  # A version, a device, a setting.
    hosts: tuple[str, ...]  # By name.
    num_processes: int


class RankSeen(NamedTuple):
    """A rank of a communicator."""

    rank: int
    host: str
    device: int = UNKNOWN  # CUDA's number of its GPU.
    bus_id: str = ""  # ``83000`` for 0000:83:00.0, as NCCL writes it.
    has_started: bool = False  # Its start began.
    is_complete: bool = False  # Its start was complete.
    init_s: float = 0.0  # Duration of its start; 0 if unknown.
    init_phases: tuple[tuple[str, float], ...] = ()  # The same by phase, longest first.


class ChannelCounts(NamedTuple):
    """How many channels a communicator has."""

    coll: int  # For rings and trees.
    nvls: int  # For reductions in the NVLink switches.
    p2p: int  # For sends and receives.


class NcclCommunicator(NamedTuple):
    """Ranks that communicate."""

    name: str  # NCCL's number of it, or one of the log's own that begins with ``#``.
    num_ranks: int
    num_nodes: int = UNKNOWN  # By NCCL's own count.
    is_mnnvl: bool = False  # NVLink joins nodes in it.
    ranks: tuple[RankSeen, ...] = ()  # Those in the log, by number.
    channels: tuple[ChannelCounts, ...] = ()  # Distinct ones.

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


class PathSeen(NamedTuple):
    """A path between two elements that NCCL found."""

    source: str  # ``GPU/0-3000``.
    target: str  # ``NET/0-0``.
    num_hops: int
    gb_per_s: float  # Of its slowest link.
    kind: str  # ``NVL``, ``PIX``, ``SYS``, ...
    hosts: tuple[str, ...]


class GraphSeen(NamedTuple):
    """The result of NCCL's search for channels."""

    pattern: int  # 1 to 3 are trees, 4 is the ring, 5 NVLS.
    num_channels: int
    intra_gb_per_s: float  # Of a channel inside a node.
    inter_gb_per_s: float  # Of a channel between nodes.
    intra_type: str  # Worst kind of path inside a node.
    inter_type: str  # Worst kind of path between a GPU and its network adapter.
    hosts: tuple[str, ...]


class EdgesSeen(NamedTuple):
    """Connections between ranks that use one transport."""

    # ``P2P/CUMEM/read``, ``SHM/direct``, ``NET/IB/GDRDMA``, ``COLLNET/SHARP``.
    transport: str
    num_edges: int  # Ends of channels in the log.
    example: tuple[int, int]  # Two ranks; one twice with a switch at the other end.
    hosts: tuple[str, ...]  # Of these ends.

    @property
    def is_between_nodes(self) -> bool:
        return self.transport.startswith(("NET/", "COLLNET/"))


class Tuning(NamedTuple):
    """An algorithm that NCCL chose."""

    collective: str  # ``AllReduce``.
    algorithm: str  # ``RING``, ``TREE``, ``NVLS``, ...
    protocol: str  # ``LL``, ``LL128`` or ``SIMPLE``.
    min_bytes: int
    max_bytes: int


class WarningSeen(NamedTuple):
    """A line that NCCL marked as a warning."""

    text: str  # As one process wrote it.
    place: str  # File and line of NCCL's source.
    num_times: int  # Numbers in the text may differ.
    hosts: tuple[str, ...]


class NcclJob(NamedTuple):
    """Hosts that communicators join, and what their processes report."""

    hosts: tuple[str, ...] = ()  # By name.
    num_processes: int = 0
    communicators: tuple[NcclCommunicator, ...] = ()  # The one with most ranks first.
    versions: tuple[Reported, ...] = ()  # Of NCCL.
    drivers: tuple[Reported, ...] = ()  # Of CUDA's driver: ``13020`` is 13.2.
    bootstrap: tuple[Reported, ...] = ()  # Interfaces that processes meet on.
    networks: tuple[Reported, ...] = ()  # ``IB``, ``Socket``, a plugin's name.
    # ``IB mlx5_0:1/IB``, ``IB none``, ``Libfabric efa (32 adapters)``.
    candidates: tuple[Reported, ...] = ()
    plugins: tuple[Reported, ...] = ()  # On plugins for the network.
    gdr: tuple[Reported, ...] = ()  # Of GPUDirect RDMA: ``IB mlx5_0 Enabled``.
    uses: tuple[Reported, ...] = ()  # Of rings: ``PXN 1 GDR 1``.
    nvls: tuple[Reported, ...] = ()  # ``available on dev 0``, ``lost: CUDA error ...``.
    mnnvl: tuple[Reported, ...] = ()  # NVLink between nodes: ``state 3 uuid 0.0``.
    p2p: tuple[Reported, ...] = ()  # GPUs that are refused each other's memory.
    settings: tuple[Reported, ...] = ()  # ``NCCL_IB_HCA=mlx5``.
    # ``10.0.0.1<4567> returned Connection refused``.
    retries: tuple[Reported, ...] = ()
    aborts: tuple[Reported, ...] = ()  # Processes that gave up; one value at most.
    trees: tuple[TreeLink, ...] = ()
    paths: tuple[PathSeen, ...] = ()
    graphs: tuple[GraphSeen, ...] = ()
    edges: tuple[EdgesSeen, ...] = ()  # Most first.
    tunings: tuple[Tuning, ...] = ()  # By collective and size.
    warnings: tuple[WarningSeen, ...] = ()  # In the order of the log.


class NcclLog(NamedTuple):
    """The content of a log."""

    jobs: tuple[NcclJob, ...]  # The one with most processes first.
    loose_versions: tuple[str, ...] = ()  # Versions that stand in no process's name.
    num_lines: int = 0
    num_messages: int = 0  # Of NCCL's, those put together from pieces included.
    num_mended: int = 0  # Those put together from pieces.
    num_lost: int = 0  # Pieces of NCCL's lines that nothing fitted to.
    num_left_out: int = 0  # Things that were too many to keep.


def name_some(names: Sequence[str]) -> str:
    """Return names in a row; of more than three, the rest as a number."""
    left = len(names) - 3
    return ", ".join(names[:3]) + (f" and {left} more" if left > 0 else "")
