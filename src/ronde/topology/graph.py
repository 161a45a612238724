"""The elements of hosts, findings about them, and conversion of both to and from JSON.

Unknown fields are ``UNKNOWN``, 0 or empty, unless their comment says otherwise.
"""

import json
from collections.abc import Iterable, Sequence
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple, cast

from ronde.errors import UsageError
from ronde.plain_values import PlainValueError, from_plain, shorten, to_plain

UNKNOWN = -1
"""The value of numbers that no source shows."""

_VIRTUAL = (
    *("virbr", "docker", "veth", "br-", "vnet", "tap", "tun", "lo", "dummy"),
    *("cali", "cni", "cilium", "flannel", "lxc", "lxd", "podman", "vxlan", "wg"),
)

NVSWITCH = "nvswitch"
"""Name of all NVLink switches of a host, if no source shows the individual ones."""


class LinkKind(StrEnum):
    """The kind of a direct link; PCI links of the tree are fields of ``PciDevice``."""

    NVLINK = "nvlink"
    XGMI = "xgmi"
    C2C = "c2c"  # Between a GPU and the processor in its package.
    PCI = "pci"  # Between switches that the tree does not join (NCCL's ``pcilink``).


class NumaNode(NamedTuple):
    """A NUMA node: cores and the memory close to them."""

    number: int  # The kernel's; ids have gaps.
    cpus: tuple[int, ...] = ()  # Hardware threads, ascending; empty for memory alone.
    cores: tuple[tuple[int, ...], ...] = ()  # The same by physical core.
    memory_bytes: int = UNKNOWN
    arch: str = ""  # ``x86_64``, ``arm64``, ``ppc64``.
    vendor: str = ""  # ``GenuineIntel``, ``AuthenticAMD``, ...
    family: int = UNKNOWN  # As NCCL counts it: base plus 16 times extended.
    model: int = UNKNOWN

    @property
    def name(self) -> str:
        return f"numa/{self.number}"


def nccl_family(family: int) -> int:
    """Return a processor's family as NCCL counts it (``ncclTopoGetXmlFromCpu``)."""
    # The kernel adds the extended family to 15; NCCL adds 16 times the extended family.
    return 15 + 16 * (family - 15) if family > 15 else family


class PciDevice(NamedTuple):
    """A bridge, switch or device on the PCI bus, and its link towards the processor."""

    bus_id: str  # ``0000:1b:00.0``, in lower case.
    parent: str = ""  # Of the bridge above; empty right below a host bridge.
    node: int = UNKNOWN  # Number of the NUMA node near it.
    class_code: int = UNKNOWN  # Class, subclass and interface, such as 0x030200.
    vendor: int = UNKNOWN
    device: int = UNKNOWN
    subsystem_vendor: int = UNKNOWN
    subsystem_device: int = UNKNOWN
    speed: str = ""  # Of a lane, as written: ``16.0 GT/s PCIe``.
    width: int = UNKNOWN  # Lanes as written, 0 included.
    gb_per_s: float = 0.0  # In one direction, from sources that have no speed.
    speed_now: str = ""  # As trained now, like ``speed``.
    width_now: int = UNKNOWN
    # ACS redirects traffic between the devices below to the processor.
    is_redirecting: bool = False
    redirecting_ports: tuple[str, ...] = ()  # The bridges right below that do.
    is_lost: bool = False  # It has fallen off the bus.

    @property
    def name(self) -> str:
        return self.bus_id


class GpuDevice(NamedTuple):
    """A GPU. Its PCI link is in the ``PciDevice`` with the same address."""

    bus_id: str
    number: int  # In the source's own count, from 0.
    sm: int = UNKNOWN  # Compute capability, such as 90; in AMD's files number of units.
    gcn: str = ""  # AMD's architecture, ``942``.
    gdr: int = UNKNOWN  # 1 where network adapters reach its memory, 0 where not.
    title: str = ""  # The driver's name for it.
    uuid: str = ""  # ``GPU-...``.
    node: int = UNKNOWN  # NUMA node of one without PCI device.
    nvlinks: int = UNKNOWN  # Its NVLinks that are up, where the source counts them.

    @property
    def name(self) -> str:
        return self.bus_id or f"gpu/{self.number}"


class NetPort(NamedTuple):
    """A port of a network adapter, or a virtual network interface."""

    title: str  # ``mlx5_0``, ``eth0``.
    bus_id: str = ""  # Empty for a virtual one, too.
    node: int = UNKNOWN  # NUMA node of one without PCI device.
    number: int = UNKNOWN  # In the source's own count.
    kind: str = ""  # ``infiniband``, ``ethernet``.
    mbit_per_s: int = 0  # As written, 0 and negative included.
    port: int = UNKNOWN  # Number of the port on its adapter.
    gdr: int = UNKNOWN  # 1 where it reaches GPUs' memory, 0 where not.
    is_up: bool = True  # It has a link; True if unknown.
    state: str = ""  # Of its link, as written: ``INIT, LinkUp``, ``1X NDR``.

    @property
    def name(self) -> str:
        return f"net/{self.title}"

    @property
    def is_virtual(self) -> bool:
        """True if the title looks like a bridge, tunnel or container interface."""
        return not self.bus_id and self.title.startswith(_VIRTUAL)


class Interface(NamedTuple):
    """A network interface on top of others: a bond, VLAN or bridge."""

    title: str  # ``bond0``, ``vlan9``, ``br0``, or that of an RDMA adapter's port.
    lower: tuple[str, ...]  # Titles of the ports and interfaces right below it.
    bonding: str = ""  # A bond's mode: ``802.3ad``, ``active-backup``.


class Link(NamedTuple):
    """All direct links from one element to another, in this direction."""

    kind: LinkKind
    source: str
    # Name of an element, which may not be listed, or ``NVSWITCH``; empty if unknown.
    target: str
    num_links: int
    gb_per_s: float = 0.0  # Of all together; 0 where it follows from the GPU.
    target_class: int = UNKNOWN  # PCI class of the target.


class Relation(NamedTuple):
    """A distance between two elements that the source gives as a word."""

    source: str
    target: str
    path: str = ""  # nvidia-smi's word: ``NV18``, ``PIX``, ``SYS``.
    peer: str = ""  # nvidia-smi's word on access to each other's memory: ``OK``.


class HostTopology(NamedTuple):
    """The elements of a host, as found in one or more sources."""

    name: str = ""
    sources: tuple[str, ...] = ()  # For output: ``NCCL topology file a.xml``.
    numa_nodes: tuple[NumaNode, ...] = ()  # By number.
    devices: tuple[PciDevice, ...] = ()  # Parents before children.
    gpus: tuple[GpuDevice, ...] = ()  # In the source's order, like the next fields.
    ports: tuple[NetPort, ...] = ()
    links: tuple[Link, ...] = ()
    relations: tuple[Relation, ...] = ()
    interfaces: tuple[Interface, ...] = ()  # Each after those below it.
    remarks: tuple[str, ...] = ()  # Oddities of a source, a sentence each.
    refused: tuple[str, ...] = ()  # Why NCCL refuses its file, like that.

    @property
    def shows_acs(self) -> bool:
        # lspci shows ACS and links only to root.
        is_lspci = any(source.startswith("lspci") for source in self.sources)
        return is_lspci and any(device.speed for device in self.devices)

    @property
    def paired(self) -> frozenset[str]:
        pairs = ((each.source, each.target) for each in self.relations)
        return frozenset(name for pair in pairs for name in pair)


class NetworkSwitch(NamedTuple):
    """A network switch with the hosts and switches below it."""

    name: str
    switches: tuple[str, ...] = ()  # Names of those below it.
    hosts: tuple[str, ...] = ()  # Names of the hosts at it.
    speed: str = ""  # Of its links, as written.


class Topology(NamedTuple):
    """Hosts and the network switches between them, in the source's order."""

    hosts: tuple[HostTopology, ...] = ()
    switches: tuple[NetworkSwitch, ...] = ()


class Level(StrEnum):
    """The severity of a finding about a topology."""

    ERROR = "error"  # Something does not work, or most of the bandwidth is lost.
    WARNING = "warning"  # Bandwidth is lost, or may be lost.
    NOTE = "note"  # Worth knowing; bandwidth is not necessarily lost.


class Diagnostic(NamedTuple):
    """A finding about an element: its rule, the texts for the user, and two rates."""

    rule: str  # Its name, in words joined by hyphens: ``slow-bridge``.
    severity: Level
    element: str  # By name; for files also the line: ``line 12``.
    seen: str
    consequence: str
    remedy: str
    has_gb_per_s: float = 0.0  # In one direction; 0 where that does not follow.
    should_gb_per_s: float = 0.0


# The version increases when a field changes its meaning or is removed.
_SCHEMA = {"form": "ronde-topology", "version": 3}
_MAX_DEPTH = 256


def write_topology(topology: Topology) -> str:
    plain = cast("dict[str, object]", to_plain(topology))
    return json.dumps({**_SCHEMA, **plain}, indent=1) + "\n"


def read_topology(data: bytes, origin: str) -> Topology:
    try:
        read: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"cannot read {origin}: not valid JSON: {error}. It may be truncated."
        ) from None
    values = cast("dict[str, object]", read) if isinstance(read, dict) else {}
    found = {name: values.pop(name, None) for name in _SCHEMA}
    if found != _SCHEMA:
        problem = "is JSON, but not a ronde topology"
        if found["form"] == _SCHEMA["form"]:
            given = shorten(found["version"])
            problem = f"has format version {given}, but this ronde reads version 3"
        raise UsageError(f"{origin} {problem}. Write it with: ronde topo --json")
    try:
        topology = from_plain(Topology, values, "topology")
        for host in topology.hosts:
            _require_order(host.devices)
    except PlainValueError as error:
        message = f"{origin}: {error} Write it with: ronde topo --json"
        raise UsageError(message) from None
    require_tree(topology.switches, origin)
    return topology


def require_tree(switches: Sequence[NetworkSwitch], origin: str) -> None:
    """Raise ``UsageError`` if switches are repeated, in a cycle, or nested too deep."""
    below = {switch.name: switch.switches for switch in switches}
    if len(below) != len(switches):
        raise UsageError(
            f"{origin} names a switch more than once. Remove the duplicates."
        )
    depths: dict[str, int] = {}
    try:
        for name in TopologicalSorter(below).static_order():
            depths[name] = 1 + max((depths[n] for n in below.get(name, ())), default=0)
    except CycleError as error:
        circle = " > ".join(reversed(error.args[1]))
        raise UsageError(
            f"{origin} has a cycle of switches: {shorten(circle)}. Correct the lines "
            "of these switches."
        ) from None
    if max(depths.values(), default=0) > _MAX_DEPTH:
        raise UsageError(
            f"{origin} has {max(depths.values())} levels of switches, but at most "
            f"{_MAX_DEPTH} are supported."
        )


def _require_order(devices: Iterable[PciDevice]) -> None:
    listed = {device.bus_id for device in devices}
    depths: dict[str, int] = {}
    for name, parent, *_ in devices:
        rule = ""
        if name in depths or (parent in listed and parent not in depths):
            rule = "be listed once, and after their parents"
        depths[name] = depths.get(parent, 0) + 1
        if depths[name] > _MAX_DEPTH:
            rule = f"be nested at most {_MAX_DEPTH} deep"
        if rule:
            raise PlainValueError(f"devices must {rule}, got {name!r}.")
