"""How the buckets of one reducer become their sums over all ranks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ronde.collectives import Communicator, ReduceOp, Work
from ronde.data_parallel.buckets import Slot
from ronde.data_parallel.compressor import Compressor
from ronde.data_parallel.gradient import Gradient


@dataclass(frozen=True, slots=True)
class BucketContent:
    """What a bucket holds.

    Attributes:
        buffer: Flat; what follows the last slot is no gradient and is summed as it is.
        slots: Each gradient's place in ``buffer``; what lies between is padding.
        gradients: One a slot; ``was_used`` tells which this rank has.
    """

    buffer: Tensor
    slots: Sequence[Slot]
    gradients: Sequence[Gradient]


class PendingSum(ABC):
    """A bucket's sum under way: one collective, or two that follow each other.

    All ranks call ``advance`` in the same order relative to their other collectives.
    """

    @abstractmethod
    def is_arrived(self) -> bool:
        """Say whether ``arrive()`` would return without waiting."""

    @abstractmethod
    def arrive(self) -> None:
        """Wait for the first collective: what follows the last slot is summed then.

        Raises:
            CollectiveError: It failed.
        """

    def advance(self) -> None:
        """Wait for the first collective and start the second, if there is one."""
        self.arrive()

    def finish(self) -> None:
        """Wait for the rest: the buffer is the sum then.

        Raises:
            CollectiveError: A collective failed.
        """
        self.arrive()


class BucketReduction(ABC):
    """Sums the buckets of one reducer, and keeps what must last between rounds.

    What it keeps belongs to parameters, not to buckets: those are planned anew.
    """

    @abstractmethod
    def launch(self, content: BucketContent, communicator: Communicator) -> PendingSum:
        """Start the sum of ``content.buffer`` over all ranks, in place; collective."""


class CompressingReduction(BucketReduction):
    """Sums what a compressor makes of a whole bucket."""

    def __init__(self, compressor: type[Compressor]) -> None:
        self._compressor = compressor

    def launch(self, content: BucketContent, communicator: Communicator) -> PendingSum:
        """Compress the buffer and start the sum."""
        wire, context = self._compressor.compress(content.buffer)
        work = communicator.all_reduce(wire, ReduceOp.SUM)
        return _CompressedSum(self._compressor, context, content.buffer, work)


class _CompressedSum(PendingSum):
    def __init__(
        self,
        compressor: type[Compressor],
        context: object,
        buffer: Tensor,
        work: Work[Tensor],
    ) -> None:
        self._compressor = compressor
        self._context = context
        self._buffer = buffer
        self._work: Work[Tensor] | None = work

    def is_arrived(self) -> bool:
        return self._work is None or self._work.is_done()

    def arrive(self) -> None:
        if self._work is None:
            return
        result = self._compressor.decompress(self._work.wait(), self._context)
        if result is not self._buffer:
            self._buffer.copy_(result)
        self._work = None
