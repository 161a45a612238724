"""GPU, cores, memory node and network port of each rank of a host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ronde.errors import UsageError
from ronde.launch.hosts.host import Host, RankResources, usable_cores
from ronde.topology.machine import (
    UNKNOWN_NODE,
    VISIBLE_DEVICES,
    Core,
    Gpu,
    Machine,
    select_gpus,
    visible_gpus,
)
from ronde.topology.placement.placing import (
    AlignmentRequest,
    RankPlace,
    inventory_of_machine,
    place,
)
from ronde.topology.placement.policies import Policy


class GpuView(StrEnum):
    """Which GPUs a rank sees."""

    ALL = "all"
    """All of its host's; ``LOCAL_RANK`` says which is its own, as under torchrun."""

    ONE = "one"  # its own alone, as device 0


@dataclass(frozen=True, slots=True)
class RankDevice:
    """A rank's GPU."""

    gpu: Gpu | None  # the one it is expected to use; None where it has none of its own
    env: dict[str, str]  # variables that make it so


def choose_gpus(
    gpus: Sequence[Gpu], wanted: Sequence[str], said_at: str
) -> tuple[Gpu, ...]:
    """Return the GPUs that a host's ranks may use, in the order that is wanted."""
    chosen: list[Gpu] = []
    for item in wanted:
        is_position = item.isdecimal() and int(item) < len(gpus)
        found = gpus[int(item)] if is_position else None
        if not item.isdecimal():
            found = next(iter(select_gpus(gpus, item)), None)
        if found is None or found in chosen:
            raise UsageError(
                f"gpus must name each GPU that the host lets be used, of {len(gpus)} "
                f"counted from 0, once, got {item!r} ({said_at}). Correct it."
            )
        chosen.append(found)
    return tuple(chosen) if wanted else tuple(gpus)


def assign_gpus(
    gpus: Sequence[Gpu], num_ranks: int, view: GpuView, *, is_choice: bool, host: str
) -> tuple[RankDevice, ...]:
    """Give each rank of a host the GPU of its local rank."""
    if view is GpuView.ONE:
        if num_ranks > len(gpus):
            raise UsageError(
                f"--gpu-view one must have a GPU for each rank of a host, got "
                f"{num_ranks} ranks and {len(gpus)} GPUs on {host}. Start fewer ranks "
                "there, or leave --gpu-view out: all ranks see all GPUs then, and may "
                "share."
            )
        return tuple(RankDevice(gpu, _seeing([gpu])) for gpu in gpus[:num_ranks])
    env = _seeing(gpus) if is_choice and gpus else {}
    if num_ranks > len(gpus):
        return (RankDevice(None, env),) * num_ranks
    return tuple(RankDevice(gpu, env) for gpu in gpus[:num_ranks])


def _seeing(gpus: Sequence[Gpu]) -> dict[str, str]:
    maker = gpus[0].maker
    env = {VISIBLE_DEVICES[maker]: ",".join(gpu.visible_as for gpu in gpus)}
    if maker == "nvidia":
        # Our numbers are those of the bus; CUDA would count the fastest first.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return env


class BindMode(StrEnum):
    """How ranks are bound."""

    NONE = "none"  # not at all: the scheduler's choice

    CORE = "core"
    """Each to cores of its own: an even part of those near its GPU, else of all."""

    NUMA = "numa"
    """Each to all cores of the memory node near its GPU, else of an even part."""

    AUTO = "auto"
    """``numa`` with GPUs, else ``core``; nothing where that leaves cores unused."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What one rank runs on."""

    cpus: tuple[int, ...]  # those it may use, ascending; empty for all
    # where its memory is to lie, or ``UNKNOWN_NODE`` for no preference
    memory_node: int
    num_cores: int  # physical cores that it may count on, at least 1
    why: str  # in a few words
    # false where ranks that were to have cores of their own share
    has_enough: bool = True


def bind(
    machine: Machine,
    num_ranks: int,
    mode: BindMode,
    gpus: Sequence[Gpu | None],
    *,
    policy: Policy = Policy.BEST_EFFORT,
    host: str = "",
) -> tuple[Binding, ...]:
    """Bind all ranks of a host.

    The same input gives the same result on every call; no CPU is given that the machine
    does not list, and ``auto`` gives out all of them or binds nobody. With ``core`` no
    two ranks have a CPU in common unless there are fewer cores than ranks. Hardware
    threads of a core stay together.
    """
    # It refuses nobody and leaves the parts as they are: no set of memory nodes, of
    # which a large host has too many, need be tried.
    if policy is Policy.BEST_EFFORT or mode is BindMode.NONE:
        policy = Policy.NONE
    wanted = AlignmentRequest(num_ranks, policy)
    places = place(inventory_of_machine(machine, gpus, host), wanted)
    obstacle = _obstacle(machine, num_ranks, mode, gpus)
    if obstacle:
        share = max(1, usable_cores(machine) // num_ranks)
        return (Binding((), UNKNOWN_NODE, share, obstacle),) * num_ranks
    if mode is BindMode.AUTO:
        mode = BindMode.NUMA if all(gpus) else BindMode.CORE
    if mode is BindMode.NUMA:
        bindings = _wide(machine.cores, places)
    else:
        bindings = [_narrow(each) for each in places]
    return tuple(_finished(binding, machine, num_ranks) for binding in bindings)


def _obstacle(
    machine: Machine, num_ranks: int, mode: BindMode, gpus: Sequence[Gpu | None]
) -> str:
    cores, limit = machine.cores, machine.cpu_limit
    nodes = {core.node for core in cores}
    is_auto, has_gpus = mode is BindMode.AUTO, all(gpus)
    is_wide = mode is BindMode.NUMA or (is_auto and has_gpus)
    obstacles = (
        (mode is BindMode.NONE, "not bound"),
        (not cores, "not bound: the kernel shows no cores"),
        # Such a limit is of time, not of place: neighbours run on the same cores, and
        # who is bound cannot get out of their way.
        (
            is_auto and 0 < limit < len(cores),
            f"not bound: the CPU quota is {limit:g} of {_counted(len(cores))}",
        ),
        (
            is_auto and not has_gpus and num_ranks > len(cores),
            f"not bound: {_counted(len(cores))} for {num_ranks} ranks",
        ),
        (
            is_wide and len(nodes) == 1,
            "not bound: all cores are near the same memory",
        ),
        (
            is_auto and has_gpus and not _all_near(nodes, gpus),
            "not bound: no cores near a GPU, or its place is not known",
        ),
        (
            is_auto and has_gpus and nodes != {gpu.node for gpu in gpus if gpu},
            "not bound: cores that are near no rank's GPU would be idle",
        ),
    )
    return next((text for is_there, text in obstacles if is_there), "")


def _all_near(nodes: set[int], gpus: Sequence[Gpu | None]) -> bool:
    return all(
        gpu is not None and gpu.node != UNKNOWN_NODE and gpu.node in nodes
        for gpu in gpus
    )


def _narrow(rank_place: RankPlace) -> Binding:
    """Give a rank the cores that are its part."""
    cores = rank_place.cores
    num_ranks, name = _part(rank_place)
    if not rank_place.share.has_enough:
        return _on(cores, 1, f"{num_ranks} ranks share {name}", has_enough=False)
    why = f"1/{num_ranks} of {name}" if num_ranks > 1 else name
    return _on(cores, len(cores), why)


def _wide(cores: Sequence[Core], places: Sequence[RankPlace]) -> list[Binding]:
    """Give each rank the whole memory node that its part lies in the middle of."""
    homes = [each.home for each in places]
    bindings: list[Binding] = []
    for each in places:
        own = [core for core in cores if core.node == each.home]
        num_ranks, name = _part(each)
        why = f"memory node near 1/{num_ranks} of {name}"
        bindings.append(_on(own, len(own) // homes.count(each.home), why))
    return bindings


def _part(rank_place: RankPlace) -> tuple[int, str]:
    part = rank_place.share.pool
    near = " near GPU" if part.is_near_gpu else ""
    return len(part.ranks), _counted(len(part.cores)) + near


def _on(
    cores: Sequence[Core], num_cores: int, why: str, *, has_enough: bool = True
) -> Binding:
    cpus = tuple(sorted(cpu for core in cores for cpu in core.cpus))
    nodes = {core.node for core in cores}
    node = nodes.pop() if len(nodes) == 1 else UNKNOWN_NODE
    return Binding(cpus, node, max(1, num_cores), why, has_enough)


def _finished(binding: Binding, machine: Machine, num_ranks: int) -> Binding:
    """Cut the cores to the quota; ask for no memory node where there is but one."""
    share = binding.num_cores
    if machine.cpu_limit:
        share = max(1, min(share, int(machine.cpu_limit / num_ranks)))
    has_choice = len({core.node for core in machine.cores}) > 1
    node = binding.memory_node if has_choice else UNKNOWN_NODE
    return replace(binding, memory_node=node, num_cores=share)


def _counted(num_cores: int) -> str:
    return f"{num_cores} core" + ("" if num_cores == 1 else "s")


def nearest_ports(machine: Machine, gpus: Sequence[Gpu | None]) -> tuple[str, ...]:
    """Return the name of each GPU's nearest port, empty where it is unknown."""
    inventory = inventory_of_machine(machine._replace(cores=()), gpus)
    places = place(inventory, AlignmentRequest(len(gpus), policy=Policy.NONE))
    return tuple(
        inventory.nics[each.nics[0]].name if each.nics else "" for each in places
    )


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """How ranks are to be placed."""

    mode: BindMode
    view: GpuView
    policy: Policy = Policy.BEST_EFFORT


UNPLACED = PlacementRequest(BindMode.NONE, GpuView.ALL)
"""Each rank where the scheduler has it, with all GPUs in view."""


def place_ranks(
    machine: Machine,
    host: Host,
    num_ranks: int,
    request: PlacementRequest,
    environ: Mapping[str, str],
) -> tuple[tuple[RankResources, ...], tuple[str, ...]]:
    """Place the ranks of one host; return also what the user should know of it."""
    seen = visible_gpus(machine.gpus, environ)
    gpus = choose_gpus(seen, host.gpus, host.said_at or host.name)
    devices = assign_gpus(
        gpus, num_ranks, request.view, is_choice=bool(host.gpus), host=host.name
    )
    own = [device.gpu for device in devices]
    bindings = bind(
        machine, num_ranks, request.mode, own, policy=request.policy, host=host.name
    )
    ports = nearest_ports(machine, own)
    places = tuple(
        RankResources(
            num_cores=binding.num_cores,
            cpus=binding.cpus,
            memory_node=binding.memory_node,
            env=device.env,
            device=f"GPU {gpu.visible_as} {gpu.name}".strip() if gpu else "",
            nic=port,
            why=binding.why,
        )
        for binding, device, gpu, port in zip(
            bindings, devices, own, ports, strict=True
        )
    )
    notices: tuple[str, ...] = ()
    if 0 < len(gpus) < num_ranks:
        gap = f"{num_ranks} ranks and fewer GPUs, {len(gpus)}"
        notices += (f"{host.name}: {gap}, so that ranks share them or use none.",)
    crowded = next((b for b in bindings if not b.has_enough), None)
    if crowded:
        notices += (f"{host.name}: {crowded.why}.",)
    return places, notices
