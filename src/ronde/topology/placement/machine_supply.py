"""What an agent tells of its machine, as what ranks have to share."""

from collections import Counter
from collections.abc import Sequence

from ronde.topology.machine import UNKNOWN_NODE, Core, Gpu, Machine, Nic
from ronde.topology.placement.bus_nearness import bus_nearness
from ronde.topology.placement.supply import (
    Device,
    Nearness,
    Supply,
    SupplyNode,
    plain_distances,
)


def supply_of_machine(
    machine: Machine, gpus: Sequence[Gpu | None] | None = None, host: str = ""
) -> Supply:
    """Return what a machine has for ranks.

    Args:
        machine: As its agent tells.
        gpus: In the order of local ranks, None for a rank without; None for all that
            the machine has.
        host: Its name, for messages.
    """
    own = machine.gpus if gpus is None else tuple(gpus)
    nics = training_nics(machine.nics)
    nodes = nodes_of_cores(machine.cores)
    return Supply(
        nodes,
        plain_distances(len(nodes)),
        tuple(_device(gpu) for gpu in own),
        tuple(Device(nic.name, nic.node) for nic in nics),
        _nearness(own, nics),
        host,
    )


def nodes_of_cores(cores: Sequence[Core]) -> tuple[SupplyNode, ...]:
    """Return cores by memory node."""
    by_node: dict[int, list[Core]] = {}
    for core in sorted(cores, key=lambda core: (core.node, core.cpus)):
        by_node.setdefault(core.node, []).append(core)
    return tuple(SupplyNode(number, tuple(own)) for number, own in by_node.items())


def training_nics(nics: Sequence[Nic]) -> list[Nic]:
    """Return the adapters to train over: the others serve storage or logins.

    Where RDMA adapters are, only those count, and of them only those of the rate that
    most have.
    """
    placed = [nic for nic in nics if nic.path]
    adapters = [nic for nic in placed if nic.kind == "infiniband"] or placed
    rates = Counter(nic.mbit_per_s for nic in adapters)
    usual = max(rates, key=lambda rate: (rates[rate], rate), default=0)
    return [nic for nic in adapters if nic.mbit_per_s == usual]


def _device(gpu: Gpu | None) -> Device:
    return Device(gpu.visible_as, gpu.node) if gpu else Device("", UNKNOWN_NODE)


def _nearness(
    gpus: Sequence[Gpu | None], nics: Sequence[Nic]
) -> dict[tuple[int, int], Nearness]:
    found: dict[tuple[int, int], Nearness] = {}
    for a, gpu in enumerate(gpus):
        if gpu is None:
            continue
        for b, nic in enumerate(nics):
            paths = gpu.path.split("/"), nic.path.split("/")
            nearness = bus_nearness(*paths, (gpu.node, nic.node))
            if nearness:
                found[a, b] = nearness
    return found
