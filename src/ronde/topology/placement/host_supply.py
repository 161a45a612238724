"""A host's graph, read from anything, as what ranks have to share."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ronde.topology.graph import UNKNOWN, GpuDevice, HostTopology, NetPort, NumaNode
from ronde.topology.machine import UNKNOWN_NODE, Core
from ronde.topology.paths.classes import UNTOLD, classify
from ronde.topology.paths.path import PathKind
from ronde.topology.paths.pci_tree import adapter_name, find_numa_numbers
from ronde.topology.paths.search import Paths, find_paths
from ronde.topology.pci import bus_order
from ronde.topology.placement.machine_supply import nodes_of_cores
from ronde.topology.placement.supply import Device, Nearness, Supply, plain_distances
from ronde.topology.placement.told_cores import told_cores

_UNTOLD_DISTANCE = 255
_LOCAL_DISTANCE = 10
# nvidia-smi's words that NCCL has not, as NCCL's.
_KINDS = {"NODE": PathKind.PHB, UNTOLD: PathKind.DIS}
_VERBS = ("mlx", "bnxt_re", "irdma", "ionic", "roce", "ibp")


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
    to; where one has no address, in the source's.

    Args:
        host: As any source tells.
        allowed: Cores that may be used, with their nodes; None for all of the graph.
    """
    gpus, ports = _gpus_of(host), training_ports(host)
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
            Device(str(n), _near(numbers.get(gpu.name, gpu.node), bare))
            for n, gpu in enumerate(gpus)
        ),
        tuple(
            Device(port.title, _near(numbers.get(adapter_name(port), port.node), bare))
            for port in ports
        ),
        _nearness(host, gpus, ports),
        host.name,
    )
    if not cores:
        notices = (*notices, "No source tells the CPUs, so that ranks get none.")
    return HostSupply(supply, gpus, ports, notices)


def training_ports(host: HostTopology) -> tuple[NetPort, ...]:
    """Return the ports to train over: the others serve storage or logins.

    Where RDMA adapters are, only those count, and of them only those of the rate that
    most have.
    """
    related = {name for each in host.relations for name in (each.source, each.target)}
    placed = [
        port
        for port in host.ports
        if port.is_up and (port.bus_id or port.node != UNKNOWN or port.name in related)
    ]
    adapters = [port for port in placed if _is_rdma(port)] or placed
    rates = Counter(port.mbit_per_s for port in adapters)
    usual = max(rates, key=lambda rate: (rates[rate], rate), default=0)
    return tuple(port for port in adapters if port.mbit_per_s == usual)


def is_verbs(port: NetPort) -> bool:
    """Return whether a port is one of those that NCCL's own InfiniBand code drives.

    Amazon's and Slingshot's adapters are reached through plugins, which have settings
    of their own.
    """
    return _is_rdma(port) and port.title.startswith(_VERBS)


def _is_rdma(port: NetPort) -> bool:
    return (
        port.port >= 1 or port.kind == "infiniband" or port.title.startswith(_VERBS[:1])
    )


def _gpus_of(host: HostTopology) -> tuple[GpuDevice, ...]:
    if all(gpu.bus_id for gpu in host.gpus):
        return tuple(sorted(host.gpus, key=lambda gpu: bus_order(gpu.bus_id)))
    return tuple(sorted(host.gpus, key=lambda gpu: gpu.number))


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


def _nearness(
    host: HostTopology, gpus: Sequence[GpuDevice], ports: Sequence[NetPort]
) -> dict[tuple[int, int], Nearness]:
    if not gpus or not ports:
        return {}
    table, paths = classify(host), find_paths(host)
    rows = {name: row for row, name in enumerate(table.names)}
    found: dict[tuple[int, int], Nearness] = {}
    for a, gpu in enumerate(gpus):
        for b, port in enumerate(ports):
            is_listed = gpu.name in rows and port.name in rows
            word = table.words[rows[gpu.name]][rows[port.name]] if is_listed else UNTOLD
            nearness = _judged(word, paths, gpu.name, port.name)
            if nearness:
                found[a, b] = nearness
    return found


def _judged(word: str, paths: Paths, gpu: str, port: str) -> Nearness | None:
    """Return how near by class and bandwidth; None where no source tells anything."""
    kind = _KINDS.get(word) or PathKind(word)
    path = paths.between(gpu, port)
    if path is None or path.kind == PathKind.DIS:
        if kind == PathKind.DIS:
            return None
        return Nearness((kind.rank, 0.0), word)
    kind = path.kind if kind == PathKind.DIS else kind
    return Nearness((kind.rank, -path.gb_per_s), str(kind), path.gb_per_s)
