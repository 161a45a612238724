"""What the ranks of one host share, and what a launcher knows of it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ronde.topology.machine import UNKNOWN_NODE, Core, Gpu, Machine


class InventoryNode(NamedTuple):
    """A memory node with cores."""

    number: int  # The kernel's; ``UNKNOWN_NODE`` for cores that it does not place.
    cores: tuple[Core, ...]  # Those that ranks may use, ascending.


class NearDevice(NamedTuple):
    """A GPU or a network adapter."""

    name: str  # For people and variables: ``0`` of a GPU, ``mlx5_0``.
    node: int  # The memory node near it, or ``UNKNOWN_NODE``.


class Nearness(NamedTuple):
    """How near a network adapter is to a GPU."""

    order: tuple[float, ...]  # Smaller is nearer; of equals, none is better.
    word: str = ""  # The class of the way between them: ``PIX``; empty if unknown.
    gb_per_s: float = 0.0  # What that way carries; 0 if unknown.


class Inventory(NamedTuple):
    """What there is on one host."""

    # Those with cores, by number. Others, of GPUs' or slow memory, are left out: no
    # rank can run there.
    nodes: tuple[InventoryNode, ...]
    # From each node to each, in that order, as the firmware reports them.
    distances: tuple[tuple[int, ...], ...]
    gpus: tuple[NearDevice, ...] = ()  # In the order of local ranks.
    nics: tuple[NearDevice, ...] = ()  # Those to train over.
    # By index of GPU and adapter; no entry where it is unknown.
    nearness: Mapping[tuple[int, int], Nearness] = {}
    host: str = ""  # Its name, for messages.

    @property
    def cores(self) -> tuple[Core, ...]:
        """All cores, by node."""
        return tuple(core for node in self.nodes for core in node.cores)

    def nearest_nics(self, gpu: int) -> tuple[int, ...]:
        """Return the indexes of the adapters that are nearest to a GPU, all equal."""
        own = {nic: near for (each, nic), near in self.nearness.items() if each == gpu}
        best = min((near.order for near in own.values()), default=None)
        return tuple(nic for nic, near in own.items() if near.order == best)

    def numbers_of(self, mask: int) -> tuple[int, ...]:
        """Return the kernel's numbers of a set of nodes."""
        return tuple(n.number for bit, n in enumerate(self.nodes) if mask >> bit & 1)


def inventory_of_machine(
    machine: Machine, gpus: Sequence[Gpu | None] | None = None, host: str = ""
) -> Inventory:
    """Return what a machine has for ranks, as its agent reports it.

    Adapters are the ports to train over whose nearness is known; their memory nodes are
    unknown. ``gpus`` are in the order of local ranks, None for a rank without one;
    without ``gpus`` all that the machine has.
    """
    own = machine.gpus if gpus is None else tuple(gpus)
    nodes = nodes_of_cores(machine.cores)
    titles = dict.fromkeys(near.port for near in machine.near)
    ports = {port: index for index, port in enumerate(titles)}
    places = {gpu.bus_id: index for index, gpu in enumerate(own) if gpu}
    return Inventory(
        nodes,
        plain_distances(len(nodes)),
        tuple(
            NearDevice(gpu.visible_as, gpu.node)
            if gpu
            else NearDevice("", UNKNOWN_NODE)
            for gpu in own
        ),
        tuple(NearDevice(port, UNKNOWN_NODE) for port in ports),
        {
            (places[near.gpu], ports[near.port]): Nearness(near.order)
            for near in machine.near
            if near.gpu in places
        },
        host,
    )


def nodes_of_cores(cores: Sequence[Core]) -> tuple[InventoryNode, ...]:
    """Return cores by memory node."""
    by_node: dict[int, list[Core]] = {}
    for core in sorted(cores, key=lambda core: (core.node, core.cpus)):
        by_node.setdefault(core.node, []).append(core)
    return tuple(InventoryNode(number, tuple(own)) for number, own in by_node.items())


def plain_distances(num_nodes: int) -> tuple[tuple[int, ...], ...]:
    """Return distances where all other nodes are equally far."""
    rows = range(num_nodes)
    return tuple(tuple(10 if a == b else 20 for b in rows) for a in rows)
