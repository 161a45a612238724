"""Bucket sizes, chosen by measuring the steps of a training that goes on meanwhile."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ronde.collectives import Communicator
from ronde.data_parallel.buckets import BucketLimits, GradientSpec, plan_buckets
from ronde.data_parallel.resumable import Steps
from ronde.tuning import Tuner, TuningLog, TuningOptions

_MIB = 1 << 20
_SIZES = (25, 100, 8, 50, 4, 12, 1)
"""In MiB: a bucket's sizes to try, the likeliest first."""
_FIRST_SIZES = (1, 0, 4)
"""Those of the first bucket; 0 stands for that of the others."""


@dataclass(frozen=True, slots=True)
class BucketTuningOptions:
    """How a reducer finds its bucket sizes.

    Attributes:
        amount: How much is tried; equal on all ranks.
        log: Takes down what rank 0 sees, or None; the other ranks' is not used.
    """

    amount: TuningOptions = field(default_factory=TuningOptions)
    log: TuningLog | None = None


def candidate_limits(
    specs: Sequence[GradientSpec],
    order: Sequence[int],
    default: BucketLimits,
    groups: Sequence[Sequence[int]] = (),
) -> list[BucketLimits]:
    """Return ``default`` and what leads to other buckets than it, each plan once.

    Args:
        specs: As in ``plan_buckets``.
        order: As in ``plan_buckets``.
        default: Comes first.
        groups: As in ``plan_buckets``.
    """
    found: dict[object, BucketLimits] = {}
    pairs = [(first or other, other) for first in _FIRST_SIZES for other in _SIZES]
    tried = [BucketLimits(first * _MIB, other * _MIB) for first, other in pairs]
    for limits in [default, *tried]:
        plan = plan_buckets(specs, order, limits, groups)
        found.setdefault(plan, limits)
    return list(found.values())


class BucketTuning:
    """Tries bucket sizes on one reducer; rank 0 measures and decides for all ranks.

    Attributes:
        is_over: The choice is made; equal on all ranks.

    Args:
        name: What the log calls the reducer.
        candidates: The limits to try, the default first; equal on all ranks.
        communicator: The reducer's.
        options: How.
    """

    def __init__(
        self,
        name: str,
        candidates: Sequence[BucketLimits],
        communicator: Communicator,
        options: BucketTuningOptions,
    ) -> None:
        self._name = name
        self._communicator = communicator
        self._is_root = communicator.rank == 0
        self._log = options.log if self._is_root else None
        self._num_fed = options.amount.num_fed
        self._tuner = Tuner(candidates, options.amount)
        self.is_over = self._tuner.is_over
        self._num_rounds = 0
        self._write()
        self._last_s = time.perf_counter()

    def round_done(self) -> Steps[BucketLimits | None]:
        """Note the end of a round; collective whenever a sample is complete.

        Returns:
            The limits from now on, equal on all ranks, or None: as they are.
        """
        if self.is_over:
            return None
        now_s = time.perf_counter()
        if self._is_root:
            self._tuner.feed(now_s - self._last_s)
        self._last_s = now_s
        self._num_rounds += 1
        if self._num_rounds % self._num_fed:
            return None
        return (yield from self._decide())

    def _decide(self) -> Steps[BucketLimits]:
        chosen = self._tuner.setting
        numbers = [chosen.first_bytes, chosen.other_bytes, int(self._tuner.is_over)]
        decision = torch.tensor(numbers, device="cpu")
        work = self._communicator.broadcast(decision, 0)
        yield work
        work.wait()
        first_bytes, other_bytes, is_over = (int(number) for number in decision)
        self.is_over = bool(is_over)
        self._write()
        return BucketLimits(first_bytes, other_bytes)

    def _write(self) -> None:
        if self._log is None:
            return
        tuner = self._tuner
        for sample in tuner.samples[-1:]:
            setting = _columns(sample.setting)
            self._log.add(self._name, sample.phase, setting, sample.cost)
        if self.is_over:
            setting = _columns(tuner.setting)
            self._log.add(self._name, "best", setting, tuner.best_cost)


def _columns(limits: BucketLimits) -> dict[str, int]:
    return {
        "first_bucket_bytes": limits.first_bytes,
        "bucket_bytes": limits.other_bytes,
    }
