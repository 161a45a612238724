"""The way that NCCL finds between any two elements of a host."""

from collections.abc import Iterator
from typing import NamedTuple

from ronde.topology.graph import HostTopology
from ronde.topology.paths.network import (
    Edge,
    Path,
    PathKind,
    PathNetwork,
    VertexKind,
    build_network,
)
from ronde.topology.paths.speeds import LATEST, LOCAL_GB_PER_S, NcclRelease

_ENDS = (
    VertexKind.CPU,
    VertexKind.DEV,
    VertexKind.GPU,
    VertexKind.NET,
    VertexKind.NVS,
)
_KINDS = tuple(PathKind)
# nvidia-smi's words on PCI.
_KINDS_OF_WORDS = {kind: PathKind(kind) for kind in ("PIX", "PXB", "PHB", "SYS")}
_KINDS_OF_WORDS["NODE"] = PathKind.PHB


class Paths(NamedTuple):
    """The paths of a host."""

    network: PathNetwork  # What they lead through.
    table: dict[tuple[str, str], Path]  # By the names of source and target.

    def between(self, source: str, target: str) -> Path | None:
        """Return the path from an element to another, by their names; none without one.

        Paths lead to GPUs, ports, NUMA nodes and the NVLink switches, from anywhere.
        """
        return self.table.get((source, target))

    def is_known(self, path: Path) -> bool:
        """Return whether a path's bandwidth is NCCL's, and no guess of ours.

        It is a guess where no source has the chip that NVLinks leave, or anything of
        the PCI device of a GPU or adapter.
        """
        steps = zip(path.route, path.route[1:], strict=False)
        return not any(frozenset(step) in self.network.guessed for step in steps)


def find_paths(host: HostTopology, release: NcclRelease = LATEST) -> Paths:
    """Return the paths by the hardware alone.

    What NCCL then makes of them is ``detours.add_detours``.

    Source: ``ncclTopoSetPaths`` of NCCL's src/graph/paths.cc. As there, bandwidth is
    that of the direction from target to source: it differs only where the two
    directions of a link do.
    """
    network = build_network(host, release)
    table: dict[tuple[str, str], Path] = {}
    search = _Search(network)
    for kind in _ENDS:
        for target in network.named(kind):
            for source, path in search.run(target).items():
                table[source, target] = path
    devices = {each.bus_id for each in host.devices}
    for relation in host.relations:
        # A source's word on a pair counts where no PCI tree has more.
        word = _KINDS_OF_WORDS.get(relation.path)
        pair = (relation.source, relation.target)
        for ends in (pair, (pair[1], pair[0])):
            path = table.get(ends)
            if word and path and devices.isdisjoint(path.route):
                table[ends] = path._replace(kind=word)
    return Paths(network, table)


class _Step(NamedTuple):
    """An edge as the search wants it."""

    target: str  # Name of the vertex it leads to.
    rank: int  # Of its kind.
    gb_per_s: float  # What it carries.
    is_end: bool  # Whether it leads into a GPU, from which nothing leads on.
    is_peer: bool  # Whether it is NVLink from a GPU's links to another's.


class _Found(NamedTuple):
    """A path from a vertex to the target; its route is linked to be shared."""

    rank: int
    gb_per_s: float
    num_hops: int
    vertex: str
    rest: "_Found | None"

    def to_path(self) -> Path:
        names: list[str] = []
        each: _Found | None = self
        while each:
            names.append(each.vertex)
            each = each.rest
        return Path(_KINDS[self.rank], self.gb_per_s, self.num_hops, tuple(names))


class _Search:
    """Breadth-first, from a target to all that lead to it."""

    def __init__(self, network: PathNetwork) -> None:
        self._network = network
        self._is_2_30 = network.release is NcclRelease.V2_30
        self._holder_kind = VertexKind.DEV if self._is_2_30 else VertexKind.GPU
        self._holders = set(network.named(self._holder_kind))
        self._steps = {
            name: [
                self._make_step(edge)
                for edge in vertex.edges
                # NCCL gives up where a link is listed in one direction alone.
                if network.vertices[edge.target].edge_to(name, edge.kind)
            ]
            for name, vertex in network.vertices.items()
        }

    def run(self, target: str) -> dict[str, Path]:
        """Return the path of each vertex to a target."""
        found = {target: _Found(0, LOCAL_GB_PER_S, 0, target, None)}
        wave = [target]
        while wave:
            after: dict[str, None] = {}
            for name in wave:
                after |= dict.fromkeys(self._expand(found, name, target))
            wave = list(after)
        return {name: each.to_path() for name, each in found.items()}

    def _make_step(self, edge: Edge) -> _Step:
        kind = self._network.vertices[edge.target].kind
        return _Step(
            edge.target,
            edge.kind.rank,
            edge.gb_per_s,
            is_end=edge.kind == PathKind.LOC and kind == VertexKind.GPU,
            is_peer=edge.kind == PathKind.NVL and kind == self._holder_kind,
        )

    def _expand(
        self, found: dict[str, _Found], name: str, target: str
    ) -> Iterator[str]:
        """Take all steps from a vertex; yield where they lead to by a better path."""
        path = found[name]
        start = f"dev/{target}" if f"dev/{target}" in self._holders else target
        # Through a GPU a path leads but by NVLink, from the target's own to another's.
        passes_gpu = name in self._holders and name != start
        is_next = path.num_hops <= (1 if start == target else 2)
        for step in self._steps[name]:
            if passes_gpu and not step.is_end and not (step.is_peer and is_next):
                continue
            rank = max(path.rank, step.rank)
            if passes_gpu and path.rank == step.rank == PathKind.NVL.rank:
                rank = PathKind.NVB.rank
            speed = min(path.gb_per_s, step.gb_per_s)
            new = _Found(rank, speed, path.num_hops + 1, step.target, path)
            if self._is_better(new, found.get(step.target)):
                found[step.target] = new
                yield step.target

    def _is_better(self, new: _Found, old: _Found | None) -> bool:
        if old is None:
            return new.gb_per_s > 0
        if not self._is_2_30:
            return old.num_hops >= new.num_hops and old.gb_per_s < new.gb_per_s
        # A nearer kind replaces what was found in fewer hops.
        if new.rank != old.rank:
            return new.rank < old.rank
        if new.gb_per_s != old.gb_per_s:
            return new.gb_per_s > old.gb_per_s
        return new.num_hops < old.num_hops
