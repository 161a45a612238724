"""How the buckets of one reducer become their sums over all ranks."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ronde.collectives import Communicator, ReduceOp, Work
from ronde.data_parallel.buckets import Slot
from ronde.data_parallel.compressor import (
    BF16Compressor,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)
from ronde.data_parallel.gradient import Gradient


@dataclass(frozen=True, slots=True)
class BucketContent:
    """What a bucket holds.

    Attributes:
        memory: Flat: the values, and the control numbers behind them.
        values: The gradients, and padding.
        control: What ranks tell each other; is summed as it is, in small numbers.
        slots: Each gradient's place in ``values``; what lies between is padding.
        gradients: One a slot; ``was_used`` tells which this rank has.
        prescale: Multiplies the values in their sum: backward writes gradients to their
            places, and nothing should touch them again. None where they are scaled when
            they get there. Whether it is None is the same on all ranks.
    """

    memory: Tensor
    values: Tensor
    control: Tensor
    slots: Sequence[Slot]
    gradients: Sequence[Gradient]
    prescale: float | None = None


class PendingSum(ABC):
    """A bucket's sum under way: one collective, or two that follow each other.

    All ranks call ``advance`` in the same order relative to their other collectives.
    """

    @abstractmethod
    def works(self) -> Iterable[Work[Any]]:
        """Return what the next ``arrive``, ``advance`` or ``finish`` waits for.

        On an accelerator nothing: there waiting only orders what comes next.
        """

    @abstractmethod
    def arrive(self) -> None:
        """Wait for what comes first: the control numbers are summed then.

        Raises:
            CollectiveError: It failed.
        """

    def advance(self) -> None:
        """Wait for the first collective and start the second, if there is one."""
        self.arrive()

    def finish(self) -> None:
        """Wait for the rest: the values are the sum then.

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
        """Start the sum of ``content.memory`` over all ranks, in place; collective."""


class CompressingReduction(BucketReduction):
    """Sums what a compressor makes of a whole bucket.

    The control numbers travel with the values where the compressor is one of ours,
    which keep small integers. What a user's own makes of them nobody knows: they travel
    by themselves then, and also where only the values are to be scaled.
    """

    def __init__(self, compressor: type[Compressor]) -> None:
        self._compressor = compressor
        self._is_ours = compressor in (NoneCompressor, FP16Compressor, BF16Compressor)

    def launch(self, content: BucketContent, communicator: Communicator) -> PendingSum:
        """Compress the values and start the sum."""
        prescale = content.prescale
        if self._is_ours and prescale is None:
            return _CompressedSum(self._compressor, content.memory, communicator)
        control = communicator.all_reduce(content.control, ReduceOp.SUM)
        if not content.values.numel():
            return _CompressedSum(NoneCompressor, content.values, communicator, control)
        return _CompressedSum(
            self._compressor, content.values, communicator, control, prescale or 1.0
        )


class _CompressedSum(PendingSum):
    def __init__(
        self,
        compressor: type[Compressor],
        values: Tensor,
        communicator: Communicator,
        control: Work[Tensor] | None = None,
        prescale: float = 1.0,
    ) -> None:
        self._compressor = compressor
        self._values = values
        self._control = control
        wire, self._context = compressor.compress(values)
        self._work: Work[Tensor] | None = communicator.all_reduce(
            wire, ReduceOp.SUM, prescale=prescale
        )

    def works(self) -> Iterable[Work[Any]]:
        if self._work is None or not self._values.is_cpu:
            return ()
        return (self._work,) if self._control is None else (self._control, self._work)

    def arrive(self) -> None:
        if self._work is None:
            return
        if self._control is not None:
            self._control.wait()
        result = self._compressor.decompress(self._work.wait(), self._context)
        if result is not self._values:
            self._values.copy_(result)
        self._work = None
