"""Collectives on two levels: within each host, and between hosts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ronde.collectives.communicator import Communicator
from ronde.collectives.engine import Engine, ReduceOp
from ronde.collectives.engines.hierarchical.levels import (
    EvenLevels,
    LeaderLevels,
    Levels,
)
from ronde.collectives.engines.hierarchical.places import Places
from ronde.collectives.lane import Lane, LaneEngine


class HierarchicalEngine(LaneEngine):
    """Does on each host what need not cross the network."""

    name = "hierarchical"

    def __init__(
        self,
        world: Engine,
        local: Communicator,
        cross: Communicator | None,
        places: Places,
    ) -> None:
        """Take communicators over; they are closed with this one.

        Args:
            world: All ranks; it has the calls that two levels do not help.
            local: The ranks of this host, in order of rank.
            cross: Where all hosts have equally many ranks, those of this rank's place
                on each, in the order of hosts. Else the first of each host, and None
                on the others.
            places: The ranks of every host.
        """
        super().__init__(world, Lane(*([local, cross] if cross else [local])))
        self._local, self._cross = local, cross
        self._places = places
        self._levels: Levels = LeaderLevels(places, world.rank, local, cross)
        if places.is_even and cross is not None:
            self._levels = EvenLevels(places, world.rank, local, cross)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate where the host's engine likes it: see ``Engine``."""
        self.require_open()
        return self._local.allocate(numel, dtype, device)

    def clone(self) -> "HierarchicalEngine":
        """Make another of the same ranks: see ``Engine``."""
        self.require_open()
        return HierarchicalEngine(
            self._world.clone(),
            self._local.duplicate(),
            self._cross.duplicate() if self._cross else None,
            self._places,
        )

    def _reduce(self, vector: Tensor, op: ReduceOp) -> None:
        self._levels.all_reduce(vector, op)

    def _reduce_parts(
        self, vector: Tensor, counts: Sequence[int], op: ReduceOp
    ) -> Tensor:
        return self._levels.reduce_scatter(vector, counts, op)

    def _gather(self, out: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        self._levels.all_gather(out, own, counts)

    def _copy(self, data: Tensor, root: int) -> None:
        self._levels.broadcast(data, root)
