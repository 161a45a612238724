"""Collectives by schedules, over another engine's point-to-point calls."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ronde.collectives.algorithms import find_algorithm
from ronde.collectives.engine import Engine, ReduceOp
from ronde.collectives.engines.scheduled.executor import PIECE_BYTES, Executor
from ronde.collectives.engines.scheduled.programs import Programs
from ronde.collectives.lane import Lane, LaneEngine


class ScheduledEngine(LaneEngine):
    """Follows an algorithm's schedules.

    It sends and receives over a clone of another engine, whose own calls do what has no
    schedule.

    Attributes:
        algorithm: Name of the algorithm.
    """

    name = "scheduled"

    def __init__(self, inner: Engine, algorithm: str = "ring") -> None:
        """Take an engine over; collective.

        Args:
            inner: What moves the messages; closed with this one.
            algorithm: One of ``ALGORITHMS``, equal on all ranks.

        Raises:
            UsageError: There is no such algorithm.
        """
        self.algorithm = find_algorithm(algorithm).name
        self._programs = Programs(algorithm, inner.rank, inner.size, PIECE_BYTES)
        messages = inner.clone()
        self._executor = Executor(messages)
        super().__init__(inner, Lane(messages))

    def gather_numbers(self, own: Tensor, call: str) -> Tensor:
        """Return every rank's vector of numbers; blocks."""
        gathered = own.new_empty((self.size, own.numel()))
        gathered[self.rank] = own
        # So short a message is told in the fewest rounds, whatever the algorithm is.
        programs = replace(self._programs, algorithm="halving_doubling")
        program = programs.all_gather((own.nbytes,) * self.size)
        vector = gathered.view(-1).view(torch.uint8)
        self._submit(call, lambda: self._executor.run(program, vector)).wait()
        return gathered

    def clone(self) -> "ScheduledEngine":
        """Make another of the same ranks: see ``Engine``."""
        return ScheduledEngine(self._world.clone(), self.algorithm)

    def _reduce(self, vector: Tensor, op: ReduceOp) -> None:
        program = self._programs.all_reduce(vector.numel(), vector.element_size())
        self._executor.run(program, vector, op)

    def _reduce_parts(
        self, vector: Tensor, counts: Sequence[int], op: ReduceOp
    ) -> Tensor:
        copy = vector.clone()
        program = self._programs.reduce_scatter(tuple(counts), vector.element_size())
        self._executor.run(program, copy, op)
        return torch.split(copy, list(counts))[self.rank]

    def _gather(self, out: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        place = torch.split(out, list(counts))[self.rank]
        if place.data_ptr() != own.data_ptr():
            place.copy_(own)
        self._executor.run(self._programs.all_gather(tuple(counts)), out)

    def _copy(self, data: Tensor, root: int) -> None:
        self._executor.run(self._programs.broadcast(data.numel(), root), data)
