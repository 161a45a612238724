"""Comparison of two results or of several engines; does not import torch."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ronde.bench.results import HALVES, Row, Run, Side


class RowKey(NamedTuple):
    """Key that matches rows of two results."""

    test: str  # the collective; empty if unknown
    engine: str  # in results of several engines; else empty
    dtype: str  # nccl-tests' name of the type
    redop: str  # ``none`` without an operation
    root: int  # -1 without a root
    size_bytes: int  # or PEAK: the highest busbw of all sizes


PEAK = -1


class Pair(NamedTuple):
    """The values of one half of a row (in place or out of place) in both results."""

    key: RowKey
    half: str  # ``out_of_place`` or ``in_place``
    a_busbw_gb_per_s: float  # the median of repeated rows
    b_busbw_gb_per_s: float
    ratio: float | None  # b / a; None if either is 0 or not finite


class Comparison(NamedTuple):
    """The matched rows of two results, and warnings."""

    pairs: tuple[Pair, ...]
    only_a: tuple[RowKey, ...]
    only_b: tuple[RowKey, ...]
    warnings: tuple[str, ...]

    def mean_ratio(self) -> float | None:
        ratios = [pair.ratio for pair in self.pairs if pair.ratio is not None]
        return statistics.geometric_mean(ratios) if ratios else None


class _Figures(NamedTuple):
    """Medians of one half of a row, over all repetitions of the row in a result."""

    busbw_gb_per_s: float
    time_us: float | None
    ranks: int | None


def compare(a: Sequence[Run], b: Sequence[Run]) -> Comparison:
    """Match the rows of two results and compute their ratios."""
    # The ratio is that of the times if both results have times and the same number of
    # ranks, as the printed busbw of small sizes has only one digit; else that of busbw.
    first, second = _collect(a), _collect(b)
    keys_a, keys_b = ({key for key, _ in each} for each in (first, second))
    warnings = _warnings(a, b)
    if not first.keys() & second.keys():
        peaks = _peaks(first), _peaks(second)
        if peaks[0].keys() & peaks[1].keys():
            first, second = peaks
            warnings.append("no size is in both: the highest busbw of each is compared")
    pairs: list[Pair] = []
    # Out of place first, as in a log.
    halves = first.keys() & second.keys()
    for key, half in sorted(halves, key=lambda each: (each[0], each[1] == HALVES[1])):
        left, right = first[key, half], second[key, half]
        ratio = _ratio(left, right)
        pairs.append(Pair(key, half, left.busbw_gb_per_s, right.busbw_gb_per_s, ratio))
    return Comparison(
        pairs=tuple(pairs),
        only_a=tuple(sorted(keys_a - keys_b)),
        only_b=tuple(sorted(keys_b - keys_a)),
        warnings=tuple(warnings),
    )


def _collect(runs: Sequence[Run]) -> dict[tuple[RowKey, str], _Figures]:
    has_engines = len({run.engine for run in runs}) > 1
    found: dict[tuple[RowKey, str], list[tuple[Side, int | None]]] = {}
    for run in runs:
        for row in run.rows:
            key = RowKey(
                test=run.test,
                engine=run.engine if has_engines else "",
                dtype=row.dtype,
                redop=row.redop or "none",
                root=row.shown_root,
                size_bytes=row.size_bytes,
            )
            for half in HALVES:
                side: Side | None = getattr(row, half)
                if side is not None and side.busbw_gb_per_s is not None:
                    found.setdefault((key, half), []).append((side, run.ranks.value))
    return {key: _median(entry) for key, entry in found.items()}


def _peaks(
    figures: Mapping[tuple[RowKey, str], _Figures],
) -> dict[tuple[RowKey, str], _Figures]:
    peaks: dict[tuple[RowKey, str], _Figures] = {}
    for (key, half), each in figures.items():
        peak = key._replace(size_bytes=PEAK), half
        if peak not in peaks or each.busbw_gb_per_s > peaks[peak].busbw_gb_per_s:
            peaks[peak] = each._replace(time_us=None)
    return peaks


def _median(entry: Sequence[tuple[Side, int | None]]) -> _Figures:
    times = [side.time_us for side, _ in entry if side.time_us is not None]
    ranks = {num_ranks for _, num_ranks in entry}
    busbw = statistics.median(side.busbw_gb_per_s or 0.0 for side, _ in entry)
    time_us = statistics.median(times) if len(times) == len(entry) else None
    return _Figures(busbw, time_us, ranks.pop() if len(ranks) == 1 else None)


def _ratio(a: _Figures, b: _Figures) -> float | None:
    above, below = b.busbw_gb_per_s, a.busbw_gb_per_s
    if not (0 < below < math.inf and 0 < above < math.inf):
        return None
    if a.ranks is not None and a.ranks == b.ranks and a.time_us and b.time_us:
        above, below = a.time_us, b.time_us
    return above / below if 0 < above / below < math.inf else None


def _warnings(a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    found: list[str] = []
    for test in sorted({run.test for run in a} & {run.test for run in b}):
        ranks = [
            {r.ranks.value or 0 for r in runs if r.test == test} for runs in (a, b)
        ]
        left, right = (", ".join(str(n or "unknown") for n in sorted(s)) for s in ranks)
        if left != right:
            text = f"{left} ranks in the first, {right} in the second"
            found.append(f"{test or 'the test'}: {text}")
    for name, runs in (("first", a), ("second", b)):
        num_wrong = sum(run.num_wrong() or 0 for run in runs)
        if num_wrong:
            found.append(f"the {name} has {num_wrong:g} wrong elements")
        if not all(run.is_complete for run in runs):
            found.append(f"the {name} is incomplete")
    return found


class Compared(NamedTuple):
    """One row as measured on every engine."""

    rows: Mapping[str, Row]  # by engine; each has one half, the other is None

    def side(self, engine: str) -> Side:
        return self.rows[engine].sides()[0]

    def ratio(self, engine: str) -> float:
        """Return an engine's speed relative to the first engine."""
        first = self.side(next(iter(self.rows)))
        return (first.time_us or 0.0) / (self.side(engine).time_us or math.inf)
