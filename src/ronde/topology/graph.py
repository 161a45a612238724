"""A topology as JSON, and back."""

import json
from collections.abc import Sequence
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple, cast

from ronde.errors import UsageError
from ronde.plain_values import PlainValueError, from_plain, shorten, to_plain

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
    """Some cores and the memory near them."""

    number: int  # The kernel's; ids have gaps. ``UNKNOWN`` where a source has none.
    cpus: tuple[int, ...] = ()  # Hardware threads, ascending; empty for memory alone.
    # Those threads by physical core, each ascending; empty where not told.
    cores: tuple[tuple[int, ...], ...] = ()
    memory_bytes: int = UNKNOWN  # Of it in all; ``UNKNOWN``.
    free_bytes: int = UNKNOWN  # Of it free; ``UNKNOWN``.
    # To other nodes and itself, each a pair of number and distance, as the firmware
    # tells (10 is local); empty where not told.
    distances: tuple[tuple[int, int], ...] = ()
    package: int = UNKNOWN  # Number of its socket; ``UNKNOWN``.
    arch: str = ""  # ``x86_64``, ``arm64``, ``ppc64``; empty where not told.
    vendor: str = ""  # ``GenuineIntel``, ``AuthenticAMD``, ...; empty where not told.
    # As NCCL counts it: base plus 16 times extended; ``UNKNOWN``.
    family: int = UNKNOWN
    model: int = UNKNOWN  # ``UNKNOWN`` where not told.

    @property
    def name(self) -> str:
        """What links and findings call it."""
        return f"numa/{self.number}"


class PciDevice(NamedTuple):
    """A bridge, switch or device on the PCI bus, and the link above it."""

    bus_id: str  # ``0000:1b:00.0``, in lower case.
    # Bus address of the bridge above; empty right below a host bridge.
    parent: str = ""
    node: int = UNKNOWN  # Number of the NUMA node it is near; ``UNKNOWN``.
    # Class, subclass and interface, such as 0x030200; ``UNKNOWN``.
    class_code: int = UNKNOWN
    vendor: int = UNKNOWN  # ``UNKNOWN`` where not told, like the three that follow.
    device: int = UNKNOWN  # Number that the vendor gave it.
    subsystem_vendor: int = UNKNOWN  # Who built the board.
    subsystem_device: int = UNKNOWN  # Number that the board's maker gave it.
    speed: str = ""  # Of a lane, as written: ``16.0 GT/s PCIe``; empty where not told.
    width: int = UNKNOWN  # Lanes as written, 0 included; ``UNKNOWN``.
    # What the link carries in one direction, from sources that tell that and no speed;
    # 0 where not told.
    gb_per_s: float = 0.0
    speed_now: str = ""  # As trained now, like ``speed``; empty where not told.
    width_now: int = UNKNOWN  # As trained now; ``UNKNOWN``.

    @property
    def name(self) -> str:
        """What links and findings call it."""
        return self.bus_id


class GpuDevice(NamedTuple):
    """A GPU."""

    bus_id: str  # Of its PCI device; empty where a source has none.
    number: int  # In the source's own count, from 0.
    rank: int = UNKNOWN  # NCCL's; ``UNKNOWN``.
    # Compute capability, such as 90, AMD's number of units in AMD's files; ``UNKNOWN``.
    sm: int = UNKNOWN
    gcn: str = ""  # AMD's architecture, ``942``; empty for others.
    # 1 where network adapters reach its memory, 0 where not, or ``UNKNOWN``.
    gdr: int = UNKNOWN
    title: str = ""  # What the driver calls it; empty where not told.
    uuid: str = ""  # ``GPU-...``; empty where not told.
    node: int = UNKNOWN  # NUMA node of one without PCI device; ``UNKNOWN``.

    @property
    def name(self) -> str:
        """What links and findings call it."""
        return self.bus_id or f"gpu/{self.number}"


class NetPort(NamedTuple):
    """A port of a network adapter."""

    title: str  # ``mlx5_0``, ``eth0``.
    bus_id: str = ""  # Of its PCI device; empty for what is virtual or not told.
    node: int = UNKNOWN  # NUMA node of one without PCI device; ``UNKNOWN``.
    number: int = UNKNOWN  # In the source's own count; ``UNKNOWN``.
    kind: str = ""  # ``infiniband``, ``ethernet``, or empty where not told.
    mbit_per_s: int = 0  # As written, 0 and negative included; 0 where not told.
    port: int = UNKNOWN  # Number of the port on its adapter; ``UNKNOWN``.
    guid: str = ""  # As written; empty where not told.
    gdr: int = UNKNOWN  # 1 where it reaches GPUs' memory, 0 where not, or ``UNKNOWN``.
    latency_us: float = 0.0  # Of the network behind it; 0 where not told.
    is_up: bool = True  # Whether it has a link; true where not told.

    @property
    def name(self) -> str:
        """What links and findings call it."""
        return f"net/{self.title}"


class Interface(NamedTuple):
    """A network interface whose bytes leave through ports of other names."""

    title: str  # ``bond0``, ``vlan9``, ``br0``, or that of an RDMA adapter's port.
    lower: tuple[str, ...]  # Titles of the ports and interfaces right below it.
    # How a bond uses them, in the kernel's word: ``802.3ad``, ``active-backup``; empty
    # for what is no bond.
    bonding: str = ""


class Link(NamedTuple):
    """Direct links from one element to another, in this direction."""

    kind: LinkKind  # What they are made of.
    source: str  # Name of the element they leave.
    # Name of the element they lead to: a listed one, one that no source shows, or
    # ``NVSWITCH``.
    target: str
    num_links: int  # How many.
    # All of them together, where a source tells; else 0, and it follows from the GPU.
    gb_per_s: float = 0.0
    target_class: int = UNKNOWN  # PCI class of what they lead to, as told; ``UNKNOWN``.


class Relation(NamedTuple):
    """What a source says of a pair of elements, without what lies between."""

    source: str  # Name of the one.
    target: str  # Name of the other.
    # nvidia-smi's word: ``NV18``, ``PIX``, ``SYS``; empty where not told.
    path: str = ""
    # nvidia-smi's word on access to each other's memory: ``OK``, ``NS``; empty where
    # not told.
    peer: str = ""


class HostTopology(NamedTuple):
    """One host."""

    name: str = ""  # Empty where no source has it.
    # What it was read from, for people: ``NCCL topology file a.xml``.
    sources: tuple[str, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()  # By number.
    # Parents before children, else in the source's order.
    devices: tuple[PciDevice, ...] = ()
    gpus: tuple[GpuDevice, ...] = ()  # In the source's order.
    ports: tuple[NetPort, ...] = ()  # In the source's order.
    links: tuple[Link, ...] = ()  # In the source's order.
    relations: tuple[Relation, ...] = ()  # In the source's order.
    # Those above ports, each after those below it.
    interfaces: tuple[Interface, ...] = ()
    # What was odd about a source and read all the same, a sentence each.
    remarks: tuple[str, ...] = ()

    @property
    def paired(self) -> frozenset[str]:
        """Names of the elements of which a source says how near others are."""
        pairs = ((each.source, each.target) for each in self.relations)
        return frozenset(name for pair in pairs for name in pair)


class NetworkSwitch(NamedTuple):
    """A switch between hosts."""

    name: str  # Its name.
    switches: tuple[str, ...] = ()  # Names of those below it.
    hosts: tuple[str, ...] = ()  # Names of the hosts at it.
    speed: str = ""  # Of its links, as written; empty where not told.


class Topology(NamedTuple):
    """Hosts and what lies between them."""

    hosts: tuple[HostTopology, ...] = ()  # In the source's order.
    switches: tuple[NetworkSwitch, ...] = ()  # In the source's order.


FORM = "ronde-topology"
VERSION = 1
"""Changes when a field changes its meaning or goes."""
_MAX_DEPTH = 256


def write_topology(topology: Topology) -> str:
    """Return the JSON of a topology, with its form and version."""
    plain = cast("dict[str, object]", to_plain(topology))
    return json.dumps({"form": FORM, "version": VERSION, **plain}, indent=1) + "\n"


def read_topology(data: bytes, origin: str) -> Topology:
    """Return the topology that JSON says.

    Raises:
        UsageError: It is not what ``write_topology`` gives.
    """
    try:
        said: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{origin} must be JSON, got an error: {error}. Was it cut?"
        ) from None
    values = cast("dict[str, object]", said) if isinstance(said, dict) else {}
    found = values.pop("form", None), values.pop("version", None)
    if found != (FORM, VERSION):
        raise UsageError(
            f"{origin} must have form {FORM!r} and version {VERSION}, got "
            f"{shorten(found[0])} and {shorten(found[1])}. Write it with this version "
            "of ronde: ronde topo --json"
        )
    try:
        topology = from_plain(Topology, values, "topology")
        for host in topology.hosts:
            _require_order(host)
    except PlainValueError as error:
        raise UsageError(
            f"{origin}: {error} Write it with: ronde topo --json"
        ) from None
    require_tree(topology.switches, origin)
    return topology


def require_tree(switches: Sequence[NetworkSwitch], origin: str) -> None:
    """Refuse switches that are not below one another in an order that ends.

    Raises:
        UsageError: Two have one name, one is above itself, or too many are.
    """
    below = {switch.name: switch.switches for switch in switches}
    if len(below) != len(switches):
        raise UsageError(f"{origin} must name each switch once. Remove the others.")
    depths: dict[str, int] = {}
    try:
        for name in TopologicalSorter(below).static_order():
            depths[name] = 1 + max((depths[n] for n in below.get(name, ())), default=0)
    except CycleError as error:
        circle = shorten(" > ".join(str(name) for name in error.args[1]))
        raise UsageError(
            f"{origin} must have no switch above itself, got {circle}. Correct what is "
            "below them."
        ) from None
    if max(depths.values(), default=0) > _MAX_DEPTH:
        raise UsageError(
            f"{origin} must have at most {_MAX_DEPTH} switches above one another, got "
            f"{max(depths.values())}. Is it a network?"
        )


def _require_order(host: HostTopology) -> None:
    """Refuse devices that come twice, before what they are below, or far down."""
    listed = {device.bus_id for device in host.devices}
    depths: dict[str, int] = {}
    for device in host.devices:
        name, parent = device.bus_id, device.parent
        if name in depths or parent in listed - depths.keys():
            raise PlainValueError(
                f"devices must come once and after their parents, got {name!r}."
            )
        depths[name] = depths.get(parent, 0) + 1
        if depths[name] > _MAX_DEPTH:
            raise PlainValueError(
                f"devices must be at most {_MAX_DEPTH} below one another, got {name!r}."
            )
