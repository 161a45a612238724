"""A host's graph, read from anything, as what ranks have to share."""

from collections.abc import Sequence
from typing import NamedTuple

from ronde.topology.graph import UNKNOWN, GpuDevice, HostTopology, NetPort, NumaNode
from ronde.topology.machine import UNKNOWN_NODE, Core
from ronde.topology.paths.pci_tree import adapter_name, find_numa_numbers
from ronde.topology.pci import bus_order
from ronde.topology.placement.machine_supply import nodes_of_cores
from ronde.topology.placement.nearness import find_nearness, training_ports
from ronde.topology.placement.supply import Device, Supply, plain_distances
from ronde.topology.placement.told_cores import told_cores

_UNTOLD_DISTANCE = 255
_LOCAL_DISTANCE = 10
_AMD = 0x1002


class HostSupply(NamedTuple):
    """What a host has for ranks, and what that is in its graph.

    Attributes:
        supply: What there is.
        gpus: The GPUs, in the supply's order.
        ports: The adapters, in the supply's order.
        notices: What is not told, a sentence each.
    """

    supply: Supply
    gpus: tuple[GpuDevice, ...]
    ports: tuple[NetPort, ...]
    notices: tuple[str, ...]


def supply_of_host(
    host: HostTopology, allowed: Sequence[Core] | None = None
) -> HostSupply:
    """Return what a host has for ranks.

    GPUs are in the order of their bus addresses, as CUDA counts them where it is told
    to. AMD's are in the source's, for HIP cannot be told; so are all where one has no
    address.

    Args:
        host: As any source tells.
        allowed: Cores that may be used, with their nodes; None for all of the graph.
    """
    numbered, ports = _gpus_of(host), training_ports(host)
    gpus = tuple(gpu for _, gpu in numbered)
    numbers = find_numa_numbers(host)
    cores, notices = told_cores(host) if allowed is None else (allowed, ())
    told = {node.number: node for node in host.numa_nodes}
    nodes = tuple(
        node._replace(
            memory_bytes=told[node.number].memory_bytes,
            free_bytes=told[node.number].free_bytes,
        )
        if node.number in told
        else node
        for node in nodes_of_cores(cores)
    )
    # Near a node without CPUs there is no place for a rank.
    bare = {node.number for node in host.numa_nodes if not node.cpus}
    supply = Supply(
        nodes,
        _distances([told.get(node.number) for node in nodes]),
        tuple(
            Device(str(number), _near(numbers.get(gpu.name, gpu.node), bare))
            for number, gpu in numbered
        ),
        tuple(
            Device(port.title, _near(numbers.get(adapter_name(port), port.node), bare))
            for port in ports
        ),
        find_nearness(host, gpus, ports),
        host.name,
    )
    if not cores:
        notices = (*notices, "No source tells the CPUs, so that ranks get none.")
    return HostSupply(supply, gpus, ports, notices)


def is_amd(host: HostTopology, gpu: GpuDevice) -> bool:
    """Return whether a GPU is one of AMD's, as far as the source tells."""
    vendors = (each.vendor for each in host.devices if each.bus_id == gpu.bus_id)
    return bool(gpu.gcn) or _AMD in vendors


def _gpus_of(host: HostTopology) -> tuple[tuple[int, GpuDevice], ...]:
    """Return the GPUs by the number under which a program can ask for them."""
    in_bus_order = all(gpu.bus_id and not is_amd(host, gpu) for gpu in host.gpus)
    if in_bus_order:
        ordered = sorted(host.gpus, key=lambda gpu: bus_order(gpu.bus_id))
        return tuple(enumerate(ordered))
    ordered = sorted(host.gpus, key=lambda gpu: gpu.number)
    return tuple((gpu.number, gpu) for gpu in ordered)


def _near(number: int, bare: set[int]) -> int:
    return UNKNOWN_NODE if number in bare else number


def _distances(nodes: Sequence[NumaNode | None]) -> tuple[tuple[int, ...], ...]:
    told = [dict(node.distances) if node else {} for node in nodes]
    if not any(told):
        return plain_distances(len(nodes))
    numbers = [node.number if node else UNKNOWN for node in nodes]
    return tuple(
        tuple(
            row.get(number, _LOCAL_DISTANCE if here == there else _UNTOLD_DISTANCE)
            for there, number in enumerate(numbers)
        )
        for here, row in enumerate(told)
    )
