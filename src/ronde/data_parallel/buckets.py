"""Which gradients travel together: a pure plan, so that a predictor can price it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 64
"""Every gradient starts on a cache line, which vector loads and copies want."""


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """What a plan must know of one gradient.

    Attributes:
        numel: Number of elements.
        itemsize: Bytes an element.
        kind: What must be equal for two gradients to share a bucket: dtype and device.
    """

    numel: int
    itemsize: int
    kind: Hashable


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one gradient in its bucket, in elements."""

    index: int
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced by one collective.

    Attributes:
        slots: The places, in the order in which the gradients are expected.
        numel: Elements in all, padding included.
        kind: As in ``GradientSpec``.
    """

    slots: tuple[Slot, ...]
    numel: int
    kind: Hashable


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
) -> tuple[Bucket, ...]:
    """Cut gradients into buckets along the order in which backward makes them.

    Args:
        specs: One entry a gradient.
        order: Indices into ``specs``, each at most once; others are left out.
        limits: Sizes at which a bucket is full.
        groups: Gradients that must share a bucket (one for each kind), however large;
            a group stands where its last member stands in ``order``.

    Returns:
        Buckets in the order in which they are expected to be full. Every index of
        ``order`` is in exactly one slot; offsets are aligned and do not overlap.
    """
    group_of = {index: g for g, group in enumerate(groups) for index in group}
    closed: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    waiting: dict[tuple[int, Hashable], list[int]] = {}
    missing = _group_counts(specs, order, group_of)
    for index in order:
        spec = specs[index]
        if index in group_of:
            key = (group_of[index], spec.kind)
            waiting.setdefault(key, []).append(index)
            if len(waiting[key]) == missing[key]:
                closed.append(waiting.pop(key))
            continue
        open_buckets.setdefault(spec.kind, []).append(index)
        size = _aligned(spec) * spec.itemsize
        open_bytes[spec.kind] = open_bytes.get(spec.kind, 0) + size
        limit = limits.other_bytes if closed else limits.first_bytes
        if open_bytes[spec.kind] >= limit:
            closed.append(open_buckets.pop(spec.kind))
            open_bytes[spec.kind] = 0
    closed.extend(open_buckets.values())
    return tuple(_lay_out(specs, members) for members in closed)


def _group_counts(
    specs: Sequence[GradientSpec], order: Sequence[int], group_of: dict[int, int]
) -> dict[tuple[int, Hashable], int]:
    counts: dict[tuple[int, Hashable], int] = {}
    for index in order:
        if index in group_of:
            key = (group_of[index], specs[index].kind)
            counts[key] = counts.get(key, 0) + 1
    return counts


def _aligned(spec: GradientSpec) -> int:
    step = max(1, ALIGNMENT_BYTES // spec.itemsize)
    return -(-spec.numel // step) * step


def _lay_out(specs: Sequence[GradientSpec], members: Sequence[int]) -> Bucket:
    slots: list[Slot] = []
    offset = 0
    for index in members:
        slots.append(Slot(index, offset, specs[index].numel))
        offset += _aligned(specs[index])
    return Bucket(tuple(slots), offset, specs[members[0]].kind)
