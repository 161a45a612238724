"""A placement on any host with names in it, and what to type to have it by hand."""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby, zip_longest
from typing import NamedTuple

from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import UNKNOWN, GpuDevice, HostTopology, NetPort, NumaNode
from ronde.topology.machine import UNKNOWN_NODE, Core, NearPort
from ronde.topology.paths.classes import UNKNOWN_WORD, classify
from ronde.topology.paths.network import (
    PathKind,
    find_numa_numbers,
    find_paths,
)
from ronde.topology.pci import bus_order
from ronde.topology.placement.placing import (
    AlignmentRequest,
    Inventory,
    NearDevice,
    Nearness,
    RankPlace,
    nodes_of_cores,
    place,
)

_MAX_THREADS = 4
_AMD = 0x1002
# nvidia-smi's words that NCCL does not have, as NCCL's.
_KINDS = {"NODE": PathKind.PHB, UNKNOWN_WORD: PathKind.DIS}
_VERBS = ("mlx", "bnxt_re", "irdma", "ionic", "roce", "ibp")


class NicChoice(NamedTuple):
    """An adapter of a rank."""

    name: str  # ``mlx5_0``.
    path: str  # The class of the way from the rank's GPU: ``PIX``; empty if unknown.
    gb_per_s: float  # What that way carries by NCCL's figures; 0 if unknown.


class PlannedRank(NamedTuple):
    """What one rank gets."""

    rank: int  # Local rank.
    gpus: tuple[int, ...]  # Their numbers as ``CUDA_VISIBLE_DEVICES`` names them.
    gpu_bus_ids: tuple[str, ...]  # Empty ones if unknown.
    num_cores: int  # Physical cores.
    cpus: tuple[int, ...]  # Their hardware threads, ascending.
    nodes: tuple[int, ...]  # Memory nodes that the policy chose; empty for any.
    memory_nodes: tuple[int, ...]  # Where its memory is to lie; empty for anywhere.
    nics: tuple[NicChoice, ...]
    is_preferred: bool  # Whether all comes from the same, fewest memory nodes.
    reasons: tuple[str, ...]  # Why not, a sentence for each resource at fault.
    env: dict[str, str]  # Variables for this rank alone.
    command: str  # What binds it by hand, before the program; empty for nothing.


class HostPlan(NamedTuple):
    """Where the ranks of one host sit."""

    host: str  # Its name; empty if unknown.
    policy: str
    scope: str
    ranks: tuple[PlannedRank, ...]  # By local rank.
    env: dict[str, str]  # Variables for all ranks.
    notices: tuple[str, ...]  # What the user should know, a sentence each.


def plan_host(
    host: HostTopology, request: AlignmentRequest, allowed: Sequence[Core] | None = None
) -> HostPlan:
    """Place ranks on a host; ``allowed`` are the cores that may be used, else all.

    GPUs are in the order of their bus addresses, as CUDA counts them when asked to.
    AMD's are in the source's order, for HIP has no such setting; so are all where one
    has no address.

    Raises:
        UsageError: As ``place``.
    """
    cores, notices = infer_cores(host) if allowed is None else (allowed, ())
    if not cores:
        notices = (*notices, "CPUs are unknown: ranks get none.")
    planner = _Planner(host, cores)
    places = place(planner.inventory, request)
    if planner.gpus and not places[0].gpus:
        few = f"{len(places)} ranks and only {len(planner.gpus)} GPUs"
        notices = (*notices, f"{few}: no rank has one of its own.")
    for each in [each.share for each in places if not each.share.has_enough][:1]:
        pool = f"{len(each.pool)} core{'s' * (len(each.pool) > 1)}"
        notices = (*notices, f"{len(each.ranks)} ranks share {pool}.")
    return HostPlan(
        host.name,
        str(request.policy),
        str(request.scope),
        tuple(planner.rank_plan(each) for each in places),
        planner.gpu_env(places) | planner.nic_env(places),
        notices,
    )


def find_near_ports(
    host: HostTopology, bus_ids: Collection[str]
) -> tuple[NearPort, ...]:
    """Return how near the ports to train over are to some GPUs, port by port."""
    gpus = [gpu for gpu in host.gpus if gpu.bus_id in bus_ids]
    ports = _training_ports(host)
    return tuple(
        NearPort(gpus[gpu].bus_id, ports[port].title, near.order)
        for (gpu, port), near in _find_nearness(host, gpus, ports).items()
    )


def infer_cores(host: HostTopology) -> tuple[tuple[Core, ...], tuple[str, ...]]:
    """Return the cores of a host, and notices on what had to be inferred.

    CPUs that are listed on two nodes are on none: placeholders in clouds' files give
    all nodes the same. Where no source has the threads of a core, those at the same
    place in a node's runs of numbers share one, as Linux counts all first threads
    before all second ones. Where that is wrong, ranks get other cores of the same node.
    """
    counts = Counter(cpu for node in host.numa_nodes for cpu in node.cpus)
    twice = {cpu for cpu, count in counts.items() if count > 1}
    cores: list[Core] = []
    is_inferred = False
    for node in host.numa_nodes:
        groups = node.cores
        if not groups:
            groups = _threads_by_place([cpu for cpu in node.cpus if cpu not in twice])
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


def _threads_by_place(cpus: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the CPUs at the same place in each run of numbers: a core each."""
    by_run = groupby(enumerate(cpus), key=lambda each: each[1] - each[0])
    runs = [[cpu for _, cpu in run] for _, run in by_run]
    # Many short runs are no threads: every other CPU is of this node, or some are off.
    if len(runs) > _MAX_THREADS:
        return tuple((cpu,) for cpu in cpus)
    places = zip_longest(*runs)
    return tuple(tuple(cpu for cpu in each if cpu is not None) for each in places)


def _is_rdma(port: NetPort) -> bool:
    is_verbs = port.port >= 1 or port.kind == "infiniband"
    return is_verbs or port.title.startswith(_VERBS[:1])


def _training_ports(host: HostTopology) -> tuple[NetPort, ...]:
    """Return the ports to train over: the others serve storage or logins.

    Where RDMA adapters are, only those count, and of them only those of the rate that
    most have.
    """
    paired = host.paired
    placed = [
        port
        for port in host.ports
        if port.is_up and (port.bus_id or port.node != UNKNOWN or port.name in paired)
    ]
    adapters = [port for port in placed if _is_rdma(port)] or placed
    rates = Counter(port.mbit_per_s for port in adapters)
    usual = max(rates, key=lambda rate: (rates[rate], rate), default=0)
    return tuple(port for port in adapters if port.mbit_per_s == usual)


def _find_nearness(
    host: HostTopology, gpus: Sequence[GpuDevice], ports: Sequence[NetPort]
) -> dict[tuple[int, int], Nearness]:
    """Return how near each port is to each GPU, by their indexes, where it is known.

    First counts the class of the way, then what it carries.
    """
    if not gpus or not ports:
        return {}
    table, paths = classify(host), find_paths(host)
    rows = {name: row for row, name in enumerate(table.names)}
    found: dict[tuple[int, int], Nearness] = {}
    for b, port in enumerate(ports):
        for a, gpu in enumerate(gpus):
            word = UNKNOWN_WORD
            if gpu.name in rows and port.name in rows:
                word = table.words[rows[gpu.name]][rows[port.name]]
            kind = _KINDS.get(word) or PathKind(word)
            rate = 0.0
            if path := paths.between(gpu.name, port.name):
                rate = path.gb_per_s
                word = kind = path.kind if kind == PathKind.DIS else kind
            if kind != PathKind.DIS:
                found[a, b] = Nearness((kind.rank, -rate), str(word), rate)
    return found


class _Planner:
    """A host's inventory, and the name of each item of it."""

    def __init__(self, host: HostTopology, cores: Sequence[Core]) -> None:
        vendors = {device.bus_id: device.vendor for device in host.devices}
        amd = [g for g in host.gpus if g.gcn or vendors.get(g.bus_id) == _AMD]
        in_bus_order = not amd and all(gpu.bus_id for gpu in host.gpus)
        self.gpus = sorted(host.gpus, key=lambda gpu: gpu.number)
        self._is_amd = len(amd) == len(host.gpus)
        self._numbers = [gpu.number for gpu in self.gpus]
        if in_bus_order:
            self.gpus.sort(key=lambda gpu: bus_order(gpu.bus_id))
            self._numbers = list(range(len(self.gpus)))
        self._ports = _training_ports(host)
        nodes = nodes_of_cores(cores)
        known = {node.number: node for node in host.numa_nodes}
        near = find_numa_numbers(host)
        # Near a node without CPUs there is no place for a rank.
        bare = {node.number for node in host.numa_nodes if not node.cpus}
        near |= {name: UNKNOWN_NODE for name, node in near.items() if node in bare}
        self.inventory = Inventory(
            nodes,
            _distances([known.get(n.number) or NumaNode(n.number) for n in nodes]),
            tuple(
                NearDevice(str(number), near[gpu.name])
                for number, gpu in zip(self._numbers, self.gpus, strict=True)
            ),
            tuple(port.title for port in self._ports),
            _find_nearness(host, self.gpus, self._ports),
            host.name,
        )

    def rank_plan(self, rank: RankPlace) -> PlannedRank:
        memory_nodes: tuple[int, ...] = ()
        if len(self.inventory.nodes) > 1 and len({c.node for c in rank.cores}) == 1:
            memory_nodes = (rank.home,) if rank.home != UNKNOWN_NODE else ()
        words = [f"--physcpubind={format_list(rank.cpus)}"] if rank.cpus else []
        words += [f"--preferred={node}" for node in memory_nodes]
        ports = [(nic, self._ports[nic]) for nic in rank.nics]
        devices = [_verbs_name(port, is_port_needed=True) for _, port in ports]
        near = {nic: self.inventory.nearness[rank.gpus[0], nic] for nic in rank.nics}
        return PlannedRank(
            rank=rank.rank,
            gpus=tuple(self._numbers[gpu] for gpu in rank.gpus),
            gpu_bus_ids=tuple(self.gpus[gpu].bus_id for gpu in rank.gpus),
            num_cores=len(rank.cores),
            cpus=rank.cpus,
            nodes=rank.nodes,
            memory_nodes=memory_nodes,
            nics=tuple(
                NicChoice(port.title, near[nic].word, near[nic].gb_per_s)
                for nic, port in ports
            ),
            is_preferred=rank.is_preferred,
            reasons=rank.reasons,
            env={"UCX_NET_DEVICES": ",".join(devices)} if any(devices) else {},
            command=" ".join(["numactl", *words]) if words else "",
        )

    def gpu_env(self, places: Sequence[RankPlace]) -> dict[str, str]:
        """Return what shows every rank all GPUs of the plan, rank by rank."""
        indexes = [gpu for each in places for gpu in each.gpus]
        numbers = ",".join(str(self._numbers[index]) for index in indexes)
        if indexes and self._is_amd:
            return {"HIP_VISIBLE_DEVICES": numbers}
        if not indexes or not all(self.gpus[index].bus_id for index in indexes):
            return {}
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": numbers}

    def nic_env(self, places: Sequence[RankPlace]) -> dict[str, str]:
        """Return what leaves NCCL all adapters that are nearest to GPUs of the plan.

        NCCL must find the same on every rank of a host: it picks each GPU's from them.

        Source: NVIDIA's answer in https://github.com/NVIDIA/nccl/issues/1478.
        """
        gpus = {gpu for each in places for gpu in each.gpus}
        used = {nic for gpu in gpus for nic in self.inventory.nearest_nics(gpu)}
        ports = [self._ports[nic] for nic in sorted(used)]
        names = [_verbs_name(port, is_port_needed=False) for port in ports]
        if not names or not all(names):
            return {}
        # The first sign makes NCCL compare whole names: mlx5_1 would mean mlx5_10, too.
        return {"NCCL_IB_HCA": "=" + ",".join(dict.fromkeys(names))}


def _distances(nodes: Sequence[NumaNode]) -> tuple[tuple[int, ...], ...]:
    """Return how far nodes are from each other; nothing if no source has it."""
    known = [(node.number, dict(node.distances)) for node in nodes]
    if not any(row for _, row in known):
        return ()
    return tuple(
        tuple(row.get(other, 10 if here == other else 255) for other, _ in known)
        for here, row in known
    )


def _verbs_name(port: NetPort, *, is_port_needed: bool) -> str:
    """Return ``mlx5_0:1``; without its port where that is unknown and not needed.

    Empty for adapters that NCCL's own InfiniBand code does not drive, such as Amazon's
    and Slingshot's, and for ports that are unknown and needed. Fused adapters
    (``mlx5_0+mlx5_1``) are named one by one.
    """
    if not _is_rdma(port) or not port.title.startswith(_VERBS):
        return ""
    adapters = port.title.partition(":")[0].split("+")
    number = port.port
    # NCCL's files count a port's copies in, so that only the first number is right.
    # Where a port has a number, the source is such a file.
    if port.number != UNKNOWN and number > 1:
        number = UNKNOWN
    if port.title.startswith("mlx5") and number == UNKNOWN:
        number = 1
    if number >= 1:
        return ",".join(f"{adapter}:{number}" for adapter in adapters)
    return "" if is_port_needed else ",".join(adapters)
