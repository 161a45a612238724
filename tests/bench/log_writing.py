"""Writes logs as nccl-tests does, for tests of what reads them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ronde.bench import Row, Side
from ronde.render import number

NTHREAD = (
    "# nThread 1 nGpus 1 minBytes 8 maxBytes 1024 step: 2(factor) warmup iters: 1 "
    "iters: 20 agg iters: 1 validation: 1 graph: 0 unalign: 0"
)
HALVES = "           out-of-place                       in-place          "


@dataclass(frozen=True, slots=True)
class Form:
    """Form of a log."""

    num_devices: int = 2  # lines in the list of devices; 0 for no list
    has_banner: bool = True  # version, start and nThread
    has_timestamps: bool = False  # as with ``-S 1``
    has_per_iteration: bool = False  # as with ``-I 1``
    has_limit: bool = False  # as in ronde's own
    prefix: str = ""
    end: str = "\n"


def as_printed(value: float, width: int) -> float:
    return float(number(value, width))


def header(form: Form) -> list[str]:
    """Return the three lines above the rows."""
    side = ["time", "algbw", "busbw", "#wrong"]
    if form.has_per_iteration:
        side += ["i_min", "i_max", "i_p99", "i_cv%"]
    names = ["size", "count", "type", "redop", "root", *side, *side]
    if form.has_timestamps:
        names.append("timestamp")
    if form.has_limit:
        names.append("%limit")
    title = HALVES
    if form.has_per_iteration:
        title = "  out-of-place (+ per-iteration)   in-place (+ per-iteration)"
    return [
        f"# {' ' * 56}{title}",
        "#       " + "  ".join(f"{name:>7}" for name in names) + " ",
        "#        (B)    (elements)                               (us)  (GB/s)",
    ]


def row_line(row: Row, form: Form) -> str:
    line = (
        f"{row.size_bytes:12d}  {row.count:12d}  {row.dtype:>8}  {row.redop:>6}  "
        f"{-1 if row.root is None else row.root:6d}"
    )
    for side in (row.out_of_place, row.in_place):
        assert side is not None
        line += (
            f"  {number(side.time_us or 0, 7)}  {number(side.algbw_gb_per_s or 0, 6)}"
            f"  {number(side.busbw_gb_per_s or 0, 6)}"
        )
        line += "    N/A" if side.num_wrong is None else f"  {side.num_wrong:6g}"
        if form.has_per_iteration:
            line += "     1.00     3.00     2.00    12.50"
    if form.has_timestamps:
        line += f"{'2026-11-21 18:30:00':>21}"
    if form.has_limit:
        line += "   88.25"
    return line


def log_lines(test: str, rows: Sequence[Row], form: Form) -> list[str]:
    """Return a whole log of one run, without line ends."""
    lines: list[str] = []
    if form.has_banner:
        lines += [
            "# nccl-tests version 2.19.6 nccl-headers=23007 nccl-library=23007",
            f"# Collective test starting: {test}_perf",
            NTHREAD,
            "#",
        ]
    if form.num_devices:
        lines.append("# Using devices")
        lines += [
            f"#  Rank {rank:2d} Group  0 Pid {4000 + rank:6d} on {'node-1':>10} "
            f"device {rank:2d} [0000:0f:00] NVIDIA H100 80GB HBM3"
            for rank in range(form.num_devices)
        ]
        lines.append("#")
    lines += header(form)
    lines += [row_line(row, form) for row in rows]
    values = [
        side.busbw_gb_per_s or 0.0
        for row in rows
        for side in (row.out_of_place, row.in_place)
        if side is not None
    ]
    mean = sum(values) / len(values) if values else 0.0
    lines += [
        "# Out of bounds values : 0 OK",
        f"# Avg bus bandwidth    : {mean:g} ",
        "#",
        f"# Collective test concluded: {test}_perf",
        "#",
        "",
    ]
    return lines


def log(test: str, rows: Sequence[Row], form: Form = Form()) -> str:
    return "".join(
        f"{form.prefix}{line}{form.end}" for line in log_lines(test, rows, form)
    )


def side(
    time_us: float, algbw: float, busbw: float, num_wrong: float | None = 0.0
) -> Side:
    """Return a half as a log can hold it."""
    return Side(
        as_printed(time_us, 7), as_printed(algbw, 6), as_printed(busbw, 6), num_wrong
    )


def all_reduce_row(size: int, time_us: float = 100.0, n: int = 2) -> Row:
    """Return a plausible row of an all_reduce of floats among ``n`` ranks."""
    algbw = size / time_us / 1e3
    half = side(time_us, algbw, algbw * 2 * (n - 1) / n)
    return Row(size, size // 4, "float", "sum", -1, half, half)


def load_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12) of what ``ronde bench -J`` writes."""
    path = files("ronde.bench").joinpath("schema", "bench-result.json")
    return json.loads(path.read_text(encoding="utf-8"))
