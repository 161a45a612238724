"""All that is decided of each rank of a host: GPU, cores, memory node, adapter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ronde.launch.hosts.host import Host
from ronde.launch.placement.binding import Binding, BindMode, bind
from ronde.launch.placement.devices import GpuView, assign_gpus, choose_gpus
from ronde.launch.placement.nearness import nearest_ports
from ronde.launch.placement.place import Place
from ronde.topology.machine import Gpu, Machine, visible_gpus
from ronde.topology.placement.policies import Policy


@dataclass(frozen=True, slots=True)
class Placement:
    """Where all ranks of a host sit.

    Attributes:
        places: By local rank.
        notices: What the user should know of it, each a sentence.
    """

    places: tuple[Place, ...]
    notices: tuple[str, ...]


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
) -> Placement:
    """Place the ranks of one host.

    Args:
        machine: What the host's agent says that there is.
        host: As the user named it.
        num_ranks: Ranks that it gets, at least 1.
        request: How.
        environ: What all ranks are told: it may hide GPUs.

    Raises:
        UsageError: There are not the GPUs that were asked for.
        PlacementError: The policy refuses a rank.
    """
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
        Place(
            num_cores=binding.num_cores,
            cpus=binding.cpus,
            memory_node=binding.memory_node,
            env=device.env,
            device=_title(device.gpu),
            nic=port,
            why=binding.why,
        )
        for binding, device, port in zip(bindings, devices, ports, strict=True)
    )
    return Placement(places, tuple(_notices(host.name, num_ranks, gpus, bindings)))


def _title(gpu: Gpu | None) -> str:
    return f"GPU {gpu.visible_as} {gpu.name}".strip() if gpu else ""


def _notices(
    name: str, num_ranks: int, gpus: Sequence[Gpu], bindings: Sequence[Binding]
) -> list[str]:
    notices: list[str] = []
    if 0 < len(gpus) < num_ranks:
        notices.append(
            f"{name}: {num_ranks} ranks and fewer GPUs, {len(gpus)}, so that ranks "
            "share them or use none."
        )
    crowded = next((b for b in bindings if not b.has_enough), None)
    if crowded:
        notices.append(f"{name}: {crowded.why}.")
    return notices
