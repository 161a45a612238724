"""Which collective a table is of, and over how many ranks, by its own figures.

busbw is algbw times a factor that depends on the collective and the number of ranks
alone: a log that names neither still tells much.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ronde.bench.catalog import COLLECTIVES, Factor
from ronde.bench.rows import Row, Side
from ronde.bench.runs import RankCount, RankSource


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
        test: A name from the catalog; any other tells nothing.
        rows: In any order; the largest sizes tell the most.
    """
    known = COLLECTIVES.get(test)
    intervals = _intervals(rows)
    if known is None or known.factor is Factor.ONE or not intervals:
        return RankCount()
    factor = known.factor
    best = intervals[0]
    low = max(_num_ranks(factor, max(each.low, 0.0)) for each in intervals)
    high = min(_num_ranks(factor, each.high) for each in intervals)
    if low > high:
        # Rows of several worlds, or a release that rounds otherwise.
        low, high = (
            _num_ranks(factor, max(best.low, 0.0)),
            _num_ranks(factor, best.high),
        )
    if not math.isfinite(low):
        return RankCount()  # more than any number of ranks gives
    first, middle = math.ceil(low - 1e-9), _num_ranks(factor, best.middle)
    if not math.isfinite(high) or not math.isfinite(middle):
        return RankCount(low=max(first, 1))
    last = math.floor(high + 1e-9)
    if first > last:
        return RankCount()
    value = min(max(round(middle), first), last)
    return RankCount(value, RankSource.RATIO, first, last)


def agrees(test: str, num_ranks: int, rows: Sequence[Row]) -> bool:
    """Say whether the figures may be those of ``num_ranks`` ranks."""
    known = COLLECTIVES.get(test)
    intervals = _intervals(rows)
    if known is None or not intervals:
        return True
    return num_ranks == 1 or intervals[0].allows(known.factor.value_for(num_ranks))


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
        for name, known in COLLECTIVES.items()
        # sendrecv reduces nothing, but nccl-tests prints an operation all the same.
        if name == "sendrecv" or known.has_op == has_operation
        if known.has_root == has_root or row.root is None
        if _could_be(known.factor, best, num_ranks)
    ]
    # A column of operations is blank in hypercube alone, since there is one of roots.
    if row.root is not None and "hypercube" in names:
        names = ["hypercube"] if row.redop == "" else names
    if row.redop == "none" and "hypercube" in names:
        names.remove("hypercube")
    return names


def _num_ranks(factor: Factor, ratio: float) -> float:
    """Return the number of ranks that gives ``ratio``; infinity beyond all."""
    limit = {Factor.REDUCED: 2.0, Factor.SHARED: 1.0}.get(factor)
    if limit is None or ratio >= limit:
        return math.inf
    return limit / (limit - ratio)


def _could_be(factor: Factor, interval: _Interval, num_ranks: int | None) -> bool:
    if num_ranks is not None:
        return interval.allows(factor.value_for(num_ranks))
    if factor is Factor.ONE:
        return interval.allows(1.0)
    low = _num_ranks(factor, max(interval.low, 0.0))
    high = _num_ranks(factor, interval.high)
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
