"""The samples of each step, and their division among ranks: pure functions.

Note [One cursor]
    The position of a whole job is two numbers, equal on all ranks: the epoch, and the
    number of its samples in applied steps. The order of an epoch follows from the seed,
    a step takes the next samples of it, and their division follows from the number of
    ranks. So ranks may come and go between two steps, and a step may be undone and
    repeated by other ranks: each sample still counts once.
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
    samples: int = 0  # of the epoch, in steps that were applied


class StepShard(NamedTuple):
    """The samples of one rank in one step."""

    start: Position  # before the step
    position: Position  # after it
    batch_size: int  # of all ranks together
    ids: tuple[int, ...]  # this rank's samples; may be empty
    micro_batches: tuple[tuple[int, ...], ...]  # at least one
    weights: tuple[float, ...]  # of each micro-batch: see ``GradientWeights``


def derive_seed(*numbers: int) -> int:
    """Return a seed of 63 bits that depends on ``numbers`` alone.

    These may be (seed, epoch, sample id): equal on any rank and in any attempt.
    """
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


def order_of(num_samples: int, seed: int, epoch: int) -> Ids:
    """Return the shuffled ids of all samples, as int32 below 2^31 samples."""
    ids = np.arange(num_samples, dtype=np.int32 if num_samples < 1 << 31 else np.int64)
    np.random.Generator(np.random.PCG64(derive_seed(seed, epoch))).shuffle(ids)
    return ids


def shard_batch(num_samples: int, rank: int, size: int, micro_batch: int = 1) -> slice:
    """Return this rank's part of a batch, in micro-batches; the last may be short.

    Ranks differ by at most one micro-batch. The last rank, with the short one, never
    has fewer than another.
    """
    num_micro_batches = -(-num_samples // micro_batch)
    first, end = (num_micro_batches * each // size for each in (rank, rank + 1))
    return slice(first * micro_batch, min(end * micro_batch, num_samples))


@dataclass(slots=True)
class StepSampler:
    """Divides the samples of a data set; equal arguments on all ranks."""

    num_samples: int
    batch_size: int  # of all ranks, or with "per-rank" of each
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    micro_batch: int | None = None  # None: one micro-batch a rank
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
        """Return the number of samples of a full step of ``size`` ranks."""
        batch = self.batch_size * (size if self.policy == "per-rank" else 1)
        if self.drop_last and batch > self.num_samples:
            raise UsageError(
                "with drop_last a batch must be at most the data set: "
                f"{self.num_samples} samples, got {batch} with {size} ranks. "
                "Lower batch_size, or keep the last batch."
            )
        return batch

    def shard(self, position: Position, rank: int, size: int) -> StepShard:
        """Return a rank's samples of the step that begins at ``position``.

        A rank without samples trains on the first one of the batch, with weight 0.
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
        """Return the next epoch's beginning if this one has no step left."""
        needed = full if self.drop_last else 1
        is_over = self.num_samples - position.samples < needed
        return Position(position.epoch + 1) if is_over else position

    def _ids(self, epoch: int, low: int, high: int) -> tuple[int, ...]:
        if not self.shuffle:
            return tuple(range(low, high))
        if epoch not in self._orders:
            # Two are in use while the next epoch is prefetched.
            for old in sorted(self._orders)[:-1]:
                del self._orders[old]
            self._orders[epoch] = order_of(self.num_samples, self.seed, epoch)
        return tuple(self._orders[epoch][low:high].tolist())
