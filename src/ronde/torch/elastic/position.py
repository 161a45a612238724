"""The samples of each step, and their division among ranks.

Note [One cursor]
    The position of a whole job is two numbers, equal on all ranks: the epoch, and the
    number of its samples that applied steps have used. The seed determines the order of
    an epoch. Each step takes the next samples in that order and divides them among the
    ranks. So each sample counts once, even if ranks change between two steps, or other
    ranks repeat an undone step.
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError

Ids = NDArray[np.integer]
POLICIES = ("global", "per-rank")


class Position(NamedTuple):
    """The position of a job in its data; equal on all ranks."""

    epoch: int = 0
    samples: int = 0  # of this epoch, in applied steps


class StepShard(NamedTuple):
    """The samples of one rank in one step."""

    start: Position  # before the step
    position: Position  # after the step
    batch_size: int  # of all ranks together
    ids: tuple[int, ...]  # this rank's samples; may be empty
    micro_batches: tuple[tuple[int, ...], ...]  # at least one
    weights: tuple[float, ...]  # of each micro-batch: see ``GradientWeights``


def derive_seed(*numbers: int) -> int:
    """Return a seed of 63 bits that depends on ``numbers`` alone.

    With (seed, epoch, sample id), every rank and every retry gets the same seed.
    """
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


def order_of(num_samples: int, seed: int, epoch: int) -> Ids:
    """Return all sample ids in shuffled order, as int32 if they fit."""
    ids = np.arange(num_samples, dtype=np.int32 if num_samples < 1 << 31 else np.int64)
    np.random.Generator(np.random.PCG64(derive_seed(seed, epoch))).shuffle(ids)
    return ids


def shard_batch(num_samples: int, rank: int, size: int, micro_batch: int = 1) -> slice:
    """Return one rank's slice of a batch, in whole micro-batches.

    Only the last rank's last micro-batch may be short. Ranks differ by at most one
    micro-batch, and no rank has more than the last rank.
    """
    num_micro_batches = -(-num_samples // micro_batch)
    first, end = (num_micro_batches * each // size for each in (rank, rank + 1))
    return slice(first * micro_batch, min(end * micro_batch, num_samples))


@dataclass(slots=True)
class StepSampler:
    """Divides the samples of each step among the ranks.

    Arguments must be equal on all ranks.
    """

    num_samples: int
    batch_size: int  # of all ranks together; with "per-rank" of each
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    micro_batch: int | None = None  # None: one micro-batch per rank
    policy: str = "global"
    _orders: dict[int, Ids] = field(default_factory=dict[int, Ids])

    def __post_init__(self) -> None:
        for name in ("num_samples", "batch_size", "micro_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}.")
        if self.policy not in POLICIES:
            raise UsageError(
                f"policy must be {' or '.join(POLICIES)}, got {self.policy!r}."
            )

    def full_batch(self, size: int) -> int:
        """Return the number of samples in a full step, summed over all ranks."""
        batch = self.batch_size * (size if self.policy == "per-rank" else 1)
        if self.drop_last and batch > self.num_samples:
            raise UsageError(
                "with drop_last a batch must not be larger than the data set: "
                f"{self.num_samples} samples, got {batch} with {size} ranks. "
                "Lower batch_size, or leave drop_last out."
            )
        return batch

    def shard(self, position: Position, rank: int, size: int) -> StepShard:
        """Return a rank's samples of the step that begins at ``position``.

        A rank without samples trains on the batch's first sample, with weight 0.
        """
        full = self.full_batch(size)
        start = self._first_step(position, full)
        batch_size = min(full, self.num_samples - start.samples)
        end = start.samples + batch_size
        share = shard_batch(batch_size, rank, size, self.micro_batch or 1)
        low, high = start.samples + share.start, start.samples + share.stop
        ids = self._ids(start.epoch, low, high)
        position = self._first_step(Position(start.epoch, end), full)
        if not ids:
            filler = self._ids(start.epoch, start.samples, start.samples + 1)
            return StepShard(start, position, batch_size, (), (filler,), (0.0,))
        step = self.micro_batch or len(ids)
        parts = tuple(ids[i : i + step] for i in range(0, len(ids), step))
        weights = tuple(len(part) * size / batch_size for part in parts)
        return StepShard(start, position, batch_size, ids, parts, weights)

    def _first_step(self, position: Position, full: int) -> Position:
        """Return ``position``, or the next epoch's start if no step is left."""
        needed = full if self.drop_last else 1
        is_over = self.num_samples - position.samples < needed
        return Position(position.epoch + 1) if is_over else position

    def _ids(self, epoch: int, low: int, high: int) -> tuple[int, ...]:
        if not self.shuffle:
            return tuple(range(low, high))
        if epoch not in self._orders:
            # Two orders are in use while the next epoch is prefetched.
            for old in sorted(self._orders)[:-1]:
                del self._orders[old]
            self._orders[epoch] = order_of(self.num_samples, self.seed, epoch)
        return tuple(self._orders[epoch][low:high].tolist())
