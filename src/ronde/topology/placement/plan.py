"""Plan the placement on any host, with commands to apply the plan by hand."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, combinations, groupby, product, zip_longest
from typing import NamedTuple

from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import UNKNOWN, GpuDevice, HostTopology, NetPort
from ronde.topology.machine import UNKNOWN_NODE, Core, NearPort
from ronde.topology.paths.classes import UNKNOWN_WORD, classify
from ronde.topology.paths.network import PathKind, find_numa_numbers, find_paths
from ronde.topology.pci import bus_order
from ronde.topology.placement.placing import (
    AlignmentRequest,
    Inventory,
    NearDevice,
    Nearness,
    Policy,
    RankPlacement,
    place,
)

_MAX_THREADS = 4
_AMD = 0x1002
# NCCL's kinds for words that only nvidia-smi has.
_KINDS = {"NODE": PathKind.PHB, UNKNOWN_WORD: PathKind.DIS}
_VERBS = ("mlx", "bnxt_re", "irdma", "ionic", "roce", "ibp")


class NicChoice(NamedTuple):
    """The adapter chosen for a rank, and the path from the rank's GPU."""

    name: str  # ``mlx5_0``.
    path: str  # The class of the path from the rank's GPU: ``PIX``; empty if unknown.
    gb_per_s: float  # NCCL's figure for the path; 0 if unknown.


class PlannedRank(NamedTuple):
    """The resources of one rank, by name."""

    rank: int  # Local rank.
    gpus: tuple[int, ...]  # Their numbers as ``CUDA_VISIBLE_DEVICES`` names them.
    gpu_bus_ids: tuple[str, ...]  # Empty ones if unknown.
    num_cores: int  # Physical cores.
    cpus: tuple[int, ...]  # Their hardware threads, ascending.
    nodes: tuple[int, ...]  # Memory nodes that the policy chose; empty for any.
    memory_nodes: tuple[int, ...]  # Where its memory is to lie; empty for anywhere.
    nics: tuple[NicChoice, ...]
    is_preferred: bool  # All resources come from the same, fewest memory nodes.
    reasons: tuple[str, ...]  # Why not, a sentence for each resource at fault.
    command: str  # Prefix of the program that binds it by hand, or "".


class HostPlan(NamedTuple):
    """The placement of a host's ranks, with variables and remarks for the user."""

    host: str  # Its name; empty if unknown.
    policy: str
    scope: str
    ranks: tuple[PlannedRank, ...]  # By local rank.
    env: dict[str, str]  # Variables for all ranks.
    notices: tuple[str, ...]  # Remarks for the user, a sentence each.


def plan_host(
    host: HostTopology, request: AlignmentRequest, allowed: Sequence[Core] | None = None
) -> HostPlan:
    """Place ranks on a host; ``allowed`` are the usable cores, None for all."""
    cores, notices = infer_cores(host) if allowed is None else (allowed, ())
    if not cores:
        notices = (*notices, "CPUs are unknown: ranks get none.")
    gpus, gpu_variables = choose_gpus(host, request.num_ranks)
    ports = _training_ports(host)
    # A node without CPUs has no cores for a rank, and no policy refuses its GPUs.
    bare = {node.number for node in host.numa_nodes if not node.cpus}
    near = find_numa_numbers(host)
    near |= {name: UNKNOWN_NODE for name, node in near.items() if node in bare}
    inventory = Inventory(
        tuple(cores),
        tuple(NearDevice(str(gpu.number), near[gpu.name]) for gpu in gpus),
        tuple(port.title for port in ports),
        _find_nearness(host, gpus, ports),
        host.name,
    )
    placements = place(inventory, request)
    if gpus and not placements[0].gpus:
        few = f"{len(placements)} ranks and only {len(gpus)} GPUs"
        notices = (*notices, f"{few}: no rank has one of its own.")
    for each in [each.share for each in placements if not each.share.has_enough][:1]:
        pool = f"{len(each.pool)} core{'s' * (len(each.pool) > 1)}"
        notices = (*notices, f"{len(each.ranks)} ranks share {pool}.")
    is_judged = request.policy is not Policy.NONE
    used = [gpu for each in placements for gpu in each.gpus]
    numbers = ",".join(str(gpus[gpu].number) for gpu in used)
    env = {name: value or numbers for name, value in gpu_variables.items() if used}
    return HostPlan(
        host.name,
        str(request.policy),
        str(request.scope),
        tuple(
            _plan_rank(each, inventory, gpus, ports, is_judged=is_judged)
            for each in placements
        ),
        env | _nic_env(inventory, used, ports),
        notices,
    )


def choose_gpus(
    host: HostTopology, num_ranks: int
) -> tuple[list[GpuDevice], dict[str, str]]:
    """Return the GPUs, those for ranks first, and the variables that select them.

    The GPUs with the best NVLinks or xGMI links are chosen. Starting from each GPU, a
    set grows by the GPU with the best links to it. The set with the fastest slowest
    pair wins.
    """
    gpus, variables = _order_gpus(host)
    if num_ranks >= len(gpus):
        return gpus, variables
    paths = find_paths(host)

    def rate(one: GpuDevice, other: GpuDevice) -> float:
        path = paths.between(one.name, other.name)
        return path.gb_per_s if path and path.kind <= PathKind.NVB else 0.0

    def grow(first: GpuDevice) -> list[GpuDevice]:
        chosen, left = [first], [gpu for gpu in gpus if gpu is not first]
        while len(chosen) < num_ranks:
            best = max(left, key=lambda gpu: _fit([rate(gpu, own) for own in chosen]))
            left.remove(best)
            chosen.append(best)
        return chosen

    sets = map(grow, gpus)
    best = max(sets, key=lambda own: _fit([rate(*p) for p in combinations(own, 2)]))
    return sorted(gpus, key=lambda gpu: gpu not in best), variables


def _fit(rates: Sequence[float]) -> tuple[float, float]:
    return min(rates, default=0.0), sum(rates)


def _order_gpus(host: HostTopology) -> tuple[list[GpuDevice], dict[str, str]]:
    """Return the GPUs as programs number them, and variables that enforce the order.

    CUDA can count by bus address; HIP has no such setting. If the value of a variable
    is empty, the caller fills in the list of GPU numbers.
    """
    vendors = {device.bus_id: device.vendor for device in host.devices}
    amd = [gpu for gpu in host.gpus if gpu.gcn or vendors.get(gpu.bus_id) == _AMD]
    if amd or not all(gpu.bus_id for gpu in host.gpus):
        ordered = sorted(host.gpus, key=lambda gpu: gpu.number)
        is_amd = bool(amd) and len(amd) == len(host.gpus)
        return ordered, {"HIP_VISIBLE_DEVICES": ""} if is_amd else {}
    gpus = sorted(host.gpus, key=lambda gpu: bus_order(gpu.bus_id))
    numbers = [gpu.number for gpu in gpus]
    # A lost GPU leaves a gap in the numbers; other orders are not the bus's.
    if numbers != sorted({*numbers}):
        gpus = [gpu._replace(number=number) for number, gpu in enumerate(gpus)]
    return gpus, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ""}


def _plan_rank(
    rank: RankPlacement,
    inventory: Inventory,
    gpus: Sequence[GpuDevice],
    ports: Sequence[NetPort],
    *,
    is_judged: bool,
) -> PlannedRank:
    every, own = ({core.node for core in c} for c in (inventory.cores, rank.cores))
    is_near_one = len(own) == 1 < len(every) and rank.home != UNKNOWN_NODE
    memory_nodes = (rank.home,) if is_near_one else ()
    words = [f"--physcpubind={format_list(rank.cpus)}"] if rank.cpus else []
    words += [f"--preferred={node}" for node in memory_nodes]
    near = [(nic, inventory.nearness[rank.gpus[0], nic]) for nic in rank.nics]
    reasons = rank.reasons
    is_lost = any(inventory.gpus[gpu].node == UNKNOWN_NODE for gpu in rank.gpus)
    if is_lost and rank.cpus and is_judged:
        reasons = (*reasons, "gpu: no usable CPU is known to be near it")
    return PlannedRank(
        rank=rank.rank,
        gpus=tuple(gpus[gpu].number for gpu in rank.gpus),
        gpu_bus_ids=tuple(gpus[gpu].bus_id for gpu in rank.gpus),
        num_cores=len(rank.cores),
        cpus=rank.cpus,
        nodes=rank.nodes,
        memory_nodes=memory_nodes,
        nics=tuple(
            NicChoice(ports[nic].title, each.word, each.gb_per_s) for nic, each in near
        ),
        is_preferred=rank.is_preferred and not reasons,
        reasons=reasons,
        command=" ".join(["numactl", *words]) if words else "",
    )


def _nic_env(
    inventory: Inventory, gpus: Sequence[int], ports: Sequence[NetPort]
) -> dict[str, str]:
    """Return the variable that lets NCCL use the adapters nearest to each of the GPUs.

    All ranks of a host must have the same value.

    Source: https://github.com/NVIDIA/nccl/issues/1478.
    """
    used = sorted({nic for gpu in gpus for nic in inventory.nearest_nics(gpu)})
    names = [_verbs_name(ports[nic]) for nic in used]
    if not names or not all(names):
        return {}
    # "=" makes NCCL compare whole names: mlx5_1 would match mlx5_10, too.
    return {"NCCL_IB_HCA": "=" + ",".join(dict.fromkeys(names))}


def find_near_ports(host: HostTopology, bus_ids: set[str]) -> tuple[NearPort, ...]:
    """Return the distances between these GPUs and the ports for training."""
    gpus = [gpu for gpu in host.gpus if gpu.bus_id in bus_ids]
    ports = _training_ports(host)
    return tuple(
        NearPort(gpus[gpu].bus_id, ports[port].title, near.order)
        for (gpu, port), near in _find_nearness(host, gpus, ports).items()
    )


def infer_cores(host: HostTopology) -> tuple[tuple[Core, ...], tuple[str, ...]]:
    """Return the cores of a host, and notices about guesses."""
    # Placeholders in clouds' files give all nodes the same CPUs.
    counts = Counter(cpu for node in host.numa_nodes for cpu in node.cpus)
    twice = {cpu for cpu, count in counts.items() if count > 1}
    cores: list[Core] = []
    is_inferred = False
    for node in host.numa_nodes:
        groups = node.cores
        if not groups:
            groups = _threads_by_index([cpu for cpu in node.cpus if cpu not in twice])
            is_inferred |= bool(groups)
        left = [tuple(c for c in cpus if c not in twice) for cpus in groups]
        cores += [Core(cpus, node.number) for cpus in left if cpus]
    notices: list[str] = []
    if twice:
        notices.append(
            f"CPUs {format_list(twice)} are listed on several NUMA nodes: no rank gets "
            "them."
        )
    if is_inferred:
        notices.append(
            "No source has the hardware threads of each core: Linux's numbering is "
            "assumed."
        )
    return tuple(cores), tuple(notices)


def _threads_by_index(cpus: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Guess which CPUs share a core, from their numbers.

    The i-th CPUs of all runs of consecutive numbers are one core: Linux numbers the
    first threads of a node's cores before the second threads.
    """
    by_run = groupby(enumerate(cpus), key=lambda each: each[1] - each[0])
    runs = [[cpu for _, cpu in run] for _, run in by_run]
    # Many short runs: CPUs alternate between nodes, or some are offline.
    if len(runs) > _MAX_THREADS:
        return tuple((cpu,) for cpu in cpus)
    columns = zip_longest(*runs)
    return tuple(tuple(cpu for cpu in each if cpu is not None) for each in columns)


def _is_rdma(port: NetPort) -> bool:
    is_verbs = port.port >= 1 or port.kind == "infiniband"
    return is_verbs or port.title.startswith(_VERBS[:1])


def _training_ports(host: HostTopology) -> tuple[NetPort, ...]:
    """Return the RDMA ports, else all ports, that have the most frequent rate.

    Ports of other rates may serve storage.
    """
    paired = host.paired
    placed = [
        port
        for port in host.ports
        if (port.is_up and not port.is_virtual)
        and (port.bus_id or port.node != UNKNOWN or port.name in paired)
    ]
    real = [port for port in placed if port.bus_id] or placed
    adapters = [port for port in placed if _is_rdma(port)] or real
    rates = Counter(port.mbit_per_s for port in adapters)
    usual = max(rates, key=lambda rate: (rates[rate], rate), default=0)
    return tuple(port for port in adapters if port.mbit_per_s == usual)


def _find_nearness(
    host: HostTopology, gpus: Sequence[GpuDevice], ports: Sequence[NetPort]
) -> dict[tuple[int, int], Nearness]:
    if not gpus or not ports:
        return {}
    table, paths = classify(host), find_paths(host)
    pairs = product(table.names, repeat=2)
    words = dict(zip(pairs, chain.from_iterable(table.words), strict=True))
    found: dict[tuple[int, int], Nearness] = {}
    for b, port in enumerate(ports):
        for a, gpu in enumerate(gpus):
            word = words.get((gpu.name, port.name), UNKNOWN_WORD)
            kind = _KINDS.get(word) or PathKind(word)
            rate = 0.0
            if path := paths.between(gpu.name, port.name):
                rate = path.gb_per_s
                if kind == PathKind.DIS:
                    word = kind = path.kind
            if kind != PathKind.DIS:
                found[a, b] = Nearness((kind.rank, -rate), str(word), rate)
    return found


def _verbs_name(port: NetPort) -> str:
    """Return a port's name for ``NCCL_IB_HCA``: ``mlx5_0:1``.

    The name is empty for ports that NCCL's InfiniBand code does not use. Fused adapters
    (``mlx5_0+mlx5_1``) are named one by one.
    """
    if not _is_rdma(port) or not port.title.startswith(_VERBS):
        return ""
    adapters = port.title.partition(":")[0].split("+")
    number = port.port
    # In NCCL's files, in which ports have numbers, later port numbers may count copies.
    if port.number != UNKNOWN and number > 1:
        number = UNKNOWN
    if port.title.startswith("mlx5") and number == UNKNOWN:
        number = 1
    end = f":{number}" if number >= 1 else ""
    return ",".join(adapter + end for adapter in adapters)
