"""Which cores each rank of a host runs on, and where its memory lies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ronde.launch.slots import usable_cores
from ronde.topology.machine import UNKNOWN_NODE, Core, Gpu, Machine


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


@dataclass(frozen=True, slots=True)
class _Part:
    """Cores that some ranks divide among them."""

    cores: tuple[Core, ...]
    local_ranks: tuple[int, ...]
    name: str


def bind(
    machine: Machine, num_ranks: int, mode: BindMode, gpus: Sequence[Gpu | None]
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
    """
    obstacle = _obstacle(machine, num_ranks, mode, gpus)
    if obstacle:
        share = max(1, usable_cores(machine) // num_ranks)
        return (Binding((), UNKNOWN_NODE, share, obstacle),) * num_ranks
    if mode is BindMode.AUTO:
        mode = BindMode.NUMA if all(gpus) else BindMode.CORE
    bindings: dict[int, Binding] = {}
    for part in _parts(machine.cores, num_ranks, gpus):
        bound = _wide(part) if mode is BindMode.NUMA else _narrow(part)
        bindings |= dict(zip(part.local_ranks, bound, strict=True))
    return tuple(
        _finished(bindings[rank], machine, num_ranks) for rank in range(num_ranks)
    )


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


def _parts(
    cores: tuple[Core, ...], num_ranks: int, gpus: Sequence[Gpu | None]
) -> list[_Part]:
    """Return what is divided among whom: each GPU's memory node, else everything."""
    near = [UNKNOWN_NODE if gpu is None else gpu.node for gpu in gpus]
    if not _all_near({core.node for core in cores}, gpus):
        return [_Part(cores, tuple(range(num_ranks)), _counted(len(cores)))]
    parts: list[_Part] = []
    for node in sorted(set(near)):
        own = tuple(core for core in cores if core.node == node)
        ranks = tuple(rank for rank in range(num_ranks) if near[rank] == node)
        parts.append(_Part(own, ranks, f"{_counted(len(own))} near GPU"))
    return parts


def _all_near(nodes: set[int], gpus: Sequence[Gpu | None]) -> bool:
    return all(
        gpu is not None and gpu.node != UNKNOWN_NODE and gpu.node in nodes
        for gpu in gpus
    )


def _narrow(part: _Part) -> list[Binding]:
    """Divide a part's cores in blocks, the low ranks' one core larger."""
    num_ranks = len(part.local_ranks)
    if len(part.cores) < num_ranks:
        why = f"{num_ranks} ranks share {part.name}"
        return [_on(part.cores, 1, why, has_enough=False)] * num_ranks
    why = f"1/{num_ranks} of {part.name}" if num_ranks > 1 else part.name
    return [_on(block, len(block), why) for block in _blocks(part.cores, num_ranks)]


def _wide(part: _Part) -> list[Binding]:
    """Give each rank the whole memory node that most of its block is near to."""
    num_ranks, total = len(part.local_ranks), len(part.cores)
    middles = [(2 * n + 1) * total // (2 * num_ranks) for n in range(num_ranks)]
    homes = [part.cores[middle].node for middle in middles]
    bindings: list[Binding] = []
    for home in homes:
        cores = tuple(core for core in part.cores if core.node == home)
        why = f"memory node near 1/{num_ranks} of {part.name}"
        bindings.append(_on(cores, len(cores) // homes.count(home), why))
    return bindings


def _blocks(cores: tuple[Core, ...], num_blocks: int) -> list[tuple[Core, ...]]:
    size, extra = divmod(len(cores), num_blocks)
    starts = [n * size + min(n, extra) for n in range(num_blocks + 1)]
    return [cores[starts[n] : starts[n + 1]] for n in range(num_blocks)]


def _on(
    cores: tuple[Core, ...], num_cores: int, why: str, *, has_enough: bool = True
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
