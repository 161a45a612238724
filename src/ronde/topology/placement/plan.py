"""A placement with all names in it, and what to type to have it by hand."""

from collections.abc import Sequence
from typing import NamedTuple

from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import UNKNOWN, HostTopology, NetPort
from ronde.topology.machine import UNKNOWN_NODE, Core
from ronde.topology.placement.host_supply import HostSupply, is_amd, supply_of_host
from ronde.topology.placement.nearness import is_verbs
from ronde.topology.placement.placing import RankPlace, place
from ronde.topology.placement.request import DEFAULT_NODES, Request


class NicChoice(NamedTuple):
    """An adapter of a rank.

    Attributes:
        name: ``mlx5_0``.
        path: The class of the way from the rank's GPU: ``PIX``; empty where not told.
        gb_per_s: What that way carries by NCCL's figures; 0 where not told.
    """

    name: str
    path: str
    gb_per_s: float


class RankPlan(NamedTuple):
    """What one rank gets.

    Attributes:
        rank: Local rank.
        gpus: Numbers of its GPUs, as ``CUDA_VISIBLE_DEVICES`` and the like name them.
        gpu_bus_ids: Their bus addresses, empty ones where not told.
        num_cores: Physical cores.
        cpus: Their hardware threads, ascending.
        nodes: Memory nodes that the policy chose; empty for any.
        memory_nodes: Where its memory is to lie; empty for nowhere in particular.
        nics: Its adapters, the nearest first.
        is_preferred: Whether all comes from the same, fewest memory nodes.
        reasons: Why not, of each resource at fault a sentence.
        env: Variables for this rank alone.
        command: What to put before the program to bind it by hand; empty for nothing.
    """

    rank: int
    gpus: tuple[int, ...]
    gpu_bus_ids: tuple[str, ...]
    num_cores: int
    cpus: tuple[int, ...]
    nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...]
    nics: tuple[NicChoice, ...]
    is_preferred: bool
    reasons: tuple[str, ...]
    env: dict[str, str]
    command: str


class HostPlan(NamedTuple):
    """Where the ranks of one host sit.

    Attributes:
        host: Its name; empty where no source has it.
        policy: Under which policy.
        scope: What was aligned as one.
        ranks: By local rank.
        env: Variables for all ranks.
        notices: What the user should know, a sentence each.
    """

    host: str
    policy: str
    scope: str
    ranks: tuple[RankPlan, ...]
    env: dict[str, str]
    notices: tuple[str, ...]


def plan_host(
    host: HostTopology, request: Request, allowed: Sequence[Core] | None = None
) -> HostPlan:
    """Place ranks on a host.

    Args:
        host: As any source tells.
        request: What each rank is to get.
        allowed: Cores that may be used; None for all that the host has.

    Raises:
        PlacementError: The policy refuses a rank.
        UsageError: There is not what is asked for.
    """
    found = supply_of_host(host, allowed)
    places = place(found.supply, request)
    return HostPlan(
        host.name,
        str(request.policy),
        str(request.scope),
        tuple(_rank_plan(found, request, each) for each in places),
        _gpu_env(host, found, places) | _nic_env(found, places),
        (*found.notices, *_notices(found, places)),
    )


def _rank_plan(found: HostSupply, request: Request, rank: RankPlace) -> RankPlan:
    ports = [found.ports[nic] for nic in rank.nics]
    memory_nodes = rank.memory_nodes
    if not memory_nodes and rank.home != UNKNOWN_NODE and len(found.supply.nodes) > 1:
        nodes = {core.node for core in rank.cores}
        memory_nodes = (rank.home,) if len(nodes) == 1 else ()
    devices = [_verbs_name(port, is_port_needed=True) for port in ports]
    return RankPlan(
        rank=rank.rank,
        gpus=_numbers(found, rank),
        gpu_bus_ids=tuple(found.gpus[gpu].bus_id for gpu in rank.gpus),
        num_cores=len(rank.cores),
        cpus=rank.cpus,
        nodes=rank.nodes,
        memory_nodes=memory_nodes,
        nics=tuple(_choice(found, rank, nic) for nic in rank.nics),
        is_preferred=rank.is_preferred,
        reasons=rank.reasons,
        env={"UCX_NET_DEVICES": ",".join(devices)} if all(devices) and ports else {},
        command=_command(rank, memory_nodes, is_strict=bool(request.memory_bytes)),
    )


def _choice(found: HostSupply, rank: RankPlace, nic: int) -> NicChoice:
    own = rank.gpus[0] if rank.gpus else -1
    near = found.supply.nearness.get((own, nic))
    name = found.ports[nic].title
    return NicChoice(name, near.word, near.gb_per_s) if near else NicChoice(name, "", 0)


def _command(rank: RankPlace, memory_nodes: Sequence[int], *, is_strict: bool) -> str:
    """Return what binds a rank; memory that was set aside is had or not at all."""
    words: list[str] = []
    if rank.cpus:
        words.append(f"--physcpubind={format_list(rank.cpus)}")
    if memory_nodes:
        how = "membind" if is_strict else "preferred"
        words.append(f"--{how}={','.join(map(str, memory_nodes))}")
    return " ".join(["numactl", *words]) if words else ""


def _numbers(found: HostSupply, rank: RankPlace) -> tuple[int, ...]:
    return tuple(int(found.supply.gpus[gpu].name) for gpu in rank.gpus)


def _gpu_env(
    host: HostTopology, found: HostSupply, places: Sequence[RankPlace]
) -> dict[str, str]:
    """Return what shows every rank all GPUs of the plan, rank by rank."""
    own = [found.gpus[gpu] for each in places for gpu in each.gpus]
    numbers = [str(number) for each in places for number in _numbers(found, each)]
    if own and all(is_amd(host, gpu) for gpu in own):
        return {"HIP_VISIBLE_DEVICES": ",".join(numbers)}
    if not own or not all(gpu.bus_id for gpu in own):
        return {}
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return order | {"CUDA_VISIBLE_DEVICES": ",".join(numbers)}


def _nic_env(found: HostSupply, places: Sequence[RankPlace]) -> dict[str, str]:
    """Return what leaves NCCL the adapters near the GPUs of the plan.

    All that are equally near: a rank's own may be one of several that its GPU drives.
    NCCL must find the same on every rank of a host: it picks each GPU's from them.

    Source: NVIDIA's answer in https://github.com/NVIDIA/nccl/issues/1478.
    """
    used = {nic for each in places for nic in each.nics}
    for gpu in (gpu for each in places for gpu in each.gpus):
        used.update(found.supply.nearest_nics(gpu))
    ports = [found.ports[nic] for nic in sorted(used)]
    names = [_verbs_name(port, is_port_needed=False) for port in ports]
    if not names or not all(names):
        return {}
    # The first sign makes NCCL compare whole names: mlx5_1 would mean mlx5_10, too.
    return {"NCCL_IB_HCA": "=" + ",".join(dict.fromkeys(names))}


def _verbs_name(port: NetPort, *, is_port_needed: bool) -> str:
    """Return ``mlx5_0:1``; without its port where that is not told and not needed.

    Empty for adapters of other kinds, and for ports that are not told and needed.
    Fused adapters (``mlx5_0+mlx5_1``) are named one by one.
    """
    if not is_verbs(port):
        return ""
    adapters = port.title.partition(":")[0].split("+")
    number = port.port
    # NCCL's files count a port's copies in, so that only its first is what it says.
    # Where there is a number the source is such a file.
    if port.number != UNKNOWN and number > 1:
        number = UNKNOWN
    if port.title.startswith("mlx5") and number == UNKNOWN:
        number = 1
    if number >= 1:
        return ",".join(f"{adapter}:{number}" for adapter in adapters)
    return "" if is_port_needed else ",".join(adapters)


def _notices(found: HostSupply, places: Sequence[RankPlace]) -> list[str]:
    notices: list[str] = []
    num_nodes = len(found.supply.nodes)
    if num_nodes > DEFAULT_NODES:
        notices.append(f"{num_nodes} memory nodes have 2**{num_nodes} sets to try.")
    if found.gpus and not places[0].gpus:
        notices.append(
            f"{len(places)} ranks and fewer GPUs, {len(found.gpus)}, so that no rank "
            "has one of its own."
        )
    crowded = next((each for each in places if not each.has_enough), None)
    if crowded and crowded.share:
        part = crowded.share.part
        notices.append(
            f"{len(part.ranks)} ranks share {len(part.cores)} "
            f"core{'s' * (len(part.cores) > 1)}."
        )
    return notices
