"""Tables of published speeds, in which empty speeds are predicted."""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ronde.errors import UsageError
from ronde.plan.answer import binding_parts, contradiction_of
from ronde.plan.facts import MOST
from ronde.plan.posterior import infer
from ronde.plan.priors import load_priors
from ronde.plan.setup import (
    Cluster,
    Exchange,
    Overlap,
    Point,
    Program,
    Setup,
    Size,
    speeds_by_size,
)
from ronde.units import grouped

NEEDED = ("series", "gpus", "throughput")
ADDED = ("predicted", "low", "high", "binds")
_PRACTICAL = 0.75  # NCCL's planning figure of a GPU's NVLinks, relative to their sum
_NVLINK_GB_PER_S = 200.0  # of a generation that is not named
_MOST_TCP_GBIT = 25  # faster lines of an unnamed transport are taken for RDMA
_MOST_DIFFERENT = 1.1  # of two speeds of one size
_GRID_SPREAD = 1.3  # half of an interval between layouts of model parallelism
_SHARDINGS = {
    "FULL_SHARD": Exchange.SHARD_ALL,
    "SHARD_GRAD_OP": Exchange.SHARD_GRADIENTS,
}


@dataclass(slots=True)
class SheetRow:
    """A row of a table with its speed; cells of unknown columns are kept."""

    cells: dict[str, str]
    line: int

    def number(self, column: str, *, is_whole: bool = False) -> float | None:
        """Return the number in a cell, or None if it is empty.

        Raises:
            UsageError: It is no number above 0.
        """
        text = self.text(column)
        if not text:
            return None
        try:
            value = float("nan" if "_" in text else text)
        except ValueError:
            value = math.nan
        if not 0 < value <= MOST or (is_whole and value != int(value)):
            rule = "a whole number" if is_whole else "a number"
            raise UsageError(
                f"line {self.line}: {column} must be {rule} above 0, got {text!r}. "
                "Correct it, or leave the cell empty."
            )
        return value

    @property
    def size(self) -> Size:
        num_ranks = self.number("gpus", is_whole=True)
        if num_ranks is None:
            raise UsageError(f"line {self.line}: gpus must be a number, got ''.")
        nodes = self.number("nodes", is_whole=True)
        if nodes is None:
            nodes = math.ceil(num_ranks / (self.number("gpus_per_node") or num_ranks))
        if nodes > num_ranks:
            raise UsageError(
                f"line {self.line}: nodes must be at most the gpus, got {nodes:g} for "
                f"{num_ranks:g}."
            )
        parts = self.number("accumulation") or 1.0
        return Size(int(num_ranks), int(nodes), self.number("batch_a_gpu"), parts)

    def text(self, column: str) -> str:
        return (self.cells.get(column) or "").strip()


def read_sheet(lines: Iterable[str]) -> tuple[list[str], list[SheetRow]]:
    """Return the columns and the rows of a table.

    Raises:
        UsageError: A column is missing, or no row is there.
    """
    reader = csv.DictReader(lines, restval="")
    columns = [*(reader.fieldnames or ())]
    if missing := [name for name in NEEDED if name not in columns]:
        raise UsageError(
            f"SHEET must have the columns {', '.join(NEEDED)}, with commas in between, "
            f"but has no {', '.join(missing)}, got {', '.join(columns) or 'none'}. Add "
            "them to its first line."
        )
    if len({*columns}) < len(columns):
        twice = next(name for name in columns if columns.count(name) > 1)
        raise UsageError(f"SHEET must have each column once, got {twice!r} twice.")
    rows: list[SheetRow] = []
    for cells in reader:
        if None in cells:
            raise UsageError(
                f"line {reader.line_num} must have {len(columns)} cells, got more. Put "
                "cells with commas in quotes."
            )
        rows.append(SheetRow(dict(cells), reader.line_num))
    return columns, rows


def complete(rows: Sequence[SheetRow]) -> tuple[list[str], list[str]]:
    """Predict every empty speed from the other rows of its series, in place.

    Returns the reasons of series without a prediction, and the assumptions.
    """
    for row in rows:
        row.cells |= dict.fromkeys(ADDED, "")
    left_out, notes = list[str](), list[str]()
    for name, each in grouped((row.text("series"), row) for row in rows).items():
        try:
            notes += (f"series {name!r}: {note}" for note in _complete_series(each))
        except UsageError as error:
            left_out.append(f"no prediction for series {name!r}: {error}")
    if not any(row.text("nodes") or row.text("gpus_per_node") for row in rows):
        notes.append("no column nodes or gpus_per_node: all ranks are on one node.")
    return left_out, notes


def _complete_series(rows: Sequence[SheetRow]) -> Iterable[str]:
    """Predict the empty speeds of a series; return its doubtful speeds."""
    known = [row for row in rows if row.number("throughput") is not None]
    asked = [row for row in rows if row.number("throughput") is None]
    if asked and not known:
        raise UsageError("it has no speed. Give one or more.")
    if not asked:
        return []
    if rows[0].text("kind") == "model_parallel":
        _complete_grid(known, asked)
        return []
    posterior = infer(setup_of(rows), load_priors())
    for row in asked:
        found = posterior.predict(row.size)
        binds, _ = binding_parts(posterior, found)
        figures = (f"{value:.6g}" for value in (found.middle, found.low, found.high))
        cells = *figures, " and ".join(binds)
        row.cells |= dict(zip(ADDED, cells, strict=True))
    doubts = [text] if (text := contradiction_of(posterior)) else []
    return doubts + [
        f"speeds of {size.num_ranks} ranks are {min(speeds):g} to {max(speeds):g}, of "
        "which the median counts."
        for size, speeds in _speeds(known).items()
        if max(speeds) > _MOST_DIFFERENT * min(speeds)
    ]


def _speeds(rows: Sequence[SheetRow]) -> dict[Size, list[float]]:
    """Return the known speeds of each size, in order."""
    known = ((row.size, row.number("throughput")) for row in rows)
    return speeds_by_size(Point(s, speed) for s, speed in known if speed is not None)


def _complete_grid(known: Sequence[SheetRow], asked: Sequence[SheetRow]) -> None:
    """Predict other layouts of model parallelism: equal arithmetic of a GPU."""

    def share(row: SheetRow) -> float:
        return row.size.num_ranks / (row.number("parameters") or 1.0)

    work = median((row.number("throughput") or 0.0) / share(row) for row in known)
    for row in asked:
        middle = work * share(row)
        figures = middle, middle / _GRID_SPREAD, middle * _GRID_SPREAD
        texts = (f"{value:.6g}" for value in figures)
        row.cells |= dict(zip(ADDED, (*texts, "compute"), strict=True))


def setup_of(rows: Sequence[SheetRow]) -> Setup:
    """Return the facts and the speeds of a series.

    A fact is that of the smallest size that states it, also of rows without a speed.

    Raises:
        UsageError: A cell is no number.
    """
    first = SheetRow({}, 0)
    for row in sorted(rows, key=lambda row: row.size.order, reverse=True):
        first.cells |= {name: text for name, text in row.cells.items() if text}
        first.line = row.line
    half = any(word in first.text("precision") for word in ("16", "fp8", "bf8"))
    method, unit = first.text("method"), first.text("unit").removesuffix("/s")
    program = Program(
        name=first.text("model"),
        unit=unit or "units",
        units_a_sample=first.number("units_a_sample")
        or (None if unit == "tokens" else 1.0),
        num_parameters=first.number("parameters"),
        itemsize=2.0 if half else 4.0,
        overlap=_overlap_of(method),
        exchange=_exchange_of(method, first.text("sharding")),
        is_accumulating=first.text("kind") == "accumulation",
    )
    points = (Point(size, median(found)) for size, found in _speeds(rows).items())
    return Setup(program, _cluster_of(first), tuple(points))


def _overlap_of(method: str) -> Overlap:
    if method.startswith("BSP"):
        return Overlap.NONE
    return Overlap.TENSOR if method.startswith("WFBP") else Overlap.BUCKET


def _exchange_of(method: str, sharding: str) -> Exchange:
    if method.endswith("PS") or "parameter server" in method:
        return Exchange.PARAMETER_SERVER
    usual = "FULL_SHARD" if method == "FSDP" else ""
    return _SHARDINGS.get(sharding or usual, Exchange.ALL_REDUCE)


def _cluster_of(row: SheetRow) -> Cluster:
    inside, line = row.number("intra_gb_per_s"), row.number("node_gbit_per_s")
    has_nvlink = "NV" in row.text("intra_link")
    if inside is not None:
        inside *= _PRACTICAL
    elif has_nvlink:
        inside = _NVLINK_GB_PER_S
    usual = "" if line is None else "tcp" if line <= _MOST_TCP_GBIT else "rdma"
    return Cluster(
        ranks_per_node=int(row.number("gpus_per_node") or row.size.num_ranks),
        node_gbit_per_s=line,
        transport=row.text("transport") or usual,
        gpu_link_gb_per_s=inside,
    )
