"""Collectives by schedules, over another engine's point-to-point calls."""

from dataclasses import replace

from torch import Tensor

from ronde.collectives.algorithms import find_algorithm
from ronde.collectives.arithmetic import as_bytes, put_back
from ronde.collectives.communicator import Communicator, ReduceOp
from ronde.collectives.engines.scheduled.executor import PIECE_BYTES, Executor
from ronde.collectives.engines.scheduled.programs import Programs
from ronde.collectives.lane import Lane
from ronde.collectives.layered import LayeredCommunicator
from ronde.collectives.vectors import flat


class ScheduledCommunicator(LayeredCommunicator):
    """A communicator that follows an algorithm's schedules.

    It sends and receives over a duplicate of another communicator, whose own calls do
    what has no schedule.

    Attributes:
        algorithm: Name of the algorithm.
    """

    engine = "scheduled"

    def __init__(self, inner: Communicator, algorithm: str = "ring") -> None:
        """Take a communicator over; collective.

        Args:
            inner: What moves the messages; closed with this one.
            algorithm: One of ``ALGORITHMS``, equal on all ranks.

        Raises:
            UsageError: There is no such algorithm.
        """
        self.algorithm = find_algorithm(algorithm).name
        self._programs = Programs(algorithm, inner.rank, inner.size, PIECE_BYTES)
        messages = inner.duplicate()
        self._executor = Executor(messages)
        super().__init__(inner, Lane(messages), self._gather_numbers)

    def duplicate(self) -> "ScheduledCommunicator":
        """Make a communicator of the same ranks: see ``Communicator``."""
        return ScheduledCommunicator(self._world.duplicate(), self.algorithm)

    def _reduce(self, vector: Tensor, op: ReduceOp) -> None:
        program = self._programs.all_reduce(vector.numel(), vector.element_size())
        self._executor.run(program, vector, op)

    def _reduce_rows(self, encoded: Tensor, counts: list[int], op: ReduceOp) -> Tensor:
        vector = flat(encoded)
        per_row = vector.numel() // encoded.shape[0]
        sizes = tuple(count * per_row for count in counts)
        program = self._programs.reduce_scatter(sizes, vector.element_size())
        self._executor.run(program, vector, op)
        first = sum(counts[: self.rank])
        return encoded[first : first + counts[self.rank]]

    def _gather_rows(self, gathered: Tensor, own: Tensor, counts: list[int]) -> None:
        first = sum(counts[: self.rank])
        put_back(own, gathered[first : first + counts[self.rank]])
        self._executor.run(self._programs.all_gather(tuple(counts)), gathered)

    def _copy(self, vector: Tensor, root: int) -> None:
        self._executor.run(self._programs.broadcast(vector.numel(), root), vector)

    def _gather_numbers(self, own: Tensor) -> Tensor:
        """Return every rank's vector of numbers, a row a rank; collective, blocking."""
        gathered = own.new_empty((self.size, own.numel()))
        gathered[self.rank] = own
        # So short a message is told in the fewest rounds, whatever the algorithm is.
        programs = replace(self._programs, algorithm="halving_doubling")
        program = programs.all_gather((own.numel() * own.element_size(),) * self.size)
        vector = as_bytes(gathered)
        self._submit("agreeing", lambda: self._executor.run(program, vector)).wait()
        return gathered
