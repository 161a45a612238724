"""Benchmark output in nccl-tests' form (table, JSON version 3), and comparisons.

ronde's additions are in parts that parsers of that form ignore: in comments, ``%limit``
as the last cell of a row, and in JSON under the key ``ronde``.
"""

import json
import math
from collections.abc import Iterable, Sequence
from statistics import geometric_mean, median_high
from typing import Any, TextIO

import ronde
from ronde.bench import results
from ronde.bench.comparison import Compared
from ronde.units import format_duration, format_size

_TIME_WIDTH, _RATE_WIDTH = 7, 6
_STAMP_WIDTH = 19
_STAMP = "%Y-%m-%d %H:%M:%S"
_BLOCKING = (
    "",
    "Blocking enabled: wait for completion and barrier after each collective",
    "Blocking enabled: wait for completion after each collective",
    "Blocking enabled: wait for completion and barrier after each iteration",
)
_BAR = 24
_TIME, _RATE, _RATIO = 8, 7, 6  # of --compare
_WIDTH = 1 + _TIME + 2 + _RATE + 2 + _RATIO
_KEY = "{:>12}  {:>8}  {:>6}  {:>4}"


def facts_lines(heading: results.Heading) -> list[str]:
    options = heading.options
    sweep, loop = options.sweep, options.loop
    step = f"{sweep.step_bytes}(bytes)"
    step = f"{sweep.factor}(factor)" if sweep.factor > 1 else step
    versions = " ".join(f"{k}={v}" for k, v in heading.versions.items())
    settings = (
        f"# nThread {options.num_threads} nGpus {options.num_gpus} "
        f"minBytes {sweep.min_bytes} maxBytes {sweep.max_bytes} step: {step} "
        f"warmup iters: {loop.warmup} iters: {loop.iterations} "
        f"agg iters: {loop.aggregated} validation: {loop.checks} graph: 0 "
        f"unalign: {loop.unaligned_by}"
    )
    return [
        f"# ronde version {ronde.__version__} {versions}",
        f"# Collective test starting: {options.test.binary_name}",
        settings,
        *_comments(heading),
        "#",
        "# Using devices",
        *(
            f"#  Rank {d.rank:2d} Group {d.group:2d} Pid {d.pid:6d} on {d.host:>10} "
            f"device {d.index:2d} [{d.bus_id}] {d.name}"
            for d in heading.devices
        ),
        "#",
    ]


def _comments(heading: results.Heading) -> list[str]:
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
            rate = f"NCCL counts on {limit.practical_gb_per_s:.2f} GB/s"
            lines.append(f"limit: {rate}, set by {limit.practical_link}")
        lines += [f"limit: {limit.note}"] if limit.note else []
    return [f"# {line}" for line in lines]


def heading_lines(heading: results.Heading) -> list[str]:
    loop, shown = heading.options.loop, heading.options.shown
    time = "cputime" if loop.is_cpu_time else "time"
    side = [(time, 7), ("algbw", 6), ("busbw", 6), ("#wrong", 6)]
    units = [("(us)", 7), ("(GB/s)", 6), ("(GB/s)", 6), ("", 6)]
    halves = "           out-of-place                       in-place          "
    if loop.is_each_timed:
        side += [("i_min", 7), ("i_max", 7), ("i_p99", 7), ("i_cv%", 7)]
        units += [("(us)", 7), ("(us)", 7), ("(us)", 7), ("(%)", 7)]
        halves = "              out-of-place (+ per-iteration)" + " " * 32
        halves += "in-place (+ per-iteration)"
    first = [("size", 10), ("count", 12), ("type", 8), ("redop", 6), ("root", 6)]
    below = [("(B)", 10), ("(elements)", 12), ("", 8), ("", 6), ("", 6)]
    stamp, format_ = ("timestamp", _STAMP) if shown.has_timestamps else ("", "")
    width = _STAMP_WIDTH if shown.has_timestamps else 0
    titled, percent = ("  %limit", "     (%)") if heading.limit else ("", "")

    def cells(parts: Iterable[tuple[str, int]]) -> str:
        return "  ".join(text.rjust(width) for text, width in parts)

    return [
        *facts_lines(heading),
        f"# {cells(('', width) for _, width in first)}{halves}",
        f"# {cells([*first, *side, *side])} {stamp:>{width}}{titled}",
        f"# {cells([*below, *units, *units])} {format_:>{width}}{percent}",
    ]


def row_line(measured: results.Measured, heading: results.Heading) -> str:
    row = measured.row
    line = (
        f"{row.size_bytes:12d}  {row.count:12d}  {row.dtype:>8}  {row.redop:>6}  "
        f"{row.shown_root:6d}{_half(measured.out_of_place)}{_half(measured.in_place)}"
    )
    if heading.options.shown.has_timestamps:
        line += measured.at.strftime(_STAMP).rjust(_STAMP_WIDTH + 2)
    if heading.limit is not None:
        line += f"  {number(limit_percent(measured, heading), 6)}"
    return line


def limit_percent(measured: results.Measured, heading: results.Heading) -> float:
    """Return the row's highest busbw in percent of the bound, 0 if there is none."""
    if heading.limit is None:
        return 0.0
    halves = (measured.out_of_place, measured.in_place)
    return heading.limit.percent(max(half.side.busbw_gb_per_s or 0 for half in halves))


def _half(half: results.Half) -> str:
    side, times = half.side, half.iterations
    wrong = "   N/A" if side.num_wrong is None else f"{side.num_wrong:6g}"
    text = (
        f"  {number(side.time_us or 0.0, _TIME_WIDTH)}"
        f"  {number(side.algbw_gb_per_s or 0.0, _RATE_WIDTH)}"
        f"  {number(side.busbw_gb_per_s or 0.0, _RATE_WIDTH)}  {wrong}"
    )
    if times is not None:
        kept, ninety_nine = times.kept_us, times.percentile_us(99)
        for value in (kept[0], kept[-1], ninety_nine, times.variation_percent):
            text += f"  {number(value, _TIME_WIDTH)}"
    return text


def number(value: float, width: int) -> str:
    """Format a number with as many decimals as fit into ``width``, at most two."""
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.{1 if width >= _TIME_WIDTH else 0}e}"


def ending_lines(heading: results.Heading, ending: results.Ending) -> list[str]:
    totals = ending.totals
    judged = "FAILED" if totals.num_failed else "OK"
    fast = {None: "", True: "OK", False: "FAILED"}[ending.is_fast_enough]
    lines = [
        _footer("Out of bounds values", f"{totals.num_failed} {judged}"),
        _footer("Avg bus bandwidth", f"{totals.average_busbw_gb_per_s:g} {fast}"),
    ]
    if ending.memory:
        lines.append(_footer(*ending.memory.split(" : ", 1)))
    if peak := totals.peak_busbw_gb_per_s:
        at = format_size(totals.peak_size_bytes)
        lines.append(_footer("Peak bus bandwidth", f"{peak:g} at {at}"))
        if heading.limit is not None and (warning := heading.limit.warning(peak)):
            lines.append(f"# limit: {warning}")
    if fit := ending.fit:
        rate = 1 / fit["beta_ns_per_byte"] if fit["beta_ns_per_byte"] else math.inf
        costs = f"{fit['alpha_us']:.3g} us a round, {rate:.3g} GB/s {fit['level']}"
        within = f"within {fit['largest_residual']:.0%}"
        lines.append(_footer("Fitted as a ring", f"{costs}, {within}"))
    lines += ["#", f"# Collective test concluded: {heading.options.test.binary_name}"]
    return [*lines, "#", *([f"# error: {e}" for e in ending.errors] or [""])]


def _footer(name: str, value: str) -> str:
    return f"# {name:<20} : {value}"


def bar(num_done: int, num_all: int) -> str:
    filled = _BAR * num_done // num_all
    return f"[{'#' * filled + '-' * (_BAR - filled)}] {num_done}/{num_all}"


def progress_text(
    totals: results.Totals, num_rows: int, elapsed_s: float, cycle: int
) -> str:
    """Return the progress line; ``num_rows`` is 0 for a soak, which has no end."""
    done = totals.num_rows
    text = f"{bar(done, num_rows)} rows" if num_rows else f"soak: cycle {cycle + 1}"
    text += "" if num_rows else f", {done} rows"
    text += f", {format_duration(elapsed_s)}"
    if totals.peak_busbw_gb_per_s:
        text += f", peak {totals.peak_busbw_gb_per_s:.2f} GB/s"
    wrong = totals.num_wrong
    return text if wrong is None else f"{text}, {wrong:g} wrong"


def comparison_titles(heading: results.Heading, engines: Sequence[str]) -> list[str]:
    rounds = heading.options.engines.rounds
    half = "in place" if heading.options.test.is_in_place_checked else "out of place"
    names = "".join(f" |{name:^{_WIDTH}}" for name in engines)
    cells = f"{'time':>{_TIME}}  {'busbw':>{_RATE}}  {'ratio':>{_RATIO}}"
    units = f"{'(us)':>{_TIME}}  {'(GB/s)':>{_RATE}}  {'':>{_RATIO}}"
    return [
        f"# engines take turns: medians of {rounds} rounds, {half}",
        f"# ratio: speed by that of {engines[0]}",
        "#",
        f"# {_KEY.format('', '', '', '')}{names}",
        f"# {_KEY.format('size', 'type', 'redop', 'root')}"
        + f" | {cells}" * len(engines),
        f"# {_KEY.format('(B)', '', '', '')}" + f" | {units}" * len(engines),
    ]


def compared_line(compared: Compared) -> str:
    row = next(iter(compared.rows.values()))
    line = "  " + _KEY.format(row.size_bytes, row.dtype, row.redop, row.shown_root)
    for engine in compared.rows:
        side = compared.side(engine)
        time = number(side.time_us or 0.0, _TIME)
        rate = number(side.busbw_gb_per_s or 0.0, _RATE)
        line += f" | {time}  {rate}  {number(compared.ratio(engine), _RATIO)}"
        line += f" {side.num_wrong:g} WRONG" if side.num_wrong else ""
    return line


def comparison_summary(compared: Sequence[Compared], error: str = "") -> list[str]:
    lines = ["#"]
    for engine in compared[0].rows if compared else ():
        wrong = sum(each.side(engine).num_wrong or 0.0 for each in compared)
        judged = f"{wrong:g} wrong elements" if wrong else "OK"
        mean = geometric_mean([each.ratio(engine) or 1.0 for each in compared])
        lines.append(_footer(engine, f"{mean:.3g} times, {judged}"))
    return [*lines, "#", f"# error: {error}" if error else ""]


VERSION = 3


class JsonReport:
    """Writes one result as JSON, which is valid after ``end``, even after Ctrl-C."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._num_rows = 0
        self._num_cycles = 0

    def begin(self, heading: results.Heading) -> None:
        self._heading = heading
        head = {
            "version": VERSION,
            "start_time": heading.started_at.strftime(_STAMP),
            "args": ["ronde", "bench", *heading.options.words],
            "env": list(heading.shown_variables),
            "nccl_version": heading.nccl_version,
            "config": _config(heading),
        }
        # The list of rows and the object around it are closed by ``end``.
        self._file.write(json.dumps(head)[:-1] + ', "results": [')
        self._file.flush()

    def row(self, measured: results.Measured) -> None:
        self._file.write((",\n" if self._num_rows else "\n") + self._entry(measured))
        self._file.flush()
        self._num_rows += 1
        self._num_cycles = measured.cycle + 1

    def end(self, ending: results.Ending) -> None:
        totals, fast = ending.totals, ending.is_fast_enough
        num_failed, average = totals.num_failed, totals.average_busbw_gb_per_s
        is_fast = "unchecked" if fast is None else _bool(fast)
        tail = {
            "out_of_bounds": {"count": num_failed, "okay": _bool(num_failed == 0)},
            "average_bus_bandwidth": {"bandwidth": average, "okay": is_fast},
            "errors": list(ending.errors),
            "end_time": ending.ended_at.strftime(_STAMP),
            "ronde": _ours(self._heading, ending) | {"num_cycles": self._num_cycles},
        }
        self._file.write("\n], " + _dump(tail)[1:] + "\n")
        self._file.close()

    def _entry(self, measured: results.Measured) -> str:
        row = measured.row
        time = "cpu_time" if self._heading.options.loop.is_cpu_time else "time"
        entry: dict[str, Any] = {
            "size": row.size_bytes,
            "count": row.count,
            "type": row.dtype,
            "redop": row.redop,
            "root": f"{row.shown_root:6d}",
        }
        for half in results.HALVES:
            side, times, _ = getattr(measured, half)
            entry[half] = {
                time: side.time_us,
                "alg_bw": side.algbw_gb_per_s,
                "bus_bw": side.busbw_gb_per_s,
                "nwrong": None if side.num_wrong is None else float(side.num_wrong),
            }
            if times is not None:
                entry[f"{half}_per_iter"] = _iterations(times)
        entry["actual_iterations"] = self._heading.options.loop.iterations
        entry["experiment_name"] = ""
        at = measured.at.strftime(_STAMP)
        ours: dict[str, Any] = {"cycle": measured.cycle, "at": at}
        if self._heading.limit is not None:
            ours["limit_percent"] = limit_percent(measured, self._heading)
        return _dump(entry | {"ronde": ours})


def _config(heading: results.Heading) -> dict[str, Any]:
    options = heading.options
    sweep, loop = options.sweep, options.loop
    step = {"step_bytes": sweep.step_bytes}
    step = {"step_factor": sweep.factor} if sweep.factor > 1 else step
    names = ("rank", "group", "pid", "hostname", "device", "device_hex", "device_info")
    devices = [
        (d.rank, d.group, d.pid, d.host, d.index, d.bus_id, d.name)
        for d in heading.devices
    ]
    return {
        "nthreads": options.num_threads,
        "ngpus": options.num_gpus,
        "minimum_bytes": sweep.min_bytes,
        "maximum_bytes": sweep.max_bytes,
        **step,
        "warmup_iters": loop.warmup,
        "iterations": loop.iterations,
        "aggregated_iterations": loop.aggregated,
        "validation": loop.checks,
        "graph": 0,
        "blocking_collectives": _bool(loop.blocking > 0),
        "per_iter_timing": _bool(loop.is_each_timed),
        "per_iter_skip": loop.skipped,
        "parallel_init": "false",
        "devices": [dict(zip(names, device, strict=True)) for device in devices],
    }


def _ours(heading: results.Heading, ending: results.Ending) -> dict[str, Any]:
    limit, totals = heading.limit, ending.totals
    bound = limit and {
        "busbw_gb_per_s": limit.bus_bandwidth_gb_per_s,
        "link": limit.link,
        "note": limit.note,
        "practical_busbw_gb_per_s": limit.practical_gb_per_s,
        "practical_link": limit.practical_link,
    }
    return {
        "test": heading.options.test.name,
        "engine": heading.engine,
        "size": heading.size,
        "versions": dict(heading.versions),
        "notes": list(heading.notes),
        "limit": bound,
        "call_overhead_us": heading.call_overhead_us,
        "peak_busbw_gb_per_s": totals.peak_busbw_gb_per_s,
        "num_wrong": totals.num_wrong,
        "ended_by": ending.reason.name.lower(),
    }


def _iterations(times: results.IterationTimes) -> dict[str, Any]:
    kept = times.kept_us
    entry: dict[str, Any] = {
        "skipped_iterations": times.num_skipped,
        "min_us": kept[0],
        "max_us": kept[-1],
        "avg_us": times.mean_us,
        "p50_us": median_high(kept),
        "p95_us": times.percentile_us(95),
        "p99_us": times.percentile_us(99),
        "stdev_us": times.deviation_us,
        "cv_pct": times.variation_percent,
        "times_us": times.times_us,
    }
    if len(times.rank_times_us) > 1:
        entry["per_process_max_times_us"] = [list(t) for t in times.rank_times_us]
    return entry


def _bool(value: bool) -> str:  # noqa: FBT001  theirs are words
    return "true" if value else "false"


def _dump(entry: dict[str, Any]) -> str:
    return json.dumps(results.finite(entry, num_decimals=6), allow_nan=False)
