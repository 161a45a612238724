"""The paths that NCCL uses: those of the hardware, with detours where it wants them.

Peers whose path leads too far exchange by the processor's memory. An adapter too far
for GPUDirect RDMA is reached by the processor, or through another GPU that is near it
(PXN).

Source: ``ncclTopoComputePaths`` of NCCL's src/graph/paths.cc and what it calls. RCCL's
own exceptions are not followed.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.topology.graph import UNKNOWN, GpuDevice, NetPort, NumaNode
from ronde.topology.paths.network import Path, PathKind, PathNetwork, Paths, VertexKind
from ronde.topology.paths.speeds import NcclRelease

PathTable = Mapping[tuple[str, str], Path]
"""Paths by the names of their ends."""

# What a number means where a level is asked for, since before levels had names.
_OLD_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")
_LEVELS = _PEERS, _DIRECT = "NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL"
_NO_PEERS = "NCCL_P2P_DISABLE"
_SWITCHES = (_NO_PEERS, "NCCL_PXN_DISABLE", "NCCL_NET_GDR_C2C", "NCCL_PXN_C2C")


class Transports(NamedTuple):
    """NCCL's settings on its transports."""

    # Farthest path by which GPUs reach one another (``NCCL_P2P_LEVEL``; ``LOC`` for
    # ``NCCL_P2P_DISABLE=1``); none for NCCL's own choice.
    peer_level: PathKind | None = None
    gdr_level: PathKind | None = None  # For GPUDirect RDMA (``NCCL_NET_GDR_LEVEL``).
    has_relays: bool = True  # GPUs pass on to adapters (``NCCL_PXN_DISABLE=0``).
    # Whether C2C and PCI together are near enough for GPUDirect RDMA
    # (``NCCL_NET_GDR_C2C=1``), and for passing on (``NCCL_PXN_C2C=1``).
    has_gdr_over_c2c: bool = True
    relays_over_c2c: bool = True


DEFAULT_TRANSPORTS = Transports()


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


def read_transports(settings: Mapping[str, str]) -> Transports:
    """Return NCCL's settings from its variables; refuse those that change no path."""
    for name, text in settings.items():
        if name not in (*_LEVELS, *_SWITCHES):
            raise UsageError(
                f"NCCL's settings must be of {', '.join((*_LEVELS, *_SWITCHES))}, got "
                f"{name}. The others change no path; leave it out."
            )
        if name in _SWITCHES and text not in ("0", "1"):
            raise UsageError(f"{name} must be 0 or 1, got {text!r}. Give one of them.")
    levels = {n: parse_level(v) for n, v in settings.items() if n in _LEVELS}
    if settings.get(_NO_PEERS) == "1":
        levels[_PEERS] = PathKind.LOC
    return Transports(
        peer_level=levels.get(_PEERS),
        gdr_level=levels.get(_DIRECT),
        has_relays=settings.get("NCCL_PXN_DISABLE") != "1",
        has_gdr_over_c2c=settings.get("NCCL_NET_GDR_C2C") != "0",
        relays_over_c2c=settings.get("NCCL_PXN_C2C") != "0",
    )


def find_nearest(
    table: PathTable, source: str, targets: Sequence[str]
) -> tuple[str, ...]:
    """Return the targets with the most bandwidth, and of these the nearest kind.

    Source: ``ncclTopoGetLocal`` of NCCL's src/graph/topo.cc.
    """
    found = {name: table.get((source, name)) for name in targets}
    marks = {n: (-p.gb_per_s, p.kind.rank) for n, p in found.items() if p}
    best = min(marks.values(), default=None)
    return tuple(name for name, mark in marks.items() if mark == best)


def find_own_ports(
    table: PathTable,
    gpu: GpuDevice,
    ends: tuple[Sequence[str], Sequence[str]],
    release: NcclRelease,
) -> tuple[str, ...]:
    """Return the ports that a GPU uses, its channels in turn.

    GPUs that are equally near to some ports share them out by their numbers. ``ends``
    are the names of all GPUs, and of all ports.

    Source: ``ncclTopoGetLocalNet`` of NCCL's src/graph/topo.cc.
    """
    gpus, ports = ends
    near = find_nearest(table, gpu.name, ports)
    sharing = find_nearest(table, near[0], gpus) if near else ()
    if not sharing:
        return near
    # Since 2.30 by the place among the near GPUs.
    is_2_29 = release is NcclRelease.V2_29
    place = gpu.number if is_2_29 else gpu.number % len(sharing)
    num_bits = len(near).bit_length() - 1
    if len(near) == 1 << num_bits:
        # The place with its bits below a power of two in reverse order.
        place = sum(
            (place >> bit & 1) << (num_bits - 1 - bit) for bit in range(num_bits)
        )
    num_own = -(-len(near) // len(sharing))
    return tuple(near[(place + i) % len(near)] for i in range(num_own))


def find_own_gpu(
    table: PathTable,
    port: str,
    gpus: Sequence[GpuDevice],
    ports: Sequence[str],
    release: NcclRelease,
) -> str:
    """Return the GPU near a port that uses it first, or ``""``.

    Source: ``ncclTopoGetLocalGpu`` of NCCL's src/graph/topo.cc.
    """
    names = tuple(each.name for each in gpus)
    near = find_nearest(table, port, names)
    own = [
        (used.index(port), order, gpu.name)
        for order, gpu in enumerate(gpus)
        if gpu.name in near
        and port in (used := find_own_ports(table, gpu, (names, ports), release))
    ]
    return min(own)[2] if own else ""


def default_peer_level(network: PathNetwork) -> PathKind:
    """Return NCCL's choice of the farthest path by which GPUs reach one another.

    Only on small AMD hosts, by the first processor, do they reach through processors.
    """
    known = {each.name: each for each in network.host.numa_nodes}
    first = next(iter(network.named(VertexKind.CPU)), "")
    node = known.get(first, NumaNode(UNKNOWN))
    is_amd = node.arch == "x86_64" and node.vendor.strip() == "AuthenticAMD"
    is_small = is_amd and len(network.named(VertexKind.GPU)) <= 2
    return PathKind.SYS if is_small else PathKind.PXB


def add_detours(paths: Paths, transports: Transports = DEFAULT_TRANSPORTS) -> Paths:
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
        gpus = {each.name: each for each in reversed(network.host.gpus)}
        ports = {each.name: each for each in reversed(network.host.ports)}
        self._port_names = network.named(VertexKind.NET)
        self.gpus = tuple(gpus[name] for name in network.named(VertexKind.GPU))
        self.ports = tuple(ports[name] for name in self._port_names)
        self._transports = transports
        self._release = network.release
        self._processors = network.named(VertexKind.CPU)
        self._relays: dict[tuple[str, str], GpuDevice] = {}
        self._peer_level = transports.peer_level or default_peer_level(network)

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
        if not self._transports.has_relays:
            return
        ends = self.gpus, self._port_names
        near = find_own_gpu(self.table, port.name, *ends, self._release)
        peer = next((each for each in self.gpus if each.name == near), gpu)
        if peer is not gpu and self._gains_by(peer, gpu, port):
            self._lead_through(gpu.name, near, port.name)
            path = self.table[gpu.name, port.name]
            self.table[gpu.name, port.name] = path._replace(kind=PathKind.PXN)
            self._relays[gpu.name, port.name] = peer

    def avoid_far_reads(self, gpu: GpuDevice, port: NetPort) -> None:
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
        needs_gdr = self._release is NcclRelease.V2_30
        limit = PathKind.P2C if self._transports.relays_over_c2c else PathKind.PXB
        if not by_peer or not to_peer or (needs_gdr and not self._has_gdr(peer, port)):
            return False
        if by_peer.kind > limit or to_peer.kind > PathKind.NVL:
            return False
        if own is None or own.kind > PathKind.PXN:
            return True
        return own.gb_per_s < by_peer.gb_per_s

    def _has_gdr(self, gpu: GpuDevice, port: NetPort) -> bool:
        """Return whether a port reaches a GPU's memory; if unknown, it does."""
        level = self._transports.gdr_level
        if level is None:
            is_c2c = self._transports.has_gdr_over_c2c
            level = PathKind.P2C if is_c2c else PathKind.PXB
        holder = self._relays.get((gpu.name, port.name), gpu)
        path = self.table.get((holder.name, port.name))
        is_near = path is not None and path.kind <= level
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
