"""What machines are made of and what connects it, as values with a JSON form.

They hold what a source said, as it said it: a link that is told no speed has none here,
and what that means for bandwidth is for ``speeds`` to say. Elements are named by text:
a PCI device by its bus address, ``numa/0``, ``net/mlx5_0``, ``nvswitch`` for switches
that no source shows one by one.
"""

from enum import StrEnum
from typing import NamedTuple

UNKNOWN = -1
"""A number that no source told."""

NVSWITCH = "nvswitch"
"""The NVLink switches of a host where they are not seen one by one."""


class LinkKind(StrEnum):
    """What a direct link is made of; the tree's PCI links are the devices' own."""

    NVLINK = "nvlink"
    XGMI = "xgmi"
    C2C = "c2c"
    """Between a GPU and the processor in its package."""

    PCI = "pci"
    """Between two PCI switches that the tree does not join (NCCL's ``pcilink``)."""


class NumaNode(NamedTuple):
    """Some cores and the memory near them.

    Attributes:
        number: The kernel's; ids have gaps. ``UNKNOWN`` where a source has none.
        cpus: Hardware threads, ascending; empty for memory alone.
        cores: Those threads by physical core, each ascending; empty where not told.
        memory_bytes: Of it in all; ``UNKNOWN``.
        free_bytes: Of it free; ``UNKNOWN``.
        distances: To other nodes and itself, each a pair of number and distance, as the
            firmware tells (10 is local); empty where not told.
        package: Number of its socket; ``UNKNOWN``.
        arch: ``x86_64``, ``arm64``, ``ppc64``; empty where not told.
        vendor: ``GenuineIntel``, ``AuthenticAMD``, ...; empty where not told.
        family: As NCCL counts it: base plus 16 times extended; ``UNKNOWN``.
        model: ``UNKNOWN`` where not told.
    """

    number: int
    cpus: tuple[int, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()
    memory_bytes: int = UNKNOWN
    free_bytes: int = UNKNOWN
    distances: tuple[tuple[int, int], ...] = ()
    package: int = UNKNOWN
    arch: str = ""
    vendor: str = ""
    family: int = UNKNOWN
    model: int = UNKNOWN

    @property
    def name(self) -> str:
        """What links and findings call it."""
        return f"numa/{self.number}"


class PciDevice(NamedTuple):
    """A bridge, switch or device on the PCI bus, and the link above it.

    Attributes:
        bus_id: ``0000:1b:00.0``, in lower case.
        parent: Bus address of the bridge above; empty right below a host bridge.
        node: Number of the NUMA node it is near; ``UNKNOWN``.
        class_code: Class, subclass and interface, such as 0x030200; ``UNKNOWN``.
        vendor: ``UNKNOWN`` where not told, like the three that follow.
        device: Number that the vendor gave it.
        subsystem_vendor: Who built the board.
        subsystem_device: Number that the board's maker gave it.
        speed: Of a lane, as written: ``16.0 GT/s PCIe``; empty where not told.
        width: Lanes as written, 0 included; ``UNKNOWN``.
        gb_per_s: What the link carries in one direction, from sources that tell that
            and no speed; 0 where not told.
        speed_now: As trained now, like ``speed``; empty where not told.
        width_now: As trained now; ``UNKNOWN``.
    """

    bus_id: str
    parent: str = ""
    node: int = UNKNOWN
    class_code: int = UNKNOWN
    vendor: int = UNKNOWN
    device: int = UNKNOWN
    subsystem_vendor: int = UNKNOWN
    subsystem_device: int = UNKNOWN
    speed: str = ""
    width: int = UNKNOWN
    gb_per_s: float = 0.0
    speed_now: str = ""
    width_now: int = UNKNOWN

    @property
    def name(self) -> str:
        """What links and findings call it."""
        return self.bus_id


class GpuDevice(NamedTuple):
    """A GPU.

    Attributes:
        bus_id: Of its PCI device; empty where a source has none.
        number: In the source's own count, from 0.
        rank: NCCL's; ``UNKNOWN``.
        sm: Compute capability, such as 90, AMD's number of units in AMD's files;
            ``UNKNOWN``.
        gcn: AMD's architecture, ``942``; empty for others.
        gdr: 1 where network adapters reach its memory, 0 where not, or ``UNKNOWN``.
        title: What the driver calls it; empty where not told.
        uuid: ``GPU-...``; empty where not told.
        node: NUMA node of one without PCI device; ``UNKNOWN``.
    """

    bus_id: str
    number: int
    rank: int = UNKNOWN
    sm: int = UNKNOWN
    gcn: str = ""
    gdr: int = UNKNOWN
    title: str = ""
    uuid: str = ""
    node: int = UNKNOWN

    @property
    def name(self) -> str:
        """What links and findings call it."""
        return self.bus_id or f"gpu/{self.number}"


class NetPort(NamedTuple):
    """A port of a network adapter.

    Attributes:
        title: ``mlx5_0``, ``eth0``.
        bus_id: Of its PCI device; empty for what is virtual or not told.
        node: NUMA node of one without PCI device; ``UNKNOWN``.
        number: In the source's own count; ``UNKNOWN``.
        kind: ``infiniband``, ``ethernet``, or empty where not told.
        mbit_per_s: As written, 0 and negative included; 0 where not told.
        port: Number of the port on its adapter; ``UNKNOWN``.
        guid: As written; empty where not told.
        gdr: 1 where it reaches GPUs' memory, 0 where not, or ``UNKNOWN``.
        latency_us: Of the network behind it; 0 where not told.
        is_up: Whether it has a link; true where not told.
    """

    title: str
    bus_id: str = ""
    node: int = UNKNOWN
    number: int = UNKNOWN
    kind: str = ""
    mbit_per_s: int = 0
    port: int = UNKNOWN
    guid: str = ""
    gdr: int = UNKNOWN
    latency_us: float = 0.0
    is_up: bool = True

    @property
    def name(self) -> str:
        """What links and findings call it."""
        return f"net/{self.title}"


class Interface(NamedTuple):
    """A network interface whose bytes leave through ports of other names.

    Attributes:
        title: ``bond0``, ``vlan9``, ``br0``, or that of an RDMA adapter's port.
        lower: Titles of the ports and interfaces right below it.
        bonding: How a bond uses them, in the kernel's word: ``802.3ad``,
            ``active-backup``; empty for what is no bond.
    """

    title: str
    lower: tuple[str, ...]
    bonding: str = ""


class Link(NamedTuple):
    """Direct links from one element to another, in this direction.

    Attributes:
        kind: What they are made of.
        source: Name of the element they leave.
        target: Name of the element they lead to: a listed one, one that no source
            shows, or ``NVSWITCH``.
        num_links: How many.
        gb_per_s: All of them together, where a source tells; else 0, and it follows
            from the GPU.
        target_class: PCI class of what they lead to, as told; ``UNKNOWN``.
    """

    kind: LinkKind
    source: str
    target: str
    num_links: int
    gb_per_s: float = 0.0
    target_class: int = UNKNOWN


class Relation(NamedTuple):
    """What a source says of a pair of elements, without what lies between.

    Attributes:
        source: Name of the one.
        target: Name of the other.
        path: nvidia-smi's word: ``NV18``, ``PIX``, ``SYS``; empty where not told.
        peer: nvidia-smi's word on access to each other's memory: ``OK``, ``NS``;
            empty where not told.
    """

    source: str
    target: str
    path: str = ""
    peer: str = ""


class HostTopology(NamedTuple):
    """One host.

    Attributes:
        name: Empty where no source has it.
        sources: What it was read from, for people: ``NCCL topology file a.xml``.
        numa_nodes: By number.
        devices: Parents before children, else in the source's order.
        gpus: In the source's order.
        ports: In the source's order.
        links: In the source's order.
        relations: In the source's order.
        interfaces: Those above ports, each after those below it.
        remarks: What was odd about a source and read all the same, a sentence each.
    """

    name: str = ""
    sources: tuple[str, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    devices: tuple[PciDevice, ...] = ()
    gpus: tuple[GpuDevice, ...] = ()
    ports: tuple[NetPort, ...] = ()
    links: tuple[Link, ...] = ()
    relations: tuple[Relation, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def paired(self) -> frozenset[str]:
        """Names of the elements of which a source says how near others are."""
        pairs = ((each.source, each.target) for each in self.relations)
        return frozenset(name for pair in pairs for name in pair)


class NetworkSwitch(NamedTuple):
    """A switch between hosts.

    Attributes:
        name: Its name.
        switches: Names of those below it.
        hosts: Names of the hosts at it.
        speed: Of its links, as written; empty where not told.
    """

    name: str
    switches: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    speed: str = ""


class Topology(NamedTuple):
    """Hosts and what lies between them.

    Attributes:
        hosts: In the source's order.
        switches: In the source's order.
    """

    hosts: tuple[HostTopology, ...] = ()
    switches: tuple[NetworkSwitch, ...] = ()
