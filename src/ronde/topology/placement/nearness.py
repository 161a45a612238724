"""The ports to train over, and how near each is to each GPU."""

from collections import Counter
from collections.abc import Collection, Sequence

from ronde.topology.graph import UNKNOWN, GpuDevice, HostTopology, NetPort
from ronde.topology.machine import NearPort
from ronde.topology.paths.classes import UNTOLD, classify
from ronde.topology.paths.path import PathKind
from ronde.topology.paths.search import Paths, find_paths
from ronde.topology.placement.supply import Nearness

# nvidia-smi's words that NCCL has not, as NCCL's.
_KINDS = {"NODE": PathKind.PHB, UNTOLD: PathKind.DIS}
_VERBS = ("mlx", "bnxt_re", "irdma", "ionic", "roce", "ibp")


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


def find_nearness(
    host: HostTopology, gpus: Sequence[GpuDevice], ports: Sequence[NetPort]
) -> dict[tuple[int, int], Nearness]:
    """Return how near each port is to each GPU, by their places in the arguments.

    First counts the class of the way, then what it carries. There is no entry where no
    source tells anything.
    """
    if not gpus or not ports:
        return {}
    table, paths = classify(host), find_paths(host)
    rows = {name: row for row, name in enumerate(table.names)}
    found: dict[tuple[int, int], Nearness] = {}
    for b, port in enumerate(ports):
        for a, gpu in enumerate(gpus):
            is_listed = gpu.name in rows and port.name in rows
            word = table.words[rows[gpu.name]][rows[port.name]] if is_listed else UNTOLD
            nearness = _judged(word, paths, gpu.name, port.name)
            if nearness:
                found[a, b] = nearness
    return found


def find_near_ports(
    host: HostTopology, bus_ids: Collection[str]
) -> tuple[NearPort, ...]:
    """Return how near the ports to train over are to some GPUs, port by port.

    Args:
        host: As any source tells.
        bus_ids: Of the GPUs.
    """
    gpus = [gpu for gpu in host.gpus if gpu.bus_id in bus_ids]
    ports = training_ports(host)
    return tuple(
        NearPort(gpus[gpu].bus_id, ports[port].title, near.order)
        for (gpu, port), near in find_nearness(host, gpus, ports).items()
    )


def _is_rdma(port: NetPort) -> bool:
    return (
        port.port >= 1 or port.kind == "infiniband" or port.title.startswith(_VERBS[:1])
    )


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
