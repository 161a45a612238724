"""The paths that NCCL finds between the elements of a host.

Vertices have the names of elements: ``numa/0`` for a NUMA node, the bus address for a
PCI switch, GPU or adapter, ``net/mlx5_0`` for a port, ``nvswitch`` for all NVLink
switches. The rules are those of NCCL 2.30, but without NCCL's vertex between a GPU and
its links, which only adds a hop.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import permutations
from typing import NamedTuple

from ronde.topology.graph import (
    NVSWITCH,
    UNKNOWN,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    NumaNode,
    PciDevice,
)
from ronde.topology.paths import speeds

POWER_BRIDGE_CLASS = 0x068001
"""The class of a processor at the end of a GPU's NVLinks, on POWER."""

_BROADCOM = 0x1000
_PCIE4_SWITCH, _PCIE5_SWITCH = 0xC010, 0xC030
_NVLINK_CLASSES = (0x068000, POWER_BRIDGE_CLASS)
_END_CLASSES = (*speeds.GPU_CLASSES, 0x02)


class PathKind(StrEnum):
    """The most distant kind of step in a path, in NCCL's terms, from near to far."""

    LOC = "LOC"  # The element itself.
    NVL = "NVL"  # NVLink or xGMI, through its switches or directly.
    NVB = "NVB"  # NVLink by way of another GPU.
    C2C = "C2C"  # The link between a GPU and the processor in its package.
    PIX = "PIX"  # At most one PCI switch.
    PXB = "PXB"  # Several PCI switches.
    P2C = "P2C"  # C2C to the processor, and PCI from it.
    PXN = "PXN"  # Another GPU passes on to its adapter.
    PHB = "PHB"  # The processor's own PCI host bridge.
    SYS = "SYS"  # The links between processors.
    NET = "NET"  # A network.
    DIS = "DIS"  # None.

    @property
    def rank(self) -> int:
        return _RANKS[self]

    def __lt__(self, other: str) -> bool:
        return self.rank < PathKind(other).rank

    def __le__(self, other: str) -> bool:
        return self.rank <= PathKind(other).rank

    def __gt__(self, other: str) -> bool:
        return self.rank > PathKind(other).rank

    def __ge__(self, other: str) -> bool:
        return self.rank >= PathKind(other).rank


_RANKS = {kind: rank for rank, kind in enumerate(PathKind)}
_KINDS = tuple(PathKind)
# Kinds for nvidia-smi's words on PCI paths.
_KINDS_OF_WORDS = {kind: PathKind(kind) for kind in ("PIX", "PXB", "PHB", "SYS")}
_KINDS_OF_WORDS["NODE"] = PathKind.PHB


class Path(NamedTuple):
    """A path between two elements, with its kind and bandwidth."""

    kind: PathKind  # Of its farthest step.
    gb_per_s: float  # Of its narrowest step, in one direction.
    route: tuple[str, ...]  # Names of the vertices, both ends included.


class VertexKind(StrEnum):
    """The kind of a vertex, in NCCL's words and order."""

    GPU = "GPU"
    PCI = "PCI"
    NVS = "NVS"
    CPU = "CPU"
    NIC = "NIC"
    NET = "NET"


class Edge(NamedTuple):
    """A directed edge from a vertex to ``target``."""

    target: str
    kind: PathKind  # The nearest that a path with this step can be.
    gb_per_s: float


def join_switches(devices: Sequence[PciDevice]) -> dict[str, str]:
    """Return the parent of each device; the levels of a switch count as one."""
    # Broadcom's PCIe 4 and 5 switches in base mode appear as one switch above others
    # (levels 0 and 1), yet have the full bandwidth between all their ports.
    parents = {each.bus_id: each.parent for each in devices}
    by_bus_id = {each.bus_id: each for each in devices}
    for switch in devices:
        generation = _generation(switch, 0)
        if not generation or switch.bus_id not in parents:
            continue
        below = [name for name, parent in parents.items() if parent == switch.bus_id]
        for name in below:
            if _generation(by_bus_id[name], 1) == generation:
                del parents[name]
                for child, parent in parents.items():
                    if parent == name:
                        parents[child] = switch.bus_id
    return parents


def _generation(switch: PciDevice, level: int) -> int:
    """Return a Broadcom switch's PCIe generation, else 0 (NCCL's ``getBcmGen``)."""
    if (switch.vendor, switch.subsystem_vendor) != (_BROADCOM, _BROADCOM):
        return 0
    kind = switch.device, switch.subsystem_device & 0xF000
    return {(_PCIE4_SWITCH, 0xA000): 4, (_PCIE5_SWITCH, level << 12): 5}.get(kind, 0)


def find_numa_numbers(host: HostTopology) -> dict[str, int]:
    """Return the NUMA node of all devices, GPUs and adapters, by name.

    All devices of a PCI tree have the node of its host bridge. Other elements are at
    the only node, or at ``UNKNOWN`` if there are several. Virtual adapters are at the
    first node, as in NCCL; an adapter with a known distance is not virtual.
    """
    roots: dict[str, str] = {}
    numbers: dict[str, int] = {}
    for device in host.devices:
        root = roots[device.bus_id] = roots.get(device.parent, device.bus_id)
        if numbers.get(root, UNKNOWN) == UNKNOWN:
            numbers[root] = device.node
    found = {name: numbers[root] for name, root in roots.items()}
    for gpu in host.gpus:
        found.setdefault(gpu.name, gpu.node)
    first = host.numa_nodes[0].number if host.numa_nodes else UNKNOWN
    paired = host.paired
    for port in host.ports:
        is_placed = port.bus_id or port.node != UNKNOWN or port.name in paired
        found.setdefault(adapter_name(port), port.node if is_placed else first)
    only = first if len(host.numa_nodes) == 1 else UNKNOWN
    return {n: only if number == UNKNOWN else number for n, number in found.items()}


def adapter_name(port: NetPort) -> str:
    """Return the name of a port's adapter; a NUMA node's virtual ports share one."""
    return port.bus_id or f"nic/{port.node}"


def bridges_above(devices: Mapping[str, PciDevice], bus_id: str) -> list[PciDevice]:
    """Return a device and the bridges above it; [] if the device is not listed."""
    chain: list[PciDevice] = []
    device = devices.get(bus_id)
    while device and device not in chain:
        chain.append(device)
        device = devices.get(device.parent)
    return chain


class PathNetwork:
    """The graph of a host's elements, with the vertices in NCCL's order.

    Elements without a PCI device are connected to their NUMA node as if by PCIe 3. PCI
    devices without a NUMA node are at node -1, as in NCCL. If several elements have the
    same name, the first counts.
    """

    def __init__(self, host: HostTopology) -> None:
        self.host = host
        # Pairs of vertices between which no source has the chip that NVLinks leave, or
        # anything of the PCI device: NCCL would ask the hardware.
        self.guessed: set[frozenset[str]] = set()
        self.kinds: dict[str, VertexKind] = {}  # Of all vertices, in NCCL's order.
        # Bandwidth of the edges of each vertex, by target and kind; the last to be
        # widened is last.
        self._edges: dict[str, dict[tuple[str, PathKind], float]] = {}
        self._above: dict[str, str] = {}
        self._parents = join_switches(host.devices)
        self._numbers = find_numa_numbers(host)
        self._gpus = {each.name: each for each in reversed(host.gpus)}
        nodes = list(self._order_nodes())
        self.kinds |= {node.name: VertexKind.CPU for node in nodes}
        self._add_devices()
        for gpu in host.gpus:
            if gpu.name not in self.kinds:
                self._hang(gpu.name, VertexKind.GPU, PciDevice(gpu.name))
        for port in host.ports:
            if port.name not in self.kinds:
                self._add_port(port)
        for link in host.links:
            self._add_link(link)
        for node, other in permutations(nodes, 2):
            speed = speeds.smp_gb_per_s(node, other)
            self._connect(node.name, other.name, PathKind.SYS, speed)
        # Of each by falling bandwidth, the PCI link above it last.
        self.edges = {name: self._sorted(name) for name in self.kinds}

    def named(self, kind: VertexKind) -> tuple[str, ...]:
        return tuple(name for name, own in self.kinds.items() if own == kind)

    def _add_devices(self) -> None:
        adapters = {each.bus_id for each in self.host.ports}
        for device in self.host.devices:
            name, code = device.bus_id, device.class_code
            if name not in self._parents or name in self.kinds:
                continue
            if name in self._gpus:
                self._hang(name, VertexKind.GPU, device)
            elif name in adapters:
                self._hang(name, VertexKind.NIC, device)
            elif code >> 16 not in _END_CLASSES and code not in _NVLINK_CLASSES:
                self._hang(name, VertexKind.PCI, device)

    def _order_nodes(self) -> Iterator[NumaNode]:
        """Yield the NUMA nodes in the order of the devices, as in NCCL's files."""
        known = {each.number: each for each in self.host.numa_nodes}
        devices = {each.bus_id for each in self.host.devices}
        numbers = [n for name, n in self._numbers.items() if name in devices]
        numbers += [n for n in self._numbers.values() if n != UNKNOWN]
        numbers += known
        # Without any known node, a common node for all elements would be a guess.
        if known or any(n != UNKNOWN for n in numbers):
            for number in dict.fromkeys(numbers):
                yield known.get(number) or NumaNode(number)

    def _sorted(self, name: str) -> tuple[Edge, ...]:
        """Return a vertex's edges by falling bandwidth, the edge to its parent last."""
        own = self._edges.get(name, {}).items()
        edges = [Edge(*end, speed) for end, speed in sorted(own, key=lambda e: -e[1])]
        above = self._above.get(name)
        up = next((e for e in edges if e.target == above), None)
        return (*(e for e in edges if e is not up), up) if up else tuple(edges)

    def _connect(self, source: str, target: str, kind: PathKind, speed: float) -> None:
        own = self._edges.setdefault(source, {})
        # Sums of equal links must not depend on the order of the links.
        own[target, kind] = round(own.pop((target, kind), 0.0) + speed, 6)

    def _join(self, one: str, other: str, kind: PathKind, speed: float) -> None:
        self._connect(one, other, kind, speed)
        self._connect(other, one, kind, speed)

    def _hang(
        self, vertex: str, kind: VertexKind, device: PciDevice, speed: float = 0.0
    ) -> None:
        """Add a vertex, and connect it to its parent by the PCI link of ``device``."""
        self.kinds[vertex] = kind
        above = self._parents.get(device.bus_id, "")
        if self.kinds.get(above) != VertexKind.PCI:
            above = NumaNode(self._numbers[device.bus_id]).name
        if not speed and not speeds.is_pci_known(device):
            self.guessed.add(frozenset((vertex, above)))
        if above in self.kinds:
            ends = {kind, self.kinds[above]}
            step = PathKind.PHB if VertexKind.CPU in ends else PathKind.PIX
            step = PathKind.PXB if ends == {VertexKind.PCI} else step
            self._above[vertex] = above
            self._join(vertex, above, step, speed or speeds.pci_gb_per_s(device))

    def _add_port(self, port: NetPort) -> None:
        adapter = adapter_name(port)
        if adapter not in self.kinds:
            limit = 0.0 if port.bus_id else speeds.LOCAL_GB_PER_S
            self._hang(adapter, VertexKind.NIC, PciDevice(adapter), limit)
        # Even a port that the source lists only as a PCI device has a speed.
        is_known = port.mbit_per_s != 0 or port.number != UNKNOWN
        speed = speeds.port_gb_per_s(port) if is_known else speeds.LOCAL_GB_PER_S
        self.kinds[port.name] = VertexKind.NET
        self._join(adapter, port.name, PathKind.LOC, speed)
        if not port.bus_id and port.name in self.host.paired:
            self.guessed.add(frozenset((adapter, port.name)))

    def _add_link(self, link: Link) -> None:
        if link.kind == LinkKind.PCI:
            ends = {self.kinds.get(link.source), self.kinds.get(link.target)}
            if ends == {VertexKind.PCI}:
                limit = speeds.LOCAL_GB_PER_S
                self._connect(link.source, link.target, PathKind.PXB, limit)
            return
        gpu = self._gpus.get(link.source)
        speed = speeds.link_gb_per_s(link, gpu) if gpu else 0.0
        if gpu is None or speed <= 0 or not link.target:
            return
        source, target = gpu.name, self._link_target(link)
        kind = PathKind.C2C if link.kind == LinkKind.C2C else PathKind.NVL
        if target == NVSWITCH and target not in self.kinds:
            self.kinds[target] = VertexKind.NVS
        if target in self.kinds:
            self._connect(source, target, kind, speed)
            # Between GPUs the other direction is a separate link.
            if self.kinds[target] in (VertexKind.CPU, VertexKind.NVS):
                self._connect(target, source, kind, speed)
        if not speeds.is_link_known(link, gpu):
            self.guessed.add(frozenset((source, target)))

    def _link_target(self, link: Link) -> str:
        """Return the vertex at the end of a GPU's link, by its PCI class or name."""
        is_gpu = link.target in self._gpus
        is_processor = self.kinds.get(link.target) == VertexKind.CPU
        if link.target_class != UNKNOWN:
            is_gpu = link.target_class >> 16 in speeds.GPU_CLASSES
            is_processor = link.target_class == POWER_BRIDGE_CLASS
        if link.kind == LinkKind.C2C or is_processor:
            return NumaNode(self._numbers[link.source]).name
        is_peer = is_gpu and link.target != NVSWITCH
        return link.target if is_peer else NVSWITCH


class Paths(NamedTuple):
    """The paths between the elements of a host."""

    network: PathNetwork
    table: dict[tuple[str, str], Path]  # By the names of source and target.

    def between(self, source: str, target: str) -> Path | None:
        """Return the path from any element to a GPU, port, NUMA node or NVSwitch."""
        return self.table.get((source, target))

    def is_known(self, path: Path) -> bool:
        """Return True if no bandwidth on the path is a guess."""
        steps = zip(path.route, path.route[1:], strict=False)
        return not any(frozenset(step) in self.network.guessed for step in steps)


def find_paths(host: HostTopology) -> Paths:
    """Return the paths that the hardware allows, without NCCL's detours.

    As in NCCL's ``ncclTopoSetPaths`` (src/graph/paths.cc), the bandwidth is that from
    target to source. This matters only for links whose directions differ in bandwidth.
    """
    network = PathNetwork(host)
    search = _Search(network)
    table: dict[tuple[str, str], Path] = {}
    for kind in VertexKind.CPU, VertexKind.GPU, VertexKind.NET, VertexKind.NVS:
        for target in network.named(kind):
            for source, way in search.run(target).items():
                table[source, target] = Path(_KINDS[way.rank], *way[1:])
    devices = {each.bus_id for each in host.devices}
    for relation in host.relations:
        # A source's word on a pair counts where no PCI tree has more.
        word = _KINDS_OF_WORDS.get(relation.path)
        for ends in permutations((relation.source, relation.target)):
            path = table.get((ends[0], ends[1]))
            if word and path and devices.isdisjoint(path.route):
                table[ends[0], ends[1]] = path._replace(kind=word)
    return Paths(network, table)


class _Way(NamedTuple):
    """A path from a vertex to the target of the search."""

    rank: int  # Of its kind.
    gb_per_s: float
    route: tuple[str, ...]  # From the vertex to the target.

    @property
    def order(self) -> tuple[int, float, int]:
        return self.rank, -self.gb_per_s, len(self.route)


class _Search:
    def __init__(self, network: PathNetwork) -> None:
        self._gpus = set(network.named(VertexKind.GPU))
        # NCCL gives up where a link is listed in one direction alone.
        edges = network.edges.items()
        ends = {(name, edge.target, edge.kind) for name, own in edges for edge in own}
        self._steps = {
            name: [edge for edge in own if (edge.target, name, edge.kind) in ends]
            for name, own in edges
        }

    def run(self, target: str) -> dict[str, _Way]:
        found = {target: _Way(0, speeds.LOCAL_GB_PER_S, (target,))}
        wave = [target]
        while wave:
            after: dict[str, None] = {}
            for name in wave:
                for way in self._extend(name, found[name]):
                    end = way.route[0]
                    # A nearer kind wins over fewer hops.
                    if end not in found or way.order < found[end].order:
                        found[end] = way
                        after[end] = None
            wave = list(after)
        return found

    def _extend(self, name: str, way: _Way) -> Iterator[_Way]:
        # A path may pass a GPU only by NVLink, and only the GPU next to the target.
        num_hops = len(way.route) - 1
        passes_gpu = name in self._gpus and num_hops > 0
        for end, kind, gb_per_s in self._steps[name]:
            is_peer = kind == PathKind.NVL and end in self._gpus
            if passes_gpu and not (is_peer and num_hops == 1):
                continue
            rank = max(way.rank, kind.rank)
            if passes_gpu and way.rank == kind.rank == PathKind.NVL.rank:
                rank = PathKind.NVB.rank
            yield _Way(rank, min(way.gb_per_s, gb_per_s), (end, *way.route))
