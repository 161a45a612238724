"""nccl-tests' JSON, version 3, written while the benchmark runs.

What is written is valid JSON at every end, Ctrl-C included. Their keys come in their
order; ours are under one key, ``ronde``.
"""

import json
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TextIO

from ronde.bench.measured import Ending, Half, Heading, IterationTimes, Measured
from ronde.render.bench import limit_percent

VERSION = 3
_STAMP = "%Y-%m-%d %H:%M:%S"


class JsonReport:
    """Writes one result into a new file."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._num_rows = 0
        self._num_cycles = 0

    def begin(self, heading: Heading) -> None:
        self._heading = heading
        head = {
            "version": VERSION,
            "start_time": _time(heading.started_at),
            "args": ["ronde", "bench", *heading.options.words],
            "env": list(heading.shown_variables),
            "nccl_version": heading.nccl_version,
            "config": _config(heading),
        }
        # The list of rows stays open, as does the object around it.
        self._file.write(json.dumps(head)[:-1] + ', "results": [')
        self._file.flush()

    def row(self, measured: Measured) -> None:
        text = json.dumps(_finite(self._entry(measured)), allow_nan=False)
        self._file.write((",\n" if self._num_rows else "\n") + text)
        self._file.flush()
        self._num_rows += 1
        self._num_cycles = measured.cycle + 1

    def end(self, ending: Ending) -> None:
        totals, fast = ending.totals, ending.is_fast_enough
        tail = {
            "out_of_bounds": {
                "count": totals.num_failed,
                "okay": _bool(totals.num_failed == 0),
            },
            "average_bus_bandwidth": {
                "bandwidth": totals.average_busbw_gb_per_s,
                "okay": "unchecked" if fast is None else _bool(fast),
            },
            "errors": list(ending.errors),
            "end_time": _time(ending.ended_at),
            "ronde": _ours(self._heading, ending) | {"num_cycles": self._num_cycles},
        }
        text = json.dumps(_finite(tail), allow_nan=False)
        self._file.write("\n], " + text[1:] + "\n")
        self._file.close()

    def _entry(self, measured: Measured) -> dict[str, Any]:
        row = measured.row
        root = -1 if row.root is None else row.root
        is_cpu_time = self._heading.options.loop.is_cpu_time
        entry: dict[str, Any] = {
            "size": row.size_bytes,
            "count": row.count,
            "type": row.dtype,
            "redop": row.redop,
            "root": f"{root:6d}",
        }
        for name, half in (
            ("out_of_place", measured.out_of_place),
            ("in_place", measured.in_place),
        ):
            entry[name] = _half(half, is_cpu_time=is_cpu_time)
            if half.iterations is not None:
                entry[f"{name}_per_iter"] = _iterations(half.iterations)
        entry["actual_iterations"] = measured.num_iterations
        entry["experiment_name"] = ""
        ours: dict[str, Any] = {"cycle": measured.cycle, "at": _time(measured.at)}
        if self._heading.limit is not None:
            ours["limit_percent"] = limit_percent(measured, self._heading)
        return entry | {"ronde": ours}


def _config(heading: Heading) -> dict[str, Any]:
    options = heading.options
    sweep, loop = options.sweep, options.loop
    step = {"step_bytes": sweep.step_bytes}
    if sweep.factor > 1:
        step = {"step_factor": sweep.factor}
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
        "devices": [
            {
                "rank": device.rank,
                "group": device.group,
                "pid": device.pid,
                "hostname": device.host,
                "device": device.index,
                "device_hex": device.bus_text,
                "device_info": device.name,
            }
            for device in heading.devices
        ],
    }


def _ours(heading: Heading, ending: Ending) -> dict[str, Any]:
    limit = heading.limit
    bound = None
    if limit is not None:
        bound = {
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
        "peak_busbw_gb_per_s": ending.totals.peak_busbw_gb_per_s,
        "num_wrong": ending.totals.num_wrong if ending.totals.is_checked else None,
        "ended_by": ending.reason.name.lower(),
    }


def _half(half: Half, *, is_cpu_time: bool) -> dict[str, Any]:
    side = half.side
    return {
        "cpu_time" if is_cpu_time else "time": side.time_us,
        "alg_bw": side.algbw_gb_per_s,
        "bus_bw": side.busbw_gb_per_s,
        "nwrong": None if side.num_wrong is None else float(side.num_wrong),
    }


def _iterations(times: IterationTimes) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "skipped_iterations": times.num_skipped,
        "min_us": times.min_us,
        "max_us": times.max_us,
        "avg_us": times.mean_us,
        "p50_us": times.median_us,
        "p95_us": times.percentile_us(95),
        "p99_us": times.percentile_us(99),
        "stdev_us": times.deviation_us,
        "cv_pct": times.variation_percent,
        "times_us": list(times.times_us),
    }
    if len(times.rank_times_us) > 1:
        entry["per_process_max_times_us"] = [list(t) for t in times.rank_times_us]
    return entry


def _bool(value: bool) -> str:  # noqa: FBT001  theirs are words
    return "true" if value else "false"


def _time(at: datetime) -> str:
    return at.strftime(_STAMP)


def _finite(value: Any) -> Any:  # noqa: ANN401  whatever JSON has
    """Round floats to six decimals, and write those that JSON has not as words."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list):
        return [_finite(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return value
