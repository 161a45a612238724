"""The paths that NCCL uses: those of the hardware, with detours where it wants them.

Peers whose path leads too far exchange by the processor's memory. An adapter too far
for GPUDirect RDMA is reached by the processor, or through another GPU that is near it
(PXN).

Source: ``ncclTopoComputePaths`` of NCCL's src/graph/paths.cc and what it calls, most of
it in src/graph/topo.cc. RCCL's own exceptions are not followed.
"""

from collections.abc import Mapping, Sequence

from ronde.errors import UsageError
from ronde.topology.graph import UNKNOWN, GpuDevice, NetPort, NumaNode
from ronde.topology.paths.network import Path, PathKind, PathNetwork, Paths, VertexKind
from ronde.topology.paths.speeds import NcclRelease

# What a number means where a level is asked for, since before levels had names.
_OLD_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")
_LEVELS = ("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL")
_SWITCHES = ("NCCL_P2P_DISABLE", "NCCL_PXN_DISABLE", "NCCL_NET_GDR_C2C", "NCCL_PXN_C2C")


def parse_level(text: str) -> PathKind:
    """Return what NCCL reads in ``NCCL_P2P_LEVEL``: ``PIX``, or a number from 0."""
    if text.isascii() and text.isdigit():
        return PathKind(_OLD_LEVELS[min(int(text[:9]), len(_OLD_LEVELS) - 1)])
    names = [kind for kind in PathKind if kind <= PathKind.SYS]
    if text in names:
        return PathKind(text)
    raise UsageError(
        f"level must be one of {', '.join(names)} or a number from 0 to 5, got "
        f"{text!r}. Leave it out for NCCL's own choice."
    )


def _require_settings(settings: Mapping[str, str]) -> None:
    for name, text in settings.items():
        if name not in (*_LEVELS, *_SWITCHES):
            raise UsageError(
                f"NCCL's settings must be of {', '.join((*_LEVELS, *_SWITCHES))}, got "
                f"{name}. The others change no path; leave it out."
            )
        if name in _SWITCHES and text not in ("0", "1"):
            raise UsageError(f"{name} must be 0 or 1, got {text!r}. Give one of them.")


def find_nearest(
    table: Mapping[tuple[str, str], Path], source: str, targets: Sequence[str]
) -> tuple[str, ...]:
    """Return targets of most bandwidth, of these the nearest (``ncclTopoGetLocal``)."""
    found = {name: table.get((source, name)) for name in targets}
    marks = {n: (-p.gb_per_s, p.kind.rank) for n, p in found.items() if p}
    best = min(marks.values(), default=None)
    return tuple(name for name, mark in marks.items() if mark == best)


def default_peer_level(network: PathNetwork) -> PathKind:
    """Return NCCL's choice of the farthest path by which GPUs reach one another."""
    # Only on small AMD hosts, by the first processor, do they reach through processors.
    known = {each.name: each for each in network.host.numa_nodes}
    first = next(iter(network.named(VertexKind.CPU)), "")
    node = known.get(first, NumaNode(UNKNOWN))
    is_amd = node.arch == "x86_64" and node.vendor.strip() == "AuthenticAMD"
    is_small = is_amd and len(network.named(VertexKind.GPU)) <= 2
    return PathKind.SYS if is_small else PathKind.PXB


def add_detours(paths: Paths, settings: Mapping[str, str] | None = None) -> Paths:
    """Return the paths that NCCL uses, with some of its variables set."""
    detours = Detours(paths, settings or {})
    detours.part_peers()
    detours.bring_ports_near()
    for port in detours.ports:
        for gpu in detours.gpus:
            detours.relay(gpu, port)
            detours.avoid_far_reads(gpu, port)
    return Paths(paths.network, detours.table)


class Detours:
    """A table of paths in the making; later steps see what earlier ones did."""

    def __init__(self, paths: Paths, settings: Mapping[str, str]) -> None:
        _require_settings(settings)
        network = paths.network
        self.table = dict(paths.table)
        gpus = {each.name: each for each in reversed(network.host.gpus)}
        ports = {each.name: each for each in reversed(network.host.ports)}
        self._port_names = network.named(VertexKind.NET)
        self.gpus = tuple(gpus[name] for name in network.named(VertexKind.GPU))
        self.ports = tuple(ports[name] for name in self._port_names)
        self._release = network.release
        self._processors = network.named(VertexKind.CPU)
        self._relays: dict[tuple[str, str], GpuDevice] = {}
        levels = {n: parse_level(v) for n, v in settings.items() if n in _LEVELS}
        # Farthest path by which GPUs reach one another.
        self._peer_level = levels.get("NCCL_P2P_LEVEL", default_peer_level(network))
        if settings.get("NCCL_P2P_DISABLE") == "1":
            self._peer_level = PathKind.LOC
        # Farthest path of GPUDirect RDMA, and of a GPU that passes on to adapters.
        far = {"0": PathKind.PXB}
        by_c2c = far.get(settings.get("NCCL_NET_GDR_C2C", ""), PathKind.P2C)
        self._gdr_level = levels.get("NCCL_NET_GDR_LEVEL", by_c2c)
        self._relay_level = far.get(settings.get("NCCL_PXN_C2C", ""), PathKind.P2C)
        self._has_relays = settings.get("NCCL_PXN_DISABLE") != "1"

    def part_peers(self) -> None:
        for target in self.gpus:
            processor = self._processor(target)
            for source in self.gpus:
                path = self.table.get((source.name, target.name))
                if path is None or path.kind > self._peer_level:
                    self._lead_through(source.name, processor, target.name)

    def bring_ports_near(self) -> None:
        """Make C2C and PCI from the same processor a kind of its own."""
        for gpu in self.gpus:
            processor = self._processor(gpu)
            for port in find_nearest(self.table, gpu.name, self._port_names):
                one = self.table.get((gpu.name, processor))
                other = self.table.get((port, processor))
                if one and other and _merge(one, other) == PathKind.P2C:
                    for ends in ((gpu.name, port), (port, gpu.name)):
                        path = self.table[ends]
                        kind = min(PathKind.P2C, path.kind)
                        self.table[ends] = path._replace(kind=kind)

    def relay(self, gpu: GpuDevice, port: NetPort) -> None:
        """Let the GPU that is near a port pass on what another sends."""
        peer = self.find_own_gpu(port.name)
        if not peer or peer is gpu or not self._has_relays:
            return
        if self._gains_by(peer, gpu, port):
            self._lead_through(gpu.name, peer.name, port.name)
            path = self.table[gpu.name, port.name]
            self.table[gpu.name, port.name] = path._replace(kind=PathKind.PXN)
            self._relays[gpu.name, port.name] = peer

    def avoid_far_reads(self, gpu: GpuDevice, port: NetPort) -> None:
        own = self.table.get((gpu.name, port.name))
        if own and own.kind < PathKind.PHB and not self._has_gdr(gpu, port):
            processor = self._processor(gpu)
            self._lead_through(port.name, processor, gpu.name)
            self._lead_through(gpu.name, processor, port.name)

    def find_own_ports(self, gpu: GpuDevice) -> tuple[str, ...]:
        """Return the ports that a GPU uses in turn (``ncclTopoGetLocalNet``)."""
        near = find_nearest(self.table, gpu.name, self._port_names)
        names = [each.name for each in self.gpus]
        sharing = find_nearest(self.table, near[0], names) if near else ()
        if not sharing:
            return near
        # GPUs that are equally near to some ports share them out by their numbers; from
        # 2.30 on by the place among the near GPUs.
        is_2_29 = self._release is NcclRelease.V2_29
        place = gpu.number if is_2_29 else gpu.number % len(sharing)
        num_bits = len(near).bit_length() - 1
        if len(near) == 1 << num_bits:
            # The place with its bits below a power of two in reverse order.
            bits = range(num_bits)
            place = sum((place >> bit & 1) << (num_bits - 1 - bit) for bit in bits)
        num_own = -(-len(near) // len(sharing))
        return tuple(near[(place + i) % len(near)] for i in range(num_own))

    def find_own_gpu(self, port: str) -> GpuDevice | None:
        """Return the GPU near a port that uses it first (``ncclTopoGetLocalGpu``)."""
        near = find_nearest(self.table, port, [each.name for each in self.gpus])
        own = [
            (ports.index(port), order)
            for order, gpu in enumerate(self.gpus)
            if gpu.name in near and port in (ports := self.find_own_ports(gpu))
        ]
        return self.gpus[min(own)[1]] if own else None

    def _gains_by(self, peer: GpuDevice, gpu: GpuDevice, port: NetPort) -> bool:
        """Return whether a GPU reaches a port better through a peer than by itself."""
        by_peer = self.table.get((peer.name, port.name))
        to_peer = self.table.get((peer.name, gpu.name))
        own = self.table.get((gpu.name, port.name))
        needs_gdr = self._release is NcclRelease.V2_30
        if not by_peer or not to_peer or (needs_gdr and not self._has_gdr(peer, port)):
            return False
        if by_peer.kind > self._relay_level or to_peer.kind > PathKind.NVL:
            return False
        if own is None or own.kind > PathKind.PXN:
            return True
        return own.gb_per_s < by_peer.gb_per_s

    def _has_gdr(self, gpu: GpuDevice, port: NetPort) -> bool:
        """Return whether a port reaches a GPU's memory; if unknown, it does."""
        holder = self._relays.get((gpu.name, port.name), gpu)
        path = self.table.get((holder.name, port.name))
        is_near = path is not None and path.kind <= self._gdr_level
        return is_near and 0 not in (gpu.gdr, port.gdr)

    def _processor(self, gpu: GpuDevice) -> str:
        """Return the processor near a GPU, of equal ones that of fewest hops."""
        near = find_nearest(self.table, gpu.name, self._processors)
        return min(near, key=lambda n: self.table[gpu.name, n].num_hops, default="")

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


def _merge(one: Path, other: Path) -> PathKind:
    near, far = sorted((one.kind, other.kind))
    return PathKind.P2C if (near, far) == (PathKind.C2C, PathKind.PHB) else far
