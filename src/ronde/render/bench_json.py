"""nccl-tests' JSON, version 3, written while the benchmark runs.

What is written is valid JSON at every end, Ctrl-C included. Their keys come in their
order; ours are under one key, ``ronde``.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, TextIO

from ronde.bench.results import PLACES, Ending, Heading, IterationTimes, Measured
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
            "start_time": heading.started_at.strftime(_STAMP),
            "args": ["ronde", "bench", *heading.options.words],
            "env": list(heading.shown_variables),
            "nccl_version": heading.nccl_version,
            "config": _config(heading),
        }
        # The list of rows stays open, as does the object around it.
        self._file.write(json.dumps(head)[:-1] + ', "results": [')
        self._file.flush()

    def row(self, measured: Measured) -> None:
        self._file.write((",\n" if self._num_rows else "\n") + self._entry(measured))
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
            "end_time": ending.ended_at.strftime(_STAMP),
            "ronde": _ours(self._heading, ending) | {"num_cycles": self._num_cycles},
        }
        self._file.write("\n], " + _dump(tail)[1:] + "\n")
        self._file.close()

    def _entry(self, measured: Measured) -> str:
        row = measured.row
        root = -1 if row.root is None else row.root
        time = "cpu_time" if self._heading.options.loop.is_cpu_time else "time"
        entry: dict[str, Any] = {
            "size": row.size_bytes,
            "count": row.count,
            "type": row.dtype,
            "redop": row.redop,
            "root": f"{root:6d}",
        }
        for place in PLACES:
            side, times, _ = getattr(measured, place)
            entry[place] = {
                time: side.time_us,
                "alg_bw": side.algbw_gb_per_s,
                "bus_bw": side.busbw_gb_per_s,
                "nwrong": None if side.num_wrong is None else float(side.num_wrong),
            }
            if times is not None:
                entry[f"{place}_per_iter"] = _iterations(times)
        entry["actual_iterations"] = measured.num_iterations
        entry["experiment_name"] = ""
        ours: dict[str, Any] = {
            "cycle": measured.cycle,
            "at": measured.at.strftime(_STAMP),
        }
        if self._heading.limit is not None:
            ours["limit_percent"] = limit_percent(measured, self._heading)
        return _dump(entry | {"ronde": ours})


def _config(heading: Heading) -> dict[str, Any]:
    options = heading.options
    sweep, loop = options.sweep, options.loop
    step = {"step_bytes": sweep.step_bytes}
    if sweep.factor > 1:
        step = {"step_factor": sweep.factor}
    names = ("rank", "group", "pid", "hostname", "device", "device_hex", "device_info")
    devices = [
        (d.rank, d.group, d.pid, d.host, d.index, d.bus_text, d.name)
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


def _ours(heading: Heading, ending: Ending) -> dict[str, Any]:
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
        "num_wrong": totals.num_wrong if totals.is_checked else None,
        "ended_by": ending.reason.name.lower(),
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


def _dump(entry: dict[str, Any]) -> str:
    return json.dumps(_finite(entry), allow_nan=False)


def _finite(value: Any) -> Any:  # noqa: ANN401  whatever JSON has
    """Round floats to six decimals, and write those that JSON has not as words."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list):
        return [_finite(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return value
