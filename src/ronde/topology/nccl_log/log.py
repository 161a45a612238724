"""What NCCL said of one job or several, as values.

They hold what stands in the log and nothing else: an empty field was not said, which
is no claim that it is so.
"""

from typing import NamedTuple

from ronde.topology.graph import UNKNOWN


class Said(NamedTuple):
    """One thing that some processes of a job said.

    Attributes:
        value: What they said: a version, a device, a setting.
        hosts: Where they run, in order of their names.
        num_processes: How many they are.
    """

    value: str
    hosts: tuple[str, ...]
    num_processes: int


class RankSeen(NamedTuple):
    """A rank of a communicator.

    Attributes:
        rank: Its number.
        host: Where it runs.
        pid: Number of its process.
        device: CUDA's number of its GPU; ``UNKNOWN``.
        bus_id: ``83000`` for 0000:83:00.0, as NCCL writes it; empty.
        has_started: It said that its start began.
        is_complete: It said that its start was complete.
        init_s: How long its start took, in seconds; 0.
        init_phases: That time by phase, longest first: a name and seconds each.
    """

    rank: int
    host: str
    pid: int
    device: int = UNKNOWN
    bus_id: str = ""
    has_started: bool = False
    is_complete: bool = False
    init_s: float = 0.0
    init_phases: tuple[tuple[str, float], ...] = ()


class ChannelCounts(NamedTuple):
    """How many channels a communicator has.

    Attributes:
        coll: For rings and trees.
        nvls: For reductions in the NVLink switches.
        p2p: For sends and receives.
        p2p_per_peer: Of these, to one other rank.
    """

    coll: int
    nvls: int
    p2p: int
    p2p_per_peer: int


class Communicator(NamedTuple):
    """Ranks that communicate.

    Attributes:
        name: NCCL's number of it, or one of the log's own that begins with ``#``.
        num_ranks: How many it has.
        num_nodes: On how many nodes by NCCL's own count; ``UNKNOWN``.
        is_mnnvl: NVLink joins nodes in it.
        ranks: Those that the log speaks of, by number.
        rings: Order of the ranks in each channel's ring, by channel.
        channels: Distinct counts of channels that its ranks said.
    """

    name: str
    num_ranks: int
    num_nodes: int = UNKNOWN
    is_mnnvl: bool = False
    ranks: tuple[RankSeen, ...] = ()
    rings: tuple[tuple[int, ...], ...] = ()
    channels: tuple[ChannelCounts, ...] = ()


class TreeLink(NamedTuple):
    """A link of the topology that NCCL found.

    Attributes:
        kind: ``PCI``, ``NVL``, ``XGMI``, ``SYS``, ``C2C``, ``NET``, ...
        gb_per_s: What it carries by NCCL's count.
        source: Above it: ``CPU/0-0``.
        target: Below it: ``GPU/0-3000``.
        port_gb_per_s: What the network port below carries; 0 for other targets.
        hosts: Where it was found.
    """

    kind: str
    gb_per_s: float
    source: str
    target: str
    port_gb_per_s: float
    hosts: tuple[str, ...]


class PathSeen(NamedTuple):
    """A path between two elements that NCCL found.

    Attributes:
        source: ``GPU/0-3000``.
        target: ``NET/0-0``.
        num_hops: Links on it.
        gb_per_s: What its slowest link carries.
        kind: ``NVL``, ``PIX``, ``SYS``, ...
        hosts: Where it was found.
    """

    source: str
    target: str
    num_hops: int
    gb_per_s: float
    kind: str
    hosts: tuple[str, ...]


class GraphSeen(NamedTuple):
    """What NCCL's search for channels came to.

    Attributes:
        pattern: Number of the pattern: 1 to 3 are trees, 4 is the ring, 5 NVLS.
        num_channels: How many it found.
        intra_gb_per_s: Of a channel inside a node.
        inter_gb_per_s: Of a channel between nodes.
        intra_type: Worst kind of path inside a node.
        inter_type: Worst kind of path between a GPU and its network adapter.
        hosts: Where it was found.
    """

    pattern: int
    num_channels: int
    intra_gb_per_s: float
    inter_gb_per_s: float
    intra_type: str
    inter_type: str
    hosts: tuple[str, ...]


class EdgesSeen(NamedTuple):
    """Connections between ranks that use one transport.

    Attributes:
        transport: ``P2P/CUMEM/read``, ``SHM/direct``, ``NET/IB/GDRDMA``,
            ``COLLNET/SHARP``.
        num_edges: How many ends of channels the log names.
        example: Two ranks that it joins; one twice where a switch is at the other end.
        hosts: Where these ends are.
    """

    transport: str
    num_edges: int
    example: tuple[int, int]
    hosts: tuple[str, ...]

    @property
    def is_between_nodes(self) -> bool:
        """Whether the network carries them, or its switches reduce."""
        return self.transport.startswith(("NET/", "COLLNET/"))


class Tuning(NamedTuple):
    """An algorithm that NCCL chose.

    Attributes:
        collective: ``AllReduce``; empty where not said.
        algorithm: ``RING``, ``TREE``, ``NVLS``, ...
        protocol: ``LL``, ``LL128`` or ``SIMPLE``.
        min_bytes: Of the smallest operation.
        max_bytes: Of the largest.
        num_operations: How often.
    """

    collective: str
    algorithm: str
    protocol: str
    min_bytes: int
    max_bytes: int
    num_operations: int


class WarningSeen(NamedTuple):
    """A line that NCCL marked as a warning.

    Attributes:
        text: What it says, as one process said it.
        place: File and line of NCCL's source; empty where not said.
        num_times: How often the like of it was said; numbers in it may differ.
        hosts: Where.
    """

    text: str
    place: str
    num_times: int
    hosts: tuple[str, ...]


class Job(NamedTuple):
    """Hosts that communicators join, and what their processes said.

    Attributes:
        hosts: Names, in order.
        num_processes: How many processes the log speaks of.
        communicators: The one with most ranks first.
        versions: Of NCCL.
        drivers: Of CUDA's driver: ``13020`` is 13.2.
        bootstrap: Interfaces that the processes meet on: ``eth0``.
        networks: What carries data between nodes: ``IB``, ``Socket``, a plugin's name.
        candidates: What each network found: ``IB mlx5_0:1/IB``, ``IB none``,
            ``Libfabric efa (32 adapters)``.
        plugins: What was said of plugins for the network.
        gdr: Adapters with GPUDirect RDMA: ``IB mlx5_0 Enabled``.
        uses: Of rings: ``PXN 1 GDR 1``.
        nvls: Of reductions in NVLink switches: ``available on dev 0``,
            ``lost: CUDA error ...``.
        mnnvl: Of NVLink between nodes: ``state 3 uuid 0.0``.
        p2p: Of GPUs' access to each other's memory, where it is refused.
        settings: ``NCCL_IB_HCA=mlx5``.
        retries: What did not answer when a rank wanted to connect, by its address
            where that is said: ``10.0.0.1<4567> returned Connection refused``.
        aborts: Processes that gave a communicator up; one value at most.
        trees: Links of the topology.
        paths: Paths of the topology.
        graphs: What the searches came to.
        edges: Connections, most first.
        tunings: Algorithms, by collective and size.
        warnings: First said first.
    """

    hosts: tuple[str, ...] = ()
    num_processes: int = 0
    communicators: tuple[Communicator, ...] = ()
    versions: tuple[Said, ...] = ()
    drivers: tuple[Said, ...] = ()
    bootstrap: tuple[Said, ...] = ()
    networks: tuple[Said, ...] = ()
    candidates: tuple[Said, ...] = ()
    plugins: tuple[Said, ...] = ()
    gdr: tuple[Said, ...] = ()
    uses: tuple[Said, ...] = ()
    nvls: tuple[Said, ...] = ()
    mnnvl: tuple[Said, ...] = ()
    p2p: tuple[Said, ...] = ()
    settings: tuple[Said, ...] = ()
    retries: tuple[Said, ...] = ()
    aborts: tuple[Said, ...] = ()
    trees: tuple[TreeLink, ...] = ()
    paths: tuple[PathSeen, ...] = ()
    graphs: tuple[GraphSeen, ...] = ()
    edges: tuple[EdgesSeen, ...] = ()
    tunings: tuple[Tuning, ...] = ()
    warnings: tuple[WarningSeen, ...] = ()


class NcclLog(NamedTuple):
    """What a log says.

    Attributes:
        jobs: The one with most processes first.
        loose_versions: Versions that stand in no process's name.
        num_lines: Of the log in all.
        num_messages: Of NCCL's, those put together from pieces included.
        num_mended: Those put together from pieces.
        num_lost: Pieces of NCCL's lines that nothing fitted to.
        num_left_out: Things that were too many to keep.
    """

    jobs: tuple[Job, ...]
    loose_versions: tuple[str, ...] = ()
    num_lines: int = 0
    num_messages: int = 0
    num_mended: int = 0
    num_lost: int = 0
    num_left_out: int = 0
