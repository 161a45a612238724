"""Benchmarks that were read or compared -> tables."""

import math
from collections.abc import Iterable, Sequence

from ronde.bench.comparison import PLACES, Comparison, RowKey
from ronde.bench.results import RankCount, Run, Side
from ronde.units import format_size

_RUN_HEADINGS = (
    *("log", "test", "n", "known by", "type", "op", "rows", "sizes", "peak busbw"),
    *("average", "wrong", "complete"),
)
_ROW_HEADINGS = ("size", "count", "type", "op", "root")
_SIDE_HEADINGS = ("time us", "algbw", "busbw", "wrong")
_TEXT = frozenset({"log", "test", "engine", "type", "op", "known by", "complete"})
_NONE = "-"


def draw_runs(runs: Sequence[tuple[str, Run]]) -> str:
    """Return a table with a line a run; bandwidths are in GB/s.

    Args:
        runs: Each with the name of its log.
    """
    return _align(_RUN_HEADINGS, [_run_cells(name, run) for name, run in runs])


def draw_rows(run: Run) -> str:
    """Return all rows of a run, out of place at the left."""
    headings = (*_ROW_HEADINGS, *_SIDE_HEADINGS, *_SIDE_HEADINGS)
    lines = [
        [
            str(row.size_bytes),
            str(row.count),
            row.dtype,
            row.redop or _NONE,
            _NONE if row.root is None else str(row.root),
            *_side_cells(row.out_of_place),
            *_side_cells(row.in_place),
        ]
        for row in run.rows
    ]
    return _align(headings, lines)


def draw_warnings(runs: Sequence[tuple[str, Run]]) -> str:
    """Return what is odd about the runs, a line each."""
    return "".join(
        f"{name}: {warning}.\n" for name, run in runs for warning in run.warnings
    )


def draw_comparison(comparison: Comparison, names: tuple[str, str]) -> str:
    """Return both results' busbw in GB/s and their ratio, a line a size.

    Args:
        comparison: The results.
        names: Theirs.
    """
    a, b = names
    lines = [f"A: {a}\n", f"B: {b}\n", *(f"{w}.\n" for w in comparison.warnings), "\n"]
    lines.append(_comparison_table(comparison))
    mean = comparison.mean_ratio()
    lines.append(
        "\nno two rows can be compared\n"
        if mean is None
        else f"\nB/A, geometric mean: {mean:.3f}\n"
    )
    for name, keys in (("A", comparison.only_a), ("B", comparison.only_b)):
        if keys:
            lines.append(f"only in {name}: {_name_keys(keys)}\n")
    return "".join(lines)


def _comparison_table(comparison: Comparison) -> str:
    has_engine = any(pair.key.engine for pair in comparison.pairs)
    cells: dict[RowKey, list[str]] = {}
    for pair in comparison.pairs:
        line = cells.setdefault(pair.key, [_NONE] * 3 * len(PLACES))
        start = 3 * PLACES.index(pair.place)
        line[start : start + 3] = [
            _number(pair.a_busbw_gb_per_s),
            _number(pair.b_busbw_gb_per_s),
            _NONE if pair.ratio is None else f"{pair.ratio:.2f}",
        ]
    headings = (
        *("test", *(("engine",) if has_engine else ()), "type", "op", "root", "size"),
        *("A", "B", "B/A", "A in place", "B in place", "B/A"),
    )
    lines = [
        [
            key.test or "?",
            *((key.engine or _NONE,) if has_engine else ()),
            key.dtype,
            key.redop,
            str(key.root),
            format_size(key.size_bytes),
            *line,
        ]
        for key, line in cells.items()
    ]
    return _align(headings, lines)


def _name_keys(keys: Sequence[RowKey]) -> str:
    """Name rows, those of one kind together."""
    kinds: dict[str, list[int]] = {}
    for key in keys:
        words = (key.test or "?", key.engine, key.dtype, key.redop)
        kind = " ".join(word for word in words if word)
        if key.root >= 0:
            kind += f" root {key.root}"
        kinds.setdefault(kind, []).append(key.size_bytes)
    return "; ".join(f"{kind}: {_name_sizes(sizes)}" for kind, sizes in kinds.items())


def _name_sizes(sizes: Sequence[int]) -> str:
    if len(sizes) <= 3:
        return ", ".join(format_size(size) for size in sizes)
    low, high = format_size(min(sizes)), format_size(max(sizes))
    return f"{len(sizes)} sizes from {low} to {high}"


def _run_cells(name: str, run: Run) -> list[str]:
    values = [value for value in run.all_busbw_gb_per_s() if not math.isnan(value)]
    sizes = [row.size_bytes for row in run.rows]
    wrong = run.num_wrong()
    average = run.average_busbw_gb_per_s
    return [
        name,
        run.test or "?",
        _count(run.ranks),
        str(run.ranks.source),
        _several(row.dtype for row in run.rows),
        _several(row.redop or _NONE for row in run.rows),
        str(len(run.rows)),
        f"{format_size(min(sizes))}-{format_size(max(sizes))}" if sizes else _NONE,
        _number(max(values)) if values else _NONE,
        _NONE if average is None else f"{average:g}",
        "unchecked" if wrong is None else f"{wrong:g}",
        "yes" if run.is_complete else "no",
    ]


def _count(ranks: RankCount) -> str:
    if ranks.value is None:
        return "?"
    if ranks.low == ranks.high:
        return str(ranks.value)
    return f"{ranks.value} ({ranks.low}-{ranks.high})"


def _several(words: Iterable[str]) -> str:
    """Return the one word that all are, or how many there are."""
    different = list(dict.fromkeys(words))
    if len(different) > 1:
        return f"{len(different)} kinds"
    return different[0] if different else _NONE


def _side_cells(side: Side | None) -> list[str]:
    if side is None:
        return [_NONE] * 4
    wrong = side.num_wrong
    figures = (side.time_us, side.algbw_gb_per_s, side.busbw_gb_per_s)
    cells = [_NONE if figure is None else _number(figure) for figure in figures]
    return [*cells, "N/A" if wrong is None else f"{wrong:g}"]


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1e6 else f"{value:.3g}"


def _align(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return columns under their headings: text at the left, numbers at the right."""
    table = [headings, *lines]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "".join(
        "  ".join(
            cell.ljust(width) if heading in _TEXT else cell.rjust(width)
            for heading, cell, width in zip(headings, line, widths, strict=True)
        ).rstrip()
        + "\n"
        for line in table
    )
