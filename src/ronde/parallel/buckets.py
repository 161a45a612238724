"""The plan of gradients into buckets, each of which is reduced as one vector."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

ALIGNMENT_BYTES = 64
"""The alignment of gradients in a bucket: cache lines, for vector loads and copies."""
_MIB = 1 << 20
_SIZES = (25, 100, 8, 50, 4, 12, 1)
"""Bucket sizes to try, in MiB, the likeliest first."""
_FIRST_SIZES = (1, 0, 4)
"""Sizes of the first bucket to try, in MiB; 0 means the size of the other buckets."""


class GradientSpec(NamedTuple):
    """The properties of a gradient that a plan of buckets needs."""

    numel: int
    itemsize: int  # bytes per element
    kind: Hashable  # equal for gradients that may share a bucket: dtype and device

    @property
    def aligned(self) -> int:  # elements, with padding up to the next gradient
        step = max(1, ALIGNMENT_BYTES // self.itemsize)
        return -(-self.numel // step) * step


@dataclass(frozen=True, slots=True)
class Slot:
    """The slice of one gradient in its bucket, in elements."""

    index: int
    offset: int
    numel: int


class BucketPlan(NamedTuple):
    """The gradients of one bucket, with their slices of its memory."""

    slots: tuple[Slot, ...]  # in the order in which the gradients are expected
    numel: int  # of the bucket, with padding
    kind: Hashable  # as in ``GradientSpec``


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """The sizes in bytes at which a bucket is full; its last gradient may exceed it.

    The first bucket is small, so that communication starts early in backward; the
    others are large, since each collective has a fixed latency.
    """

    first_bytes: int = 1 << 20
    other_bytes: int = 25 << 20


def plan_buckets(
    specs: Sequence[GradientSpec],
    order: Sequence[int],
    limits: BucketLimits,
    groups: Sequence[Sequence[int]] = (),
) -> tuple[BucketPlan, ...]:
    """Divide gradients into buckets in ``order``, the order of backward.

    ``order`` has indices into ``specs``. The gradients of a group share a bucket of any
    size (one for each dtype and device), at the position of the group's last gradient
    in ``order``. Offsets are aligned.
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


def candidate_limits(
    specs: Sequence[GradientSpec],
    order: Sequence[int],
    default: BucketLimits,
    groups: Sequence[Sequence[int]] = (),
) -> list[BucketLimits]:
    """Return ``default`` and other limits that lead to different plans."""
    found = {plan_buckets(specs, order, default, groups): default}
    for first, other in product(_FIRST_SIZES, _SIZES):
        limits = BucketLimits((first or other) * _MIB, other * _MIB)
        found.setdefault(plan_buckets(specs, order, limits, groups), limits)
    return list(found.values())
