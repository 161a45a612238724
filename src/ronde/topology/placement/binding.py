"""Assign GPUs, cores, memory nodes and network ports to the ranks of a host."""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.topology.machine import (
    UNKNOWN_NODE,
    VISIBLE_DEVICES,
    Gpu,
    Machine,
    RankResources,
    select_gpus,
    usable_cores,
    visible_gpus,
)
from ronde.topology.placement.placing import (
    AlignmentRequest,
    Policy,
    inventory_of_machine,
    place,
)
from ronde.units import counted


class GpuView(StrEnum):
    """The GPUs that a rank sees."""

    ALL = "all"  # of its host; its own is number ``LOCAL_RANK``, as under torchrun
    ONE = "one"  # its own alone, as device 0


def choose_gpus(
    gpus: Sequence[Gpu], wanted: Sequence[str], named_at: str
) -> tuple[Gpu, ...]:
    chosen: list[Gpu] = []
    for item in wanted:
        named = gpus[int(item) :] if item.isdecimal() else select_gpus(gpus, item)
        if not named or named[0] in chosen:
            raise UsageError(
                f"gpus must name different GPUs of the {len(gpus)} usable ones, "
                f"counted from 0, got {item!r} ({named_at})."
            )
        chosen.append(named[0])
    return tuple(chosen) if wanted else tuple(gpus)


def assign_gpus(
    gpus: Sequence[Gpu], num_ranks: int, view: GpuView, *, is_choice: bool, host: str
) -> tuple[tuple[Gpu | None, dict[str, str]], ...]:
    """Return the GPU of each rank, and the variables that select it."""
    if view is GpuView.ONE:
        if num_ranks > len(gpus):
            raise UsageError(
                f"--gpu-view one needs a GPU for each rank, but {host} has {num_ranks} "
                f"ranks and {len(gpus)} GPUs. Start fewer ranks there, or leave out "
                "--gpu-view, so that ranks see all GPUs and may share them."
            )
        return tuple((gpu, _seeing([gpu])) for gpu in gpus[:num_ranks])
    env = _seeing(gpus) if is_choice and gpus else {}
    own = [None] * num_ranks if num_ranks > len(gpus) else gpus[:num_ranks]
    return tuple((gpu, env) for gpu in own)


def _seeing(gpus: Sequence[Gpu]) -> dict[str, str]:
    maker = gpus[0].maker
    env = {VISIBLE_DEVICES[maker]: ",".join(gpu.visible_as for gpu in gpus)}
    if maker == "nvidia":
        # GPUs are numbered in bus order here; CUDA's default counts the fastest first.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return env


class BindMode(StrEnum):
    """The method of binding ranks to cores."""

    NONE = "none"  # not at all: the scheduler's choice
    # each rank to its own cores: an equal share of those near its GPU, else of all
    CORE = "core"
    # each rank to all cores of a memory node: near its GPU, else of its equal share
    NUMA = "numa"
    # ``numa`` with GPUs, else ``core``; no binding if cores would be unused
    AUTO = "auto"


def bind(
    machine: Machine,
    num_ranks: int,
    mode: BindMode,
    gpus: Sequence[Gpu | None],
    *,
    policy: Policy = Policy.BEST_EFFORT,
    host: str = "",
) -> tuple[RankResources, ...]:
    """Return the cores and memory node of all ranks of a host.

    ``auto`` binds ranks only if they use all CPUs. With ``core``, ranks share cores
    only if there are fewer cores than ranks. The hardware threads of a core stay
    together.
    """
    # BEST_EFFORT refuses no rank and does not change the shares, so the many sets of
    # memory nodes of a large host need not be tried.
    if policy is Policy.BEST_EFFORT or mode is BindMode.NONE:
        policy = Policy.NONE
    wanted = AlignmentRequest(num_ranks, policy)
    placements = place(inventory_of_machine(machine, gpus, host), wanted)
    for reason in _obstacles(machine, num_ranks, mode, gpus):
        share = max(1, usable_cores(machine) // num_ranks)
        return (RankResources(share, why=f"not bound{reason}"),) * num_ranks
    if mode is BindMode.AUTO:
        mode = BindMode.NUMA if all(gpus) else BindMode.CORE
    homes = [each.home for each in placements]
    has_choice = len({core.node for core in machine.cores}) > 1
    bound: list[RankResources] = []
    for each in placements:
        share, cores, is_enough = each.share, each.cores, each.share.has_enough
        pool = counted(len(share.pool), "core") + " near GPU" * share.is_near_gpu
        part = f"1/{len(share.ranks)} of {pool}"
        num_cores = len(cores) if is_enough else 1
        why = part if len(share.ranks) > 1 else pool
        if mode is BindMode.NUMA:
            # The whole memory node that contains the middle of the rank's share.
            cores = [core for core in machine.cores if core.node == each.home]
            num_cores = len(cores) // homes.count(each.home)
            why, is_enough = f"memory node near {part}", True
        elif not is_enough:
            why = f"{len(share.ranks)} ranks share {pool}"
        if machine.cpu_limit:
            num_cores = min(num_cores, int(machine.cpu_limit / num_ranks))
        nodes = {core.node for core in cores}
        bound.append(
            RankResources(
                num_cores=max(1, num_cores),
                cpus=tuple(sorted(cpu for core in cores for cpu in core.cpus)),
                memory_node=(
                    nodes.pop() if has_choice and len(nodes) == 1 else UNKNOWN_NODE
                ),
                why=why,
                has_enough=is_enough,
            )
        )
    return tuple(bound)


def _obstacles(
    machine: Machine, num_ranks: int, mode: BindMode, gpus: Sequence[Gpu | None]
) -> Iterator[str]:
    """Yield the reasons, if any, to leave all ranks unbound."""
    cores, limit = machine.cores, machine.cpu_limit
    nodes = {core.node for core in cores}
    is_auto, has_gpus = mode is BindMode.AUTO, all(gpus)
    if mode is BindMode.NONE:
        yield ""
    if not cores:
        yield ": the kernel shows no cores"
    # A quota limits time: neighbours run on the same cores, and a bound rank cannot
    # avoid them.
    if is_auto and 0 < limit < len(cores):
        yield f": the CPU quota is {limit:g} of {counted(len(cores), 'core')}"
    if is_auto and not has_gpus and num_ranks > len(cores):
        yield f": {counted(len(cores), 'core')} for {num_ranks} ranks"
    if len(nodes) == 1 and (mode is BindMode.NUMA or (is_auto and has_gpus)):
        yield ": all cores are near the same memory"
    if is_auto and has_gpus:
        gpu_nodes = {gpu.node if gpu else UNKNOWN_NODE for gpu in gpus}
        if not gpu_nodes <= nodes - {UNKNOWN_NODE}:
            yield ": no cores near a GPU, or its memory node is unknown"
        elif nodes != gpu_nodes:
            yield ": cores that are near no rank's GPU would be idle"


def nearest_ports(machine: Machine, gpus: Sequence[Gpu | None]) -> tuple[str, ...]:
    inventory = inventory_of_machine(machine._replace(cores=()), gpus)
    placements = place(inventory, AlignmentRequest(len(gpus), policy=Policy.NONE))
    return tuple(
        inventory.nics[each.nics[0]] if each.nics else "" for each in placements
    )


class PlacementRequest(NamedTuple):
    """The placement options of a host's ranks."""

    mode: BindMode
    view: GpuView
    policy: Policy = Policy.BEST_EFFORT
    # GPUs that the ranks may use, as in ``CUDA_VISIBLE_DEVICES``; empty for all
    gpus: tuple[str, ...] = ()
    named_at: str = ""  # where these are named, for messages


UNPLACED = PlacementRequest(BindMode.NONE, GpuView.ALL)
"""No placement: ranks are not bound and see all GPUs."""


def place_ranks(
    machine: Machine,
    host: str,
    num_ranks: int,
    request: PlacementRequest,
    environ: Mapping[str, str],
) -> tuple[tuple[RankResources, ...], tuple[str, ...]]:
    seen = visible_gpus(machine.gpus, environ)
    chosen = choose_gpus(seen, request.gpus, request.named_at or host)
    devices = assign_gpus(
        chosen, num_ranks, request.view, is_choice=bool(request.gpus), host=host
    )
    own = [gpu for gpu, _ in devices]
    bound = bind(
        machine, num_ranks, request.mode, own, policy=request.policy, host=host
    )
    ports = nearest_ports(machine, own)
    placements = tuple(
        each._replace(
            env=env,
            device=f"GPU {gpu.visible_as} {gpu.name}".strip() if gpu else "",
            nic=port,
        )
        for each, (gpu, env), port in zip(bound, devices, ports, strict=True)
    )
    notices: tuple[str, ...] = ()
    if 0 < len(chosen) < num_ranks:
        gap = f"{num_ranks} ranks and fewer GPUs, {len(chosen)}"
        notices += (f"{host}: {gap}, so that ranks share them or use none.",)
    if crowded := next((each for each in bound if not each.has_enough), None):
        notices += (f"{host}: {crowded.why}.",)
    return placements, notices
