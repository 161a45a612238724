"""A benchmark as nccl-tests prints it, column for column.

Ours is appended where parsers of theirs do not look: in comments, and ``%limit`` after
everything else in a row.
"""

from collections.abc import Sequence

import ronde
from ronde.bench.measured import Ending, Half, Heading, Measured
from ronde.bench.options import Options
from ronde.units import format_size

_TIME_WIDTH, _RATE_WIDTH = 7, 6
_STAMP_WIDTH = 19
_STAMP = "%Y-%m-%d %H:%M:%S"
_BLOCKING = (
    "",
    "Blocking enabled: wait for completion and barrier after each collective",
    "Blocking enabled: wait for completion after each collective",
    "Blocking enabled: wait for completion and barrier after each iteration",
)


def heading_lines(heading: Heading) -> list[str]:
    """Return all that stands above the rows."""
    return [*facts_lines(heading), *_titles(heading)]


def facts_lines(heading: Heading) -> list[str]:
    """Return what stands above the rows' titles."""
    options = heading.options
    versions = " ".join(f"{k}={v}" for k, v in heading.versions.items())
    test = options.test.binary_name
    return [
        f"# ronde version {ronde.__version__} {versions}",
        f"# Collective test starting: {test}",
        _settings(options),
        *_comments(heading),
        "#",
        "# Using devices",
        *(
            f"#  Rank {d.rank:2d} Group {d.group:2d} Pid {d.pid:6d} on {d.host:>10} "
            f"device {d.index:2d} [{d.bus_text}] {d.name}"
            for d in heading.devices
        ),
        "#",
    ]


def _settings(options: Options) -> str:
    sweep, loop = options.sweep, options.loop
    is_factor = sweep.factor > 1
    step = f"{sweep.factor}(factor)" if is_factor else f"{sweep.step_bytes}(bytes)"
    return (
        f"# nThread {options.num_threads} nGpus {options.num_gpus} "
        f"minBytes {sweep.min_bytes} maxBytes {sweep.max_bytes} step: {step} "
        f"warmup iters: {loop.warmup} iters: {loop.iterations} "
        f"agg iters: {loop.aggregated} validation: {loop.checks} graph: 0 "
        f"unalign: {loop.unaligned_by}"
    )


def _comments(heading: Heading) -> list[str]:
    loop, limit = heading.options.loop, heading.limit
    lines = [f"engine: {heading.engine}"]
    if loop.blocking:
        lines.append(_BLOCKING[loop.blocking])
    if loop.is_each_timed:
        lines.append("Per-iteration timing enabled")
    lines += heading.notes
    if limit is not None:
        lines.append(f"limit: busbw at most {limit.bus_bandwidth_gb_per_s:.2f} GB/s")
        lines.append(f"limit: set by {limit.link}")
        if limit.practical_gb_per_s is not None:
            lines.append(
                f"limit: NCCL counts on {limit.practical_gb_per_s:.2f} GB/s, set by "
                f"{limit.practical_link}"
            )
        lines += [f"limit: {limit.note}"] if limit.note else []
    return [f"# {line}" for line in lines]


def _titles(heading: Heading) -> list[str]:
    loop, shown = heading.options.loop, heading.options.shown
    time = "cputime" if loop.is_cpu_time else "time"
    side = [(time, 7), ("algbw", 6), ("busbw", 6), ("#wrong", 6)]
    units = [("(us)", 7), ("(GB/s)", 6), ("(GB/s)", 6), ("", 6)]
    if loop.is_each_timed:
        side += [("i_min", 7), ("i_max", 7), ("i_p99", 7), ("i_cv%", 7)]
        units += [("(us)", 7), ("(us)", 7), ("(us)", 7), ("(%)", 7)]
    first = [("size", 10), ("count", 12), ("type", 8), ("redop", 6), ("root", 6)]
    below = [("(B)", 10), ("(elements)", 12), ("", 8), ("", 6), ("", 6)]
    blank = f"# {_cells([('', width) for _, width in first])}"
    halves = (
        "              out-of-place (+ per-iteration)" + " " * 32 + "in-place "
        "(+ per-iteration)"
        if loop.is_each_timed
        else "           out-of-place                       in-place          "
    )
    stamp = "timestamp".rjust(_STAMP_WIDTH) if shown.has_timestamps else ""
    format_ = _STAMP.rjust(_STAMP_WIDTH) if shown.has_timestamps else ""
    titled, percent = ("  %limit", "     (%)") if heading.limit else ("", "")
    return [
        blank + halves,
        f"# {_cells([*first, *side, *side])} {stamp}{titled}",
        f"# {_cells([*below, *units, *units])} {format_}{percent}",
    ]


def _cells(cells: Sequence[tuple[str, int]]) -> str:
    return "  ".join(text.rjust(width) for text, width in cells)


def row_line(measured: Measured, heading: Heading) -> str:
    """Return one row."""
    row, shown = measured.row, heading.options.shown
    root = -1 if row.root is None else row.root
    line = (
        f"{row.size_bytes:12d}  {row.count:12d}  {row.dtype:>8}  {row.redop:>6}  "
        f"{root:6d}"
    )
    for half in (measured.out_of_place, measured.in_place):
        line += _half(half)
    if shown.has_timestamps:
        line += measured.at.strftime(_STAMP).rjust(_STAMP_WIDTH + 2)
    if heading.limit is not None:
        line += f"  {number(limit_percent(measured, heading), 6)}"
    return line


def limit_percent(measured: Measured, heading: Heading) -> float:
    """Return the better half's busbw in percent of the bound, 0 without one."""
    if heading.limit is None:
        return 0.0
    halves = (measured.out_of_place, measured.in_place)
    return heading.limit.percent(max(half.side.busbw_gb_per_s or 0 for half in halves))


def _half(half: Half) -> str:
    side = half.side
    wrong = "   N/A" if side.num_wrong is None else f"{side.num_wrong:6g}"
    text = (
        f"  {number(side.time_us or 0.0, _TIME_WIDTH)}"
        f"  {number(side.algbw_gb_per_s or 0.0, _RATE_WIDTH)}"
        f"  {number(side.busbw_gb_per_s or 0.0, _RATE_WIDTH)}  {wrong}"
    )
    if half.iterations is not None:
        times = half.iterations
        for value in (
            times.min_us,
            times.max_us,
            times.percentile_us(99),
            times.variation_percent,
        ):
            text += f"  {number(value, _TIME_WIDTH)}"
    return text


def number(value: float, width: int) -> str:
    """Write a number with as many decimals, up to two, as ``width`` leaves room for."""
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.{1 if width >= _TIME_WIDTH else 0}e}"


def ending_lines(heading: Heading, ending: Ending) -> list[str]:
    """Return all that stands below the rows."""
    totals = ending.totals
    average = f"{totals.average_busbw_gb_per_s:g} "
    if ending.is_fast_enough is not None:
        average += "OK" if ending.is_fast_enough else "FAILED"
    judged = "FAILED" if totals.num_failed else "OK"
    lines = [
        _footer("Out of bounds values", f"{totals.num_failed} {judged}"),
        _footer("Avg bus bandwidth", average),
    ]
    if ending.memory:
        lines.append(_footer(*ending.memory.split(" : ", 1)))
    peak = totals.peak_busbw_gb_per_s
    if peak:
        at = format_size(totals.peak_size_bytes)
        lines.append(_footer("Peak bus bandwidth", f"{peak:g} at {at}"))
        if heading.limit is not None and (doubt := heading.limit.doubt(peak)):
            lines.append(f"# limit: {doubt}")
    lines += ["#", f"# Collective test concluded: {heading.options.test.binary_name}"]
    lines.append("#")
    return [*lines, *([f"# error: {e}" for e in ending.errors] or [""])]


def _footer(name: str, value: str) -> str:
    return f"# {name:<20} : {value}"
