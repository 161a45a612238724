"""The paths that NCCL uses: those of the hardware, with detours where it wants them.

Peers whose path leads too far exchange by the processor's memory. An adapter too far
for GPUDirect RDMA is reached by the processor, or through another GPU that is near it
(PXN).

Source: ``ncclTopoComputePaths`` of NCCL's src/graph/paths.cc and what it calls. RCCL's
own exceptions are not followed.
"""

from typing import TypeVar

from ronde.topology.graph import UNKNOWN, GpuDevice, NetPort, NumaNode
from ronde.topology.paths.nearness import (
    find_near_processor,
    find_nearest,
    find_own_gpu,
)
from ronde.topology.paths.network import Network, VertexKind
from ronde.topology.paths.path import Path, PathKind
from ronde.topology.paths.search import Paths
from ronde.topology.paths.transports import AS_IT_LIKES, Transports

_T = TypeVar("_T", GpuDevice, NetPort)


def default_peer_level(network: Network) -> PathKind:
    """Return the farthest path by which GPUs reach one another, if nobody says.

    Farther ones exchange by the processor's memory. The first processor decides.
    """
    known = {each.name: each for each in network.host.numa_nodes}
    first = next(iter(network.named(VertexKind.CPU)), "")
    node = known.get(first, NumaNode(UNKNOWN))
    vendor = node.vendor.strip() if node.arch == "x86_64" else node.arch
    if network.rules.avoids_sockets:
        is_small = vendor == "AuthenticAMD" and len(network.named(VertexKind.GPU)) <= 2
        return PathKind.SYS if is_small else PathKind.PXB
    is_far = vendor in ("GenuineIntel", "CentaurHauls", "Shanghai", "arm64")
    return PathKind.PXB if is_far else PathKind.SYS


def add_detours(paths: Paths, transports: Transports = AS_IT_LIKES) -> Paths:
    """Return the paths that NCCL uses over those of the hardware."""
    detours = _Detours(paths, transports)
    detours.part_peers()
    detours.bring_ports_near()
    for port in detours.ports:
        for gpu in detours.gpus:
            detours.relay(gpu, port)
            detours.avoid_far_reads(gpu, port)
    return Paths(paths.network, detours.table)


class _Detours:
    """A table of paths in the making; later steps see what earlier ones did."""

    def __init__(self, paths: Paths, transports: Transports) -> None:
        network = paths.network
        self.table = dict(paths.table)
        self.gpus = _by_vertex(network.host.gpus, network.named(VertexKind.GPU))
        self.ports = _by_vertex(network.host.ports, network.named(VertexKind.NET))
        self._transports = transports
        self._rules = network.rules
        self._processors = network.named(VertexKind.CPU)
        self._relays: dict[tuple[str, str], GpuDevice] = {}
        self._default_level = default_peer_level(network)

    def part_peers(self) -> None:
        level = self._transports.peer_level or self._default_level
        for target in self.gpus:
            processor = self._processor(target)
            for source in self.gpus:
                path = self.table.get((source.name, target.name))
                if path is None or path.kind > level:
                    self._lead_through(source.name, processor, target.name)

    def bring_ports_near(self) -> None:
        """Make C2C and PCI from the same processor a kind of its own."""
        if not self._rules.has_p2c:
            return
        names = tuple(each.name for each in self.ports)
        for gpu in self.gpus:
            processor = self._processor(gpu)
            for port in find_nearest(self.table, gpu.name, names):
                one = self.table.get((gpu.name, processor))
                other = self.table.get((port, processor))
                if one and other and _merge(one, other) == PathKind.P2C:
                    self._bring_near(gpu.name, port)
                    self._bring_near(port, gpu.name)

    def relay(self, gpu: GpuDevice, port: NetPort) -> None:
        """Let the GPU that is near a port pass on what another sends."""
        if not self._transports.has_relays:
            return
        names = tuple(each.name for each in self.ports)
        near = find_own_gpu(self.table, port.name, self.gpus, names, self._rules)
        peer = next((each for each in self.gpus if each.name == near), gpu)
        if peer is gpu or not self._gains_by(peer, gpu, port):
            return
        self._lead_through(gpu.name, near, port.name)
        path = self.table[gpu.name, port.name]
        self.table[gpu.name, port.name] = path._replace(kind=PathKind.PXN)
        self._relays[gpu.name, port.name] = peer

    def avoid_far_reads(self, gpu: GpuDevice, port: NetPort) -> None:
        """Lead through the processor what GPUDirect RDMA does not carry."""
        own = self.table.get((gpu.name, port.name))
        if own and own.kind < PathKind.PHB and not self._has_gdr(gpu, port):
            processor = self._processor(gpu)
            self._lead_through(port.name, processor, gpu.name)
            self._lead_through(gpu.name, processor, port.name)

    def _gains_by(self, peer: GpuDevice, gpu: GpuDevice, port: NetPort) -> bool:
        """Return whether a GPU reaches a port better through a peer than by itself."""
        by_peer = self.table.get((peer.name, port.name))
        to_peer = self.table.get((peer.name, gpu.name))
        own = self.table.get((gpu.name, port.name))
        is_c2c = self._rules.has_p2c and self._transports.relays_over_c2c
        limit = PathKind.P2C if is_c2c else PathKind.PXB
        if self._rules.relays_need_gdr and not self._has_gdr(peer, port):
            return False
        if not by_peer or not to_peer:
            return False
        if by_peer.kind > limit or to_peer.kind > PathKind.NVL:
            return False
        if own is None or own.kind > PathKind.PXN:
            return True
        return own.gb_per_s < by_peer.gb_per_s

    def _has_gdr(self, gpu: GpuDevice, port: NetPort) -> bool:
        """Return whether a port reaches a GPU's memory; what is not told is so."""
        if 0 in (gpu.gdr, port.gdr):
            return False
        level = self._transports.gdr_level
        if level is None:
            is_c2c = self._rules.has_p2c and self._transports.has_gdr_over_c2c
            level = PathKind.P2C if is_c2c else PathKind.PXB
        holder = self._relays.get((gpu.name, port.name), gpu)
        path = self.table.get((holder.name, port.name))
        return path is not None and path.kind <= level

    def _processor(self, gpu: GpuDevice) -> str:
        return find_near_processor(self.table, gpu.name, self._processors)

    def _lead_through(self, source: str, middle: str, target: str) -> None:
        one = self.table.get((source, middle))
        other = self.table.get((middle, target))
        if one and other:
            self.table[source, target] = Path(
                _merge(one, other),
                min(one.gb_per_s, other.gb_per_s),
                one.num_hops + other.num_hops,
                one.route + other.route[1:],
            )

    def _bring_near(self, source: str, target: str) -> None:
        path = self.table[source, target]
        kind = min(PathKind.P2C, path.kind)
        self.table[source, target] = path._replace(kind=kind)


def _merge(one: Path, other: Path) -> PathKind:
    """Return the kind of two paths, one after the other."""
    near, far = sorted((one.kind, other.kind))
    return PathKind.P2C if (near, far) == (PathKind.C2C, PathKind.PHB) else far


def _by_vertex(devices: tuple[_T, ...], names: tuple[str, ...]) -> tuple[_T, ...]:
    by_name = {each.name: each for each in reversed(devices)}
    return tuple(by_name[name] for name in names)
