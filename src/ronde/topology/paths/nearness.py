"""Which processor, adapter and GPU NCCL takes for the near one."""

from collections.abc import Mapping, Sequence

from ronde.topology.graph import GpuDevice
from ronde.topology.paths.path import Path
from ronde.topology.paths.rules import NcclRules

Table = Mapping[tuple[str, str], Path]
"""Paths by the names of their ends."""


def find_nearest(table: Table, source: str, targets: Sequence[str]) -> tuple[str, ...]:
    """Return the targets with the most bandwidth, and of these the nearest kind.

    All that are equal, in the order given; those without a path never.

    Source: ``ncclTopoGetLocal`` of NCCL's src/graph/topo.cc.
    """
    found = {name: table.get((source, name)) for name in targets}
    marks = {n: (-p.gb_per_s, p.kind.rank) for n, p in found.items() if p}
    best = min(marks.values(), default=None)
    return tuple(name for name, mark in marks.items() if mark == best)


def find_near_processor(table: Table, gpu: str, processors: Sequence[str]) -> str:
    """Return the processor near a GPU, of equal ones that of fewest hops, or ``""``."""
    near = find_nearest(table, gpu, processors)
    return min(near, key=lambda name: table[gpu, name].num_hops, default="")


def find_own_ports(
    table: Table,
    gpu: GpuDevice,
    ends: tuple[Sequence[str], Sequence[str]],
    rules: NcclRules,
) -> tuple[str, ...]:
    """Return the ports that a GPU uses, its channels in turn.

    GPUs that are equally near to some ports share them out by their numbers.

    Args:
        table: Paths.
        gpu: Of the host.
        ends: Names of all GPUs, and of all ports.
        rules: Of which release.

    Source: ``ncclTopoGetLocalNet`` of NCCL's src/graph/topo.cc.
    """
    gpus, ports = ends
    near = find_nearest(table, gpu.name, ports)
    sharing = find_nearest(table, near[0], gpus) if near else ()
    if not sharing:
        return near
    place = gpu.number % len(sharing) if rules.shares_by_near_gpus else gpu.number
    if len(near) & (len(near) - 1) == 0:
        place = _mirror(place, len(near))
    num_own = -(-len(near) // len(sharing))
    return tuple(near[(place + i) % len(near)] for i in range(num_own))


def find_own_gpu(
    table: Table,
    port: str,
    gpus: Sequence[GpuDevice],
    ports: Sequence[str],
    rules: NcclRules,
) -> str:
    """Return the GPU near a port that uses it first, or ``""``.

    Source: ``ncclTopoGetLocalGpu`` of NCCL's src/graph/topo.cc.
    """
    names = tuple(each.name for each in gpus)
    near = find_nearest(table, port, names)
    own = [
        (place, order, gpu.name)
        for order, gpu in enumerate(gpus)
        if gpu.name in near
        for place, name in enumerate(find_own_ports(table, gpu, (names, ports), rules))
        if name == port
    ]
    return min(own)[2] if own else ""


def _mirror(value: int, power: int) -> int:
    """Return a number with its bits below a power of two in reverse order."""
    num_bits = power.bit_length() - 1
    return sum(1 << (num_bits - 1 - bit) for bit in range(num_bits) if value >> bit & 1)
