"""Which collective a table is of, and over how many ranks, by its own figures.

busbw is algbw times a factor that depends on the collective and the number of ranks
alone: a log that names neither still tells much.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ronde.bench.rows import Row, Side
from ronde.bench.runs import RankCount, RankSource


class Factor(Enum):
    """How busbw follows from algbw among n ranks."""

    ALL_REDUCE = "2(n-1)/n"
    ALL_OTHERS = "(n-1)/n"
    ONE = "1"

    def of(self, num_ranks: float) -> float:
        """Return busbw by algbw among ``num_ranks``."""
        if self is Factor.ONE:
            return 1.0
        others = (num_ranks - 1) / num_ranks
        return 2 * others if self is Factor.ALL_REDUCE else others

    def num_ranks(self, ratio: float) -> float:
        """Return the number of ranks that gives ``ratio``; infinity beyond all."""
        limit = {Factor.ALL_REDUCE: 2.0, Factor.ALL_OTHERS: 1.0}.get(self)
        if limit is None or ratio >= limit:
            return math.inf
        return limit / (limit - ratio)


@dataclass(frozen=True, slots=True)
class Shape:
    """What all rows of one test have in common.

    Attributes:
        factor: busbw by algbw.
        has_operation: Whether rows name a reduction.
        has_root: Whether rows name a root.
    """

    factor: Factor
    has_operation: bool
    has_root: bool


# Source: nccl-tests 2.19; sendrecv prints an operation that it does not use.
TESTS = {
    "all_reduce": Shape(Factor.ALL_REDUCE, has_operation=True, has_root=False),
    "reduce": Shape(Factor.ONE, has_operation=True, has_root=True),
    "broadcast": Shape(Factor.ONE, has_operation=False, has_root=True),
    "all_gather": Shape(Factor.ALL_OTHERS, has_operation=False, has_root=False),
    "reduce_scatter": Shape(Factor.ALL_OTHERS, has_operation=True, has_root=False),
    "alltoall": Shape(Factor.ALL_OTHERS, has_operation=False, has_root=False),
    "alltoallv": Shape(Factor.ALL_OTHERS, has_operation=False, has_root=False),
    "scatter": Shape(Factor.ALL_OTHERS, has_operation=False, has_root=True),
    "gather": Shape(Factor.ALL_OTHERS, has_operation=False, has_root=True),
    "sendrecv": Shape(Factor.ONE, has_operation=True, has_root=False),
    "hypercube": Shape(Factor.ONE, has_operation=False, has_root=False),
}


@dataclass(frozen=True, slots=True)
class _Interval:
    """Ratios of busbw to algbw that one printed pair allows."""

    low: float
    high: float
    middle: float

    def allows(self, ratio: float) -> bool:
        """Say whether ``ratio`` would have been printed so."""
        slack = 1e-9
        return self.low - slack <= ratio <= self.high + slack


def infer_ranks(test: str, rows: Sequence[Row]) -> RankCount:
    """Return how many ranks a test's figures speak of.

    Printed figures are rounded, so that several numbers may agree with them: ``low``
    to ``high``. Nothing is known where the factor hardly depends on the number.

    Args:
        test: A name from ``TESTS``; any other tells nothing.
        rows: In any order; the largest sizes tell the most.
    """
    shape = TESTS.get(test)
    intervals = _intervals(rows)
    if shape is None or shape.factor is Factor.ONE or not intervals:
        return RankCount()
    factor = shape.factor
    best = intervals[0]
    low = max(factor.num_ranks(max(each.low, 0.0)) for each in intervals)
    high = min(factor.num_ranks(each.high) for each in intervals)
    if low > high:
        # Rows of several worlds, or a release that rounds otherwise.
        low, high = factor.num_ranks(max(best.low, 0.0)), factor.num_ranks(best.high)
    if not math.isfinite(low):
        return RankCount()  # more than any number of ranks gives
    first, middle = math.ceil(low - 1e-9), factor.num_ranks(best.middle)
    if not math.isfinite(high) or not math.isfinite(middle):
        return RankCount(low=max(first, 1))
    last = math.floor(high + 1e-9)
    if first > last:
        return RankCount()
    value = min(max(round(middle), first), last)
    return RankCount(value, RankSource.RATIO, first, last)


def agrees(test: str, num_ranks: int, rows: Sequence[Row]) -> bool:
    """Say whether the figures may be those of ``num_ranks`` ranks."""
    shape = TESTS.get(test)
    intervals = _intervals(rows)
    if shape is None or not intervals:
        return True
    return num_ranks == 1 or intervals[0].allows(shape.factor.of(num_ranks))


def infer_tests(rows: Sequence[Row], num_ranks: int | None) -> list[str]:
    """Return the names of all tests that could have printed these rows.

    Args:
        rows: Of one table.
        num_ranks: How many ranks took part, where that is known.
    """
    intervals = _intervals(rows)
    if not intervals or num_ranks == 1:
        return []
    best, row = intervals[0], max(rows, key=lambda each: each.size_bytes)
    has_operation = row.redop not in ("", "none")
    has_root = row.root is not None and row.root >= 0
    names = [
        name
        for name, shape in TESTS.items()
        if shape.has_operation == has_operation
        if shape.has_root == has_root or row.root is None
        if _could_be(shape.factor, best, num_ranks)
    ]
    # A column of operations is blank in hypercube alone, since there is one of roots.
    if row.root is not None and "hypercube" in names:
        names = ["hypercube"] if row.redop == "" else names
    if row.redop == "none" and "hypercube" in names:
        names.remove("hypercube")
    return names


def _could_be(factor: Factor, interval: _Interval, num_ranks: int | None) -> bool:
    if num_ranks is not None:
        return interval.allows(factor.of(num_ranks))
    if factor is Factor.ONE:
        return interval.allows(1.0)
    low = factor.num_ranks(max(interval.low, 0.0))
    high = factor.num_ranks(interval.high)
    return math.isfinite(low) and high >= max(2, math.ceil(low))


def _intervals(rows: Sequence[Row]) -> list[_Interval]:
    """Return what each printed pair allows, the largest row's first."""
    found: list[_Interval] = []
    for row in sorted(rows, key=lambda each: each.size_bytes, reverse=True):
        for side in (row.out_of_place, row.in_place):
            interval = _interval(side)
            if interval is not None:
                found.append(interval)
    return found


def _interval(side: Side | None) -> _Interval | None:
    if side is None or side.algbw_gb_per_s is None or side.busbw_gb_per_s is None:
        return None
    algbw, busbw = side.algbw_gb_per_s, side.busbw_gb_per_s
    if not (0.1 < algbw < math.inf and 0 <= busbw < math.inf):
        return None
    a, b = _half_unit(algbw), _half_unit(busbw)
    return _Interval(
        (busbw - b) / (algbw + a), (busbw + b) / (algbw - a), busbw / algbw
    )


def _half_unit(printed: float) -> float:
    """Return by how much a figure printed six characters wide may be off."""
    if printed < 1000:
        return 0.005
    return 0.05 if printed < 10000 else 0.5
