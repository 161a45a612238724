"""Which gradients travel together: a pure plan, so that a predictor can price it."""

import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ronde.collectives import Communicator
from ronde.data_parallel.group import Steps, result_of
from ronde.tuning import Tuner, TuningLog, TuningOptions

ALIGNMENT_BYTES = 64
"""Every gradient starts on a cache line, which vector loads and copies want."""
_MIB = 1 << 20
_SIZES = (25, 100, 8, 50, 4, 12, 1)
"""In MiB: a bucket's sizes to try, the likeliest first."""
_FIRST_SIZES = (1, 0, 4)
"""Those of the first bucket; 0 stands for that of the others."""


class GradientSpec(NamedTuple):
    """What a plan must know of one gradient."""

    numel: int
    itemsize: int  # bytes an element
    kind: Hashable  # equal for gradients that may share a bucket: dtype and device

    @property
    def aligned(self) -> int:
        """Elements up to where the next gradient may begin."""
        step = max(1, ALIGNMENT_BYTES // self.itemsize)
        return -(-self.numel // step) * step


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one gradient in its bucket, in elements."""

    index: int
    offset: int
    numel: int


class BucketPlan(NamedTuple):
    """Gradients that are reduced by one collective."""

    slots: tuple[Slot, ...]  # in the order in which the gradients are expected
    numel: int  # in all, padding included
    kind: Hashable  # as in ``GradientSpec``


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """The sizes in bytes at which a bucket is full; its last gradient may exceed them.

    The first bucket is full early, so that communication starts soon after backward
    does; the others are few, since each collective costs a latency.
    """

    first_bytes: int = 1 << 20
    other_bytes: int = 25 << 20


def plan_buckets(
    specs: Sequence[GradientSpec],
    order: Sequence[int],
    limits: BucketLimits,
    groups: Sequence[Sequence[int]] = (),
) -> tuple[BucketPlan, ...]:
    """Cut gradients into buckets along the order in which backward makes them.

    ``order`` are indices into ``specs``, each at most once. Gradients of one of
    ``groups`` share a bucket (one for each kind), however large, which stands where the
    last of them stands in ``order``. Every index of ``order`` is in exactly one slot;
    offsets are aligned and do not overlap.
    """
    group_of = {index: g for g, group in enumerate(groups) for index in group}
    sizes = Counter((group_of[i], specs[i].kind) for i in order if i in group_of)
    closed: list[list[int]] = []
    open_buckets = defaultdict[Hashable, list[int]](list)
    open_bytes = Counter[Hashable]()
    waiting = defaultdict[tuple[int, Hashable], list[int]](list)
    for index in order:
        spec = specs[index]
        if index in group_of:
            key = (group_of[index], spec.kind)
            waiting[key].append(index)
            if len(waiting[key]) == sizes[key]:
                closed.append(waiting.pop(key))
            continue
        open_buckets[spec.kind].append(index)
        open_bytes[spec.kind] += spec.aligned * spec.itemsize
        limit = limits.other_bytes if closed else limits.first_bytes
        if open_bytes[spec.kind] >= limit:
            closed.append(open_buckets.pop(spec.kind))
            open_bytes[spec.kind] = 0
    closed.extend(open_buckets.values())
    plans: list[BucketPlan] = []
    for members in closed:
        slots: list[Slot] = []
        offset = 0
        for index in members:
            slots.append(Slot(index, offset, specs[index].numel))
            offset += specs[index].aligned
        plans.append(BucketPlan(tuple(slots), offset, specs[members[0]].kind))
    return tuple(plans)


@dataclass(frozen=True, slots=True)
class BucketTuningOptions:
    """How a reducer finds its bucket sizes; ``log`` takes down what rank 0 sees."""

    amount: TuningOptions = field(default_factory=TuningOptions)
    log: TuningLog | None = None


def candidate_limits(
    specs: Sequence[GradientSpec],
    order: Sequence[int],
    default: BucketLimits,
    groups: Sequence[Sequence[int]] = (),
) -> list[BucketLimits]:
    """Return ``default`` and what leads to other buckets than it, each plan once."""
    found: dict[object, BucketLimits] = {}
    pairs = [(first or other, other) for first in _FIRST_SIZES for other in _SIZES]
    tried = [BucketLimits(first * _MIB, other * _MIB) for first, other in pairs]
    for limits in [default, *tried]:
        found.setdefault(plan_buckets(specs, order, limits, groups), limits)
    return list(found.values())


class BucketTuning:
    """Tries bucket sizes on one reducer; rank 0 measures and decides for all ranks.

    ``candidates``, the default first, and ``is_over`` are equal on all ranks.
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

        Returns the limits from now on, equal on all ranks, or None: as they are.
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
        chosen = self._tuner.setting
        numbers = [chosen.first_bytes, chosen.other_bytes, int(self._tuner.is_over)]
        decision = torch.tensor(numbers, device="cpu")
        yield from result_of(self._communicator.broadcast(decision, 0))
        first_bytes, other_bytes, is_over = (int(number) for number in decision)
        self.is_over = bool(is_over)
        self._write()
        return BucketLimits(first_bytes, other_bytes)

    def _write(self) -> None:
        if self._log is None:
            return
        tuner = self._tuner
        rows: list[tuple[str, BucketLimits, float | None]] = [
            (each.phase, each.setting, each.cost) for each in tuner.samples[-1:]
        ]
        if self.is_over:
            rows.append(("best", tuner.setting, tuner.best_cost))
        for phase, limits, cost in rows:
            columns = {
                "first_bucket_bytes": limits.first_bytes,
                "bucket_bytes": limits.other_bytes,
            }
            self._log.add(self._name, phase, columns, cost)
