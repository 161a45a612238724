"""Memory of weights, gradients and optimizer state on a rank, for each ZeRO stage.

Only a rank's parameters after division by pp and tp are counted. A unit is a group of
parameters that FSDP2 gathers and reduces together; units are in the order of the
forward pass. Activations are not counted.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054) for the model states; FSDPMemTracker
of torch 2.13 for the peaks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.units import format_size

_FP32_BYTES = 4
_NUM_LARGEST = 3


class Precision(StrEnum):
    """The dtype of weights and gradients."""

    FP32 = "fp32"
    BF16 = "bf16"  # With an fp32 master copy of the weights.


class OptimizerName(StrEnum):
    """Optimizers for which memory can be estimated. All state is fp32."""

    ADAM = "Adam"
    SGD_MOMENTUM = "SGD momentum"
    SGD = "SGD"


_STATE_BYTES = {
    OptimizerName.ADAM: 8,
    OptimizerName.SGD_MOMENTUM: 4,
    OptimizerName.SGD: 0,
}


class MemoryTerm(NamedTuple):
    """The bytes of one kind of memory on a rank."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The peak memory of a rank, divided by kind."""

    terms: tuple[MemoryTerm, ...]

    @property
    def total_bytes(self) -> int:
        return sum(term.size_bytes for term in self.terms)

    def __str__(self) -> str:
        """Return a table with a row for each kind and a total."""
        rows = [*self.terms, MemoryTerm("total", self.total_bytes)]
        width = max(len(row.name) for row in rows)
        lines = [f"{name:<{width}}  {format_size(size):>9}" for name, size in rows]
        return "\n".join(lines) + "\n"

    def shortage(self, limit_bytes: int) -> str:
        """Return a message if the total exceeds a limit, else an empty string."""
        if self.total_bytes <= limit_bytes:
            return ""
        largest = sorted(self.terms, key=lambda term: -term.size_bytes)[:_NUM_LARGEST]
        names = ", ".join(f"{name} {format_size(size)}" for name, size in largest)
        return (
            f"a rank has {format_size(limit_bytes)} of memory, but needs "
            f"{format_size(self.total_bytes)}. The largest parts are {names}."
        )


@dataclass(frozen=True, slots=True)
class Sharding:
    """The settings that determine the memory of model states.

    Raises:
        UsageError: A number is out of its range.
    """

    num_ranks: int  # The size of dp_shard.
    zero: int  # 1 divides optimizer state, 2 gradients too, 3 also weights.
    precision: Precision = Precision.FP32
    optimizer: OptimizerName = OptimizerName.ADAM

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise UsageError(f"num_ranks must be at least 1, got {self.num_ranks}.")
        if self.zero not in range(4):
            raise UsageError(f"zero must be 0, 1, 2 or 3, got {self.zero}.")

    @property
    def _item_bytes(self) -> int:
        return _FP32_BYTES if self.precision is Precision.FP32 else 2

    def model_states(self, num_params: int) -> RankMemory:
        """Return the memory of model states by the formulas of the ZeRO paper."""
        whole, share = num_params, self._share(num_params)
        master = 0 if self.precision is Precision.FP32 else _FP32_BYTES
        held = share if self.zero else whole
        return _memory(
            ("weights", self._item_bytes * (share if self.zero > 2 else whole)),
            ("gradients", self._item_bytes * (share if self.zero > 1 else whole)),
            ("fp32 weights", master * held),
            (self.optimizer, _STATE_BYTES[self.optimizer] * held),
        )

    def peak(self, units: Sequence[int]) -> RankMemory:
        """Return the peak memory of a step, for units with these parameter counts.

        With zero 0 this includes DDP's buckets (without ``gradient_as_bucket_view``).
        With zero 2 and 3 FSDP2 keeps fp32 shards of weights and gradients; the gathered
        unit and the buffers of running collectives are in ``precision``.
        """
        if not units or min(units) < 1:
            raise UsageError(
                "units must be a non-empty list of positive numbers of parameters, "
                f"got {list(units)}."
            )
        states = self.model_states(sum(units))
        if self.zero == 0:
            buckets = MemoryTerm("DDP buckets", self._item_bytes * sum(units))
            return RankMemory((*states.terms, buckets))
        if self.zero == 1:
            return states
        sharded = sum(map(self._share, units))
        fixed = (
            ("weights", _FP32_BYTES * sharded),
            (self.optimizer, _STATE_BYTES[self.optimizer] * sharded),
        )
        moments = [self._backward(units, unit) for unit in range(len(units))]
        if self.zero == 2:
            moments += [self._forward(units, unit) for unit in range(len(units))]
        peaks = (_memory(*fixed, *moment) for moment in moments)
        return max(peaks, key=lambda memory: memory.total_bytes)

    def _share(self, num_params: int) -> int:
        return -(-num_params // self.num_ranks)

    def _forward(self, units: Sequence[int], unit: int) -> list[tuple[str, int]]:
        """Return the extra memory after ``unit`` is gathered in the forward."""
        before = units[unit - 1] if unit else 0
        gathered = list(accumulate(units))[unit]
        return [
            ("gathered weights", self._item_bytes * gathered),
            ("all_gather", self._item_bytes * (units[unit] + before)),
        ]

    def _backward(self, units: Sequence[int], unit: int) -> list[tuple[str, int]]:
        """Return the extra memory once the gradients of ``unit`` are computed.

        The gradients of the following unit are being reduced meanwhile, and with zero 3
        the weights of the preceding unit are being gathered.
        """
        done = units[unit + 1 :]
        before = units[unit - 1] if unit else 0
        is_resharded = self.zero > 2
        gathered = units[unit] if is_resharded else sum(units[: unit + 1])
        return [
            ("gradients", _FP32_BYTES * sum(map(self._share, done))),
            ("gathered weights", self._item_bytes * gathered),
            ("all_gather", self._item_bytes * before if is_resharded else 0),
            ("unit's gradients", self._item_bytes * units[unit]),
            ("reduce_scatter", self._item_bytes * (done[0] if done else 0)),
        ]


def _memory(*terms: tuple[str, int]) -> RankMemory:
    return RankMemory(tuple(MemoryTerm(*term) for term in terms if term[1]))
