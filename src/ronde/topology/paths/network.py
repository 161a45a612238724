"""A host as NCCL sees it: vertices, and directed edges with kind and bandwidth.

Vertices are named as in the graph: a NUMA node ``numa/0``, a PCI switch, GPU or adapter
by its bus address, a port ``net/mlx5_0``, all NVLink switches together ``nvswitch``.
From NCCL 2.30 on a GPU's links begin at one more vertex, ``dev/`` and its name.
"""

from enum import StrEnum
from typing import NamedTuple

from ronde.topology.graph import HostTopology
from ronde.topology.paths.path import PathKind
from ronde.topology.paths.rules import NcclRules


class VertexKind(StrEnum):
    """What a vertex is; the words and their order are NCCL's."""

    GPU = "GPU"
    PCI = "PCI"
    NVS = "NVS"
    CPU = "CPU"
    NIC = "NIC"
    NET = "NET"
    DEV = "DEV"


class Edge(NamedTuple):
    """A step from a vertex to another.

    Attributes:
        target: Name of the vertex it leads to.
        kind: The nearest that a path with this step can be.
        gb_per_s: What it carries.
    """

    target: str
    kind: PathKind
    gb_per_s: float


class Vertex(NamedTuple):
    """An element of a host.

    Attributes:
        name: Its name.
        kind: What it is.
        edges: Those that leave it: by falling bandwidth, the PCI link above it last.
    """

    name: str
    kind: VertexKind
    edges: tuple[Edge, ...]

    def edge_to(self, target: str, kind: PathKind) -> Edge | None:
        """Return the edge of a kind to a vertex, or none."""
        found = (e for e in self.edges if (e.target, e.kind) == (target, kind))
        return next(found, None)


class Network(NamedTuple):
    """A host's vertices.

    Attributes:
        host: What it was made of.
        rules: By which release of NCCL.
        vertices: By name; of each kind in NCCL's order.
        untold: Pairs of vertices between which the bandwidth is a guess of ours: NCCL
            would ask the hardware.
    """

    host: HostTopology
    rules: NcclRules
    vertices: dict[str, Vertex]
    untold: frozenset[frozenset[str]] = frozenset()

    def named(self, kind: VertexKind) -> tuple[str, ...]:
        """Return the names of all vertices of a kind."""
        return tuple(v.name for v in self.vertices.values() if v.kind == kind)


class Draft:
    """A network that is being put together."""

    def __init__(self) -> None:
        self._kinds: dict[str, VertexKind] = {}
        self._edges: dict[str, list[Edge]] = {}
        self._above: dict[str, str] = {}
        self._untold: set[frozenset[str]] = set()

    def __contains__(self, name: str) -> bool:
        """Return whether there is a vertex of this name."""
        return name in self._kinds

    def kind_of(self, name: str) -> VertexKind | None:
        """Return what a vertex is; none where there is none of this name."""
        return self._kinds.get(name)

    def add(self, name: str, kind: VertexKind) -> None:
        """Add a vertex without edges."""
        self._kinds[name] = kind
        self._edges[name] = []

    def connect(self, source: str, target: str, kind: PathKind, speed: float) -> None:
        """Add an edge, or its bandwidth in GB/s to one of the same kind."""
        edges = self._edges[source]
        same = (i for i, e in enumerate(edges) if (e.target, e.kind) == (target, kind))
        place = next(same, len(edges))
        before = edges.pop(place).gb_per_s if place < len(edges) else 0.0
        # Sums of equal links must be equal, whatever the order of the links.
        edge = Edge(target, kind, round(before + speed, 6))
        while place > 0 and edges[place - 1].gb_per_s < edge.gb_per_s:
            place -= 1
        edges.insert(place, edge)

    def join(self, one: str, other: str, kind: PathKind, speed: float) -> None:
        """Connect two vertices both ways, each with this bandwidth in GB/s."""
        self.connect(one, other, kind, speed)
        self.connect(other, one, kind, speed)

    def hang(self, name: str, above: str, speed: float) -> None:
        """Join a vertex by PCI to the one above it, where there is one."""
        if above not in self._kinds:
            return
        ends = {self._kinds[name], self._kinds[above]}
        kind = PathKind.PIX
        if VertexKind.CPU in ends:
            kind = PathKind.PHB
        elif ends == {VertexKind.PCI}:
            kind = PathKind.PXB
        self._above[name] = above
        self.join(name, above, kind, speed)

    def doubt(self, one: str, other: str) -> None:
        """Note that no source tells what joins two vertices carries."""
        self._untold.add(frozenset((one, other)))

    def finish(self, host: HostTopology, rules: NcclRules) -> Network:
        """Return the network."""
        vertices = {n: Vertex(n, k, self._sorted(n)) for n, k in self._kinds.items()}
        return Network(host, rules, vertices, frozenset(self._untold))

    def _sorted(self, name: str) -> tuple[Edge, ...]:
        """Return a vertex's edges with the first one to the vertex above it last."""
        edges = self._edges[name]
        above = self._above.get(name)
        place = next((i for i, e in enumerate(edges) if e.target == above), None)
        if place is not None:
            edges = [*edges[:place], *edges[place + 1 :], edges[place]]
        return tuple(edges)
