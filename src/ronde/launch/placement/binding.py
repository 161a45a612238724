"""Which cores each rank of a host runs on, and where its memory lies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ronde.launch.slots import usable_cores
from ronde.topology.machine import UNKNOWN_NODE, Core, Gpu, Machine
from ronde.topology.placement.inventory import inventory_of_machine
from ronde.topology.placement.placing import AlignmentRequest, RankPlace, place
from ronde.topology.placement.policies import Policy


class BindMode(StrEnum):
    """How ranks are bound."""

    NONE = "none"
    """Not at all: the scheduler's choice."""

    CORE = "core"
    """Each to cores of its own: an even part of those near its GPU, else of all."""

    NUMA = "numa"
    """Each to all cores of the memory node near its GPU, else of an even part."""

    AUTO = "auto"
    """``numa`` with GPUs, else ``core``; nothing where that leaves cores unused."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What one rank runs on.

    Attributes:
        cpus: Those it may use, ascending; empty for all.
        memory_node: Where its memory is to lie, or ``UNKNOWN_NODE`` for no preference.
        num_cores: Physical cores that it may count on, at least 1.
        why: In a few words.
        has_enough: False where ranks that were to have cores of their own share.
    """

    cpus: tuple[int, ...]
    memory_node: int
    num_cores: int
    why: str
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

    Args:
        machine: What there is to share.
        num_ranks: Ranks of the host.
        mode: How.
        gpus: Each rank's own, or None; as many as there are ranks.
        policy: What becomes of a rank whose cores and GPU are not near the same memory.
        host: Name of the machine, for messages.

    Raises:
        PlacementError: The policy refuses a rank, whether it would be bound or not.
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
    """Return why nobody is bound, or an empty text."""
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
        why = f"{num_ranks} ranks share {name}"
        return _on(cores, 1, why, has_enough=False)
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
    """Return how many ranks divide what, in words."""
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
