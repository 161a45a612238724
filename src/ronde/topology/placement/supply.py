"""What the ranks of one host have to share, whatever told of it."""

from collections.abc import Mapping
from typing import NamedTuple

from ronde.topology.machine import UNKNOWN_NODE, Core


class SupplyNode(NamedTuple):
    """A memory node with cores.

    Attributes:
        number: The kernel's; ``UNKNOWN_NODE`` for cores that it does not place.
        cores: Those that ranks may use, ascending.
        memory_bytes: Of it in all; -1 where not told.
        free_bytes: Of it free; -1 where not told.
    """

    number: int
    cores: tuple[Core, ...]
    memory_bytes: int = -1
    free_bytes: int = -1


class Device(NamedTuple):
    """A GPU or a network adapter.

    Attributes:
        name: For people and variables: ``0`` of a GPU, ``mlx5_0``.
        node: Number of the memory node near it, or ``UNKNOWN_NODE``.
    """

    name: str
    node: int


class Nearness(NamedTuple):
    """How near a network adapter is to a GPU.

    Attributes:
        order: Smaller is nearer; of equals, none is better.
        word: The class of the way between them: ``PIX``; empty where not told.
        gb_per_s: What that way carries; 0 where not told.
    """

    order: tuple[float, ...]
    word: str = ""
    gb_per_s: float = 0.0


class Supply(NamedTuple):
    """What there is on one host.

    Attributes:
        nodes: Those with cores, by number. Others, of GPUs' or slow memory, are left
            out: no rank can run there.
        distances: From each node to each, in that order, as firmware tells them.
        gpus: In the order of local ranks.
        nics: Those to train over.
        nearness: By place of GPU and adapter; no entry where nothing is known.
        host: Its name, for messages; empty for none.
    """

    nodes: tuple[SupplyNode, ...]
    distances: tuple[tuple[int, ...], ...]
    gpus: tuple[Device, ...] = ()
    nics: tuple[Device, ...] = ()
    nearness: Mapping[tuple[int, int], Nearness] = {}
    host: str = ""

    @property
    def cores(self) -> tuple[Core, ...]:
        """All cores, by node."""
        return tuple(core for node in self.nodes for core in node.cores)

    def nearest_nics(self, gpu: int) -> tuple[int, ...]:
        """Return the places of the adapters that are nearest to a GPU, all equal."""
        own = {nic: near for (each, nic), near in self.nearness.items() if each == gpu}
        best = min((near.order for near in own.values()), default=None)
        return tuple(nic for nic, near in own.items() if near.order == best)

    def bit_of(self, node: int) -> int | None:
        """Return the place of a node among ``nodes``; None where it has no cores."""
        if node == UNKNOWN_NODE:
            return None
        numbers = [each.number for each in self.nodes]
        return numbers.index(node) if node in numbers else None

    def numbers_of(self, mask: int) -> tuple[int, ...]:
        """Return the kernel's numbers of a set of nodes."""
        return tuple(n.number for bit, n in enumerate(self.nodes) if mask >> bit & 1)


def plain_distances(num_nodes: int) -> tuple[tuple[int, ...], ...]:
    """Return what firmware tells where all other nodes are equally far."""
    rows = range(num_nodes)
    return tuple(tuple(10 if a == b else 20 for b in rows) for a in rows)
