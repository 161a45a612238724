"""Two results side by side: what each size gained or lost."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ronde.bench.rows import Row, Side
from ronde.bench.runs import Run

PLACES = ("out_of_place", "in_place")


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What two rows must share to be compared; sizes alone repeat.

    Attributes:
        test: The collective; empty where the log does not tell.
        engine: What moved the bytes, in results of several engines; else empty.
        dtype: nccl-tests' name of the type.
        redop: ``none`` where there is none.
        root: -1 where there is none.
        size_bytes: The row's size.
    """

    test: str
    engine: str
    dtype: str
    redop: str
    root: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Pair:
    """One half of a row in both results.

    Attributes:
        key: Which row.
        place: ``out_of_place`` or ``in_place``.
        a_busbw_gb_per_s: The first result's; the median where the row came repeatedly.
        b_busbw_gb_per_s: The second's.
        ratio: The second by the first; None where either is 0 or no finite number.
    """

    key: Key
    place: str
    a_busbw_gb_per_s: float
    b_busbw_gb_per_s: float
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two results, side by side.

    Attributes:
        pairs: Every half of a row that both have, in order of test, type and size.
        only_a: Rows that the first alone has.
        only_b: Rows that the second alone has.
        warnings: Why ratios may not mean what they seem to, one sentence each.
    """

    pairs: tuple[Pair, ...]
    only_a: tuple[Key, ...]
    only_b: tuple[Key, ...]
    warnings: tuple[str, ...]

    def mean_ratio(self) -> float | None:
        """Return the geometric mean of all ratios; None where there are none."""
        ratios = [pair.ratio for pair in self.pairs if pair.ratio is not None]
        return statistics.geometric_mean(ratios) if ratios else None


@dataclass(frozen=True, slots=True)
class _Figures:
    """The medians of one half of a row over all that is in a result."""

    busbw_gb_per_s: float
    time_us: float | None
    ranks: int | None


def compare(a: Sequence[Run], b: Sequence[Run]) -> Comparison:
    """Set two results side by side.

    A ratio is that of busbw. Where both have times and equally many ranks it is taken
    from these: of small sizes the printed busbw has but one digit.
    """
    first, second = _collect(a), _collect(b)
    shared = sorted(first.keys() & second.keys())
    keys_a, keys_b = ({key for key, _ in each} for each in (first, second))
    pairs = [
        Pair(
            key,
            place,
            first[key, place].busbw_gb_per_s,
            second[key, place].busbw_gb_per_s,
            _ratio(first[key, place], second[key, place]),
        )
        for key, place in shared
    ]
    return Comparison(
        # Out of place stands first in a log, and so here.
        pairs=tuple(sorted(pairs, key=lambda p: (p.key, PLACES.index(p.place)))),
        only_a=tuple(sorted(keys_a - keys_b)),
        only_b=tuple(sorted(keys_b - keys_a)),
        warnings=tuple(_warnings(a, b)),
    )


def _collect(runs: Sequence[Run]) -> dict[tuple[Key, str], _Figures]:
    has_engines = len({run.engine for run in runs}) > 1
    found: dict[tuple[Key, str], list[tuple[Side, int | None]]] = {}
    for run in runs:
        for row in run.rows:
            key = _key(run, row, has_engines=has_engines)
            for place, side in zip(
                PLACES, (row.out_of_place, row.in_place), strict=True
            ):
                if side is not None and side.busbw_gb_per_s is not None:
                    entry = found.setdefault((key, place), [])
                    entry.append((side, run.ranks.value))
    return {key: _median(entry) for key, entry in found.items()}


def _key(run: Run, row: Row, *, has_engines: bool) -> Key:
    return Key(
        test=run.test,
        engine=run.engine if has_engines else "",
        dtype=row.dtype,
        redop=row.redop or "none",
        root=-1 if row.root is None else row.root,
        size_bytes=row.size_bytes,
    )


def _median(entry: Sequence[tuple[Side, int | None]]) -> _Figures:
    times = [side.time_us for side, _ in entry if side.time_us is not None]
    ranks = {num_ranks for _, num_ranks in entry}
    return _Figures(
        busbw_gb_per_s=statistics.median(
            side.busbw_gb_per_s or 0.0 for side, _ in entry
        ),
        time_us=statistics.median(times) if len(times) == len(entry) else None,
        ranks=ranks.pop() if len(ranks) == 1 else None,
    )


def _ratio(a: _Figures, b: _Figures) -> float | None:
    if not (_is_measure(a.busbw_gb_per_s) and _is_measure(b.busbw_gb_per_s)):
        return None
    if a.ranks is not None and a.ranks == b.ranks and a.time_us and b.time_us:
        ratio = a.time_us / b.time_us
    else:
        ratio = b.busbw_gb_per_s / a.busbw_gb_per_s
    return ratio if _is_measure(ratio) else None


def _is_measure(value: float) -> bool:
    return 0 < value < math.inf


def _warnings(a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    found: list[str] = []
    for test in sorted({run.test for run in a} & {run.test for run in b}):
        counts = [
            sorted({run.ranks.value or 0 for run in each if run.test == test})
            for each in (a, b)
        ]
        if counts[0] != counts[1]:
            left, right = (_numbers(each) for each in counts)
            name = test or "the test"
            found.append(f"{name}: {left} ranks in the first, {right} in the second")
    for name, runs in (("first", a), ("second", b)):
        num_wrong = sum(run.num_wrong() or 0 for run in runs)
        if num_wrong:
            found.append(f"the {name} has {num_wrong:g} wrong elements")
        if not all(run.is_complete for run in runs):
            found.append(f"the {name} is incomplete")
    return found


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(str(value) if value else "unknown" for value in values)
