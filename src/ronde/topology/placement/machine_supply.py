"""What an agent tells of its machine, as what ranks have to share."""

from collections.abc import Sequence

from ronde.topology.machine import UNKNOWN_NODE, Core, Gpu, Machine
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

    Adapters are the ports to train over of which something is known; their memory nodes
    are not told.

    Args:
        machine: As its agent tells.
        gpus: In the order of local ranks, None for a rank without; None for all that
            the machine has.
        host: Its name, for messages.
    """
    own = machine.gpus if gpus is None else tuple(gpus)
    nodes = nodes_of_cores(machine.cores)
    ports = {
        port: n
        for n, port in enumerate(dict.fromkeys(near.port for near in machine.near))
    }
    places = {gpu.bus_id: n for n, gpu in enumerate(own) if gpu}
    return Supply(
        nodes,
        plain_distances(len(nodes)),
        tuple(_device(gpu) for gpu in own),
        tuple(Device(port, UNKNOWN_NODE) for port in ports),
        {
            (places[near.gpu], ports[near.port]): Nearness(near.order)
            for near in machine.near
            if near.gpu in places
        },
        host,
    )


def nodes_of_cores(cores: Sequence[Core]) -> tuple[SupplyNode, ...]:
    """Return cores by memory node."""
    by_node: dict[int, list[Core]] = {}
    for core in sorted(cores, key=lambda core: (core.node, core.cpus)):
        by_node.setdefault(core.node, []).append(core)
    return tuple(SupplyNode(number, tuple(own)) for number, own in by_node.items())


def _device(gpu: Gpu | None) -> Device:
    return Device(gpu.visible_as, gpu.node) if gpu else Device("", UNKNOWN_NODE)
