"""Collectives on two levels: within each host, and between hosts."""

import torch
from torch import Tensor

from ronde.collectives.communicator import Communicator, ReduceOp
from ronde.collectives.engines.hierarchical.levels import (
    EvenLevels,
    LeaderLevels,
    Levels,
)
from ronde.collectives.engines.hierarchical.places import Places
from ronde.collectives.lane import Lane
from ronde.collectives.layered import LayeredCommunicator
from ronde.collectives.vectors import flat

_CPU = torch.device("cpu")


class HierarchicalCommunicator(LayeredCommunicator):
    """A communicator that does on each host what need not cross the network.

    Calls that two levels do not help go over a communicator of all ranks.
    """

    engine = "hierarchical"

    def __init__(
        self,
        world: Communicator,
        local: Communicator,
        cross: Communicator | None,
        places: Places,
    ) -> None:
        """Take communicators over; they are closed with this one.

        Args:
            world: All ranks.
            local: The ranks of this host, in order of rank.
            cross: Where all hosts have equally many ranks, those of this rank's place
                on each, in the order of hosts. Else the first of each host, and None
                on the others.
            places: The ranks of every host.
        """
        self._local, self._cross = local, cross
        self._places = places
        self._levels: Levels = LeaderLevels(places, world.rank, local, cross)
        if places.is_even and cross is not None:
            self._levels = EvenLevels(places, world.rank, local, cross)
        lane = Lane(*([local, cross] if cross else [local]))
        super().__init__(
            world, lane, lambda own: world.all_gather(own.unsqueeze(0)).wait()
        )

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device = _CPU
    ) -> Tensor:
        """Allocate where the host's engine likes it: see ``Communicator``."""
        self._lane.require_open()
        return self._local.allocate(numel, dtype, device)

    def duplicate(self) -> "HierarchicalCommunicator":
        """Make a communicator of the same ranks: see ``Communicator``."""
        self._lane.require_open()
        return HierarchicalCommunicator(
            self._world.duplicate(),
            self._local.duplicate(),
            self._cross.duplicate() if self._cross else None,
            self._places,
        )

    def _reduce(self, vector: Tensor, op: ReduceOp) -> None:
        self._levels.all_reduce(vector, op)

    def _reduce_rows(self, encoded: Tensor, counts: list[int], op: ReduceOp) -> Tensor:
        vector = flat(encoded)
        per_row = vector.numel() // encoded.shape[0]
        sizes = [count * per_row for count in counts]
        own = self._levels.reduce_scatter(vector, sizes, op)
        return own.view(counts[self.rank], *encoded.shape[1:])

    def _gather_rows(self, gathered: Tensor, own: Tensor, counts: list[int]) -> None:
        self._levels.all_gather(gathered, own, counts)

    def _copy(self, vector: Tensor, root: int) -> None:
        self._levels.broadcast(vector, root)
