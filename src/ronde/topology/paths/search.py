"""The way that NCCL finds between any two elements of a host."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ronde.topology.graph import HostTopology, Relation
from ronde.topology.paths.building import build_network
from ronde.topology.paths.network import Edge, Network, Vertex, VertexKind
from ronde.topology.paths.path import Path, PathKind
from ronde.topology.paths.rules import LATEST, NcclRules
from ronde.topology.paths.speeds import LOCAL_GB_PER_S

ENDS = (
    VertexKind.CPU,
    VertexKind.DEV,
    VertexKind.GPU,
    VertexKind.NET,
    VertexKind.NVS,
)
"""What paths lead to."""

# nvidia-smi's, of those that tell of PCI.
_KINDS_OF_WORDS = {
    "PIX": PathKind.PIX,
    "PXB": PathKind.PXB,
    "PHB": PathKind.PHB,
    "NODE": PathKind.PHB,
    "SYS": PathKind.SYS,
}


@dataclass(frozen=True, slots=True)
class Paths:
    """The paths of a host.

    Attributes:
        network: What they lead through.
        table: By the names of source and target.
    """

    network: Network
    table: dict[tuple[str, str], Path]

    def between(self, source: str, target: str) -> Path | None:
        """Return the path from an element to another, by their names; none without one.

        Paths lead to GPUs, ports, NUMA nodes and the NVLink switches, from anywhere.
        """
        return self.table.get((source, target))


def find_paths(host: HostTopology, rules: NcclRules = LATEST) -> Paths:
    """Return the paths by the hardware alone.

    What NCCL then makes of them is ``transports.find_transport_paths``.

    Source: ``ncclTopoSetPaths`` of NCCL's src/graph/paths.cc. As there, bandwidth is
    that of the direction from target to source: it differs only where the two
    directions of a link do.
    """
    network = build_network(host, rules)
    table: dict[tuple[str, str], Path] = {}
    for kind in ENDS:
        for target in network.named(kind):
            for source, found in _Search(network, target).run().items():
                table[source, target] = found
    for relation in host.relations:
        _take_word(table, relation, {each.bus_id for each in host.devices})
    return Paths(network, table)


def _take_word(
    table: dict[tuple[str, str], Path], relation: Relation, devices: set[str]
) -> None:
    """Let a source's word on a pair count where no PCI tree tells more."""
    kind = _KINDS_OF_WORDS.get(relation.path)
    for ends in (
        (relation.source, relation.target),
        (relation.target, relation.source),
    ):
        path = table.get(ends)
        if kind and path and devices.isdisjoint(path.route):
            table[ends] = path._replace(kind=kind)


class _Found(NamedTuple):
    """A path from a vertex to the target; its route is linked to be shared."""

    kind: PathKind
    gb_per_s: float
    num_hops: int
    vertex: str
    rest: "_Found | None"

    def names(self) -> Iterator[str]:
        """Yield the names of its vertices, the target last."""
        each: _Found | None = self
        while each:
            yield each.vertex
            each = each.rest


class _Search:
    """Breadth-first, from a target to all that lead to it."""

    def __init__(self, network: Network, target: str) -> None:
        self._vertices = network.vertices
        self._rules = network.rules
        self._target = target
        self._is_gpu = network.vertices[target].kind == VertexKind.GPU
        # Where the target's own links begin, and how far from it.
        has_device = self._rules.has_device_vertex
        self._start = f"dev/{target}" if self._is_gpu and has_device else target
        self._start_hops = 1 if self._start != target else 0
        self._holders = VertexKind.DEV if has_device else VertexKind.GPU
        origin = _Found(PathKind.LOC, LOCAL_GB_PER_S, 0, target, None)
        self._found = {target: origin}

    def run(self) -> dict[str, Path]:
        """Return the path of each vertex to the target."""
        wave = [self._target]
        while wave:
            after: dict[str, None] = {}
            for name in wave:
                for edge in self._vertices[name].edges:
                    if self._relax(self._vertices[name], edge):
                        after[edge.target] = None
            wave = list(after)
        return {
            name: Path(each.kind, each.gb_per_s, each.num_hops, tuple(each.names()))
            for name, each in self._found.items()
        }

    def _relax(self, vertex: Vertex, edge: Edge) -> bool:
        """Return whether a step gave its end a path, or a better one."""
        path = self._found[vertex.name]
        other = self._vertices[edge.target]
        if not self._may_pass(vertex, other, edge, path.num_hops):
            return False
        if not _has_way_back(other, vertex, edge):
            return False
        kind = max(path.kind, edge.kind)
        if self._is_through_gpu(vertex, edge, path):
            kind = max(kind, PathKind.NVB)
        speed = min(path.gb_per_s, edge.gb_per_s)
        new = _Found(kind, speed, path.num_hops + 1, other.name, path)
        if not self._is_better(new, self._found.get(other.name)):
            return False
        self._found[other.name] = new
        return True

    def _may_pass(
        self, vertex: Vertex, other: Vertex, edge: Edge, num_hops: int
    ) -> bool:
        """Return whether a path may take a step: it passes GPUs by NVLink alone."""
        if vertex.kind != self._holders or vertex.name == self._start:
            return True
        if edge.kind == PathKind.LOC and other.kind == VertexKind.GPU:
            return True
        is_peer = edge.kind == PathKind.NVL and other.kind == self._holders
        return is_peer and num_hops <= self._start_hops + 1

    def _is_through_gpu(self, vertex: Vertex, edge: Edge, path: _Found) -> bool:
        is_nvlink = path.kind == edge.kind == PathKind.NVL
        is_beyond = path.num_hops >= self._start_hops + 1
        return vertex.kind == self._holders and is_nvlink and is_beyond

    def _is_better(self, new: _Found, old: _Found | None) -> bool:
        if old is None:
            return new.gb_per_s > 0
        if not self._rules.prefers_kind:
            return old.num_hops >= new.num_hops and old.gb_per_s < new.gb_per_s
        mark = (new.kind.rank, -new.gb_per_s, new.num_hops)
        return mark < (old.kind.rank, -old.gb_per_s, old.num_hops)


def _has_way_back(other: Vertex, vertex: Vertex, edge: Edge) -> bool:
    """Return whether a step can be made the other way; NCCL gives up without."""
    return other.edge_to(vertex.name, edge.kind) is not None
