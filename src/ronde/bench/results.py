"""One run of a benchmark: rows, ranks, and how far it came; and its record."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeVar, cast

from ronde.errors import UsageError
from ronde.records import MachineRecord, Record


@dataclass(frozen=True, slots=True)
class Side:
    """One half of a row: out of place or in place."""

    # microseconds an operation; None where the cell was not printed
    time_us: float | None
    algbw_gb_per_s: float | None  # bytes of the operation by its time, in 1e9 bytes/s
    busbw_gb_per_s: float | None
    # wrong elements over all ranks; None where nothing was checked
    num_wrong: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One size of one collective."""

    size_bytes: int  # the larger of what a rank sends and receives
    count: int  # elements, the argument that each rank gives
    dtype: str  # nccl-tests' name of the type, such as ``float``
    redop: str  # ``sum`` and so on, ``none``, or empty where the cell was blank
    root: int | None  # the root; -1 or None where there is none
    out_of_place: Side | None  # None where that half was not measured
    in_place: Side | None

    def sides(self) -> list[Side]:
        """Return the halves that were measured."""
        return [side for side in (self.out_of_place, self.in_place) if side is not None]


Extra = float | str
"""A cell that only some logs have."""


class RankSource(StrEnum):
    """What tells how many ranks took part."""

    GIVEN = "given"
    DEVICES = "devices"  # the list of devices, one line a rank
    RATIO = "ratio"  # busbw by algbw, which is a function of it
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class RankCount:
    """How many ranks took part, and how sure that is."""

    value: int | None = None  # the number; None where nothing tells
    source: RankSource = RankSource.UNKNOWN
    # The least and the largest number that agree with what was printed.
    low: int | None = None
    high: int | None = None

    @classmethod
    def exactly(cls, value: int, source: RankSource) -> "RankCount":
        return cls(value, source, value, value)


@dataclass(frozen=True, slots=True)
class Run:
    """One benchmark of one collective."""

    test: str  # such as ``all_reduce``; empty where it is unknown
    ranks: RankCount
    # In the order of measuring. Sizes repeat: with several dtypes, operations, roots or
    # cycles, and where rounding made them 0.
    rows: tuple[Row, ...]
    # One mapping a row, or none at all: cells beyond a ``Row``, such as
    # ``out_of_place.cputime_us``, ``in_place.i_p99_us`` or ``timestamp``.
    extras: tuple[Mapping[str, Extra], ...] = ()
    # What followed the rows, such as ``Avg bus bandwidth``, as printed.
    footers: Mapping[str, str] = field(default_factory=dict[str, str])
    average_busbw_gb_per_s: float | None = None  # as the run stated it itself
    num_out_of_bounds: int | None = None  # failed checks that the run stated itself
    is_complete: bool = True  # whether it ran to its end and all rows are here
    warnings: tuple[str, ...] = ()  # what is odd about it, one sentence each
    engine: str = ""  # what moved the bytes; empty where it is unknown
    facts: Mapping[str, object] = field(default_factory=dict[str, object])

    def all_busbw_gb_per_s(self) -> list[float]:
        """Return every busbw of the rows, out of place before in place."""
        values = [side.busbw_gb_per_s for row in self.rows for side in row.sides()]
        return [value for value in values if value is not None]

    def num_wrong(self) -> float | None:
        """Return the wrong elements of all rows; None where nothing was checked."""
        counts = [side.num_wrong for row in self.rows for side in row.sides()]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None


KIND = "bench"
_Number = TypeVar("_Number", int, float)
_ELSEWHERE = MachineRecord(num_cores=0, cpu="", python="", platform="")
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_record(run: Run, *, was_measured_here: bool = True) -> Record:
    """Return a run as a record of kind ``bench``; one record is one run.

    JSON has no infinity and no NaN: they are written as text.
    """
    values = cast("dict[str, Any]", _finite(asdict(run)))
    machine = MachineRecord.here() if was_measured_here else _ELSEWHERE
    return Record(KIND, values, machine=machine)


def from_record(record: Record) -> Run:
    """Return a record's run; entries of later versions are ignored."""
    if record.kind != KIND:
        raise UsageError(f"kind of a record must be {KIND}, got {record.kind!r}.")
    try:
        return _run(record.values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"values of a {KIND} record must be a run's, got one that is not: "
            f"{type(error).__name__} {error}."
        ) from error


def _run(values: Mapping[str, Any]) -> Run:
    ranks = values["ranks"]
    value, low, high = (
        _optional(int, ranks[name]) for name in ("value", "low", "high")
    )
    extras: list[dict[str, Any]] = values["extras"]
    return Run(
        test=str(values["test"]),
        ranks=RankCount(value, RankSource(ranks["source"]), low, high),
        rows=tuple(_row(each) for each in values["rows"]),
        extras=tuple({k: _extra(v) for k, v in each.items()} for each in extras),
        footers={str(k): str(v) for k, v in values["footers"].items()},
        average_busbw_gb_per_s=_optional(float, values["average_busbw_gb_per_s"]),
        num_out_of_bounds=_optional(int, values["num_out_of_bounds"]),
        is_complete=bool(values["is_complete"]),
        warnings=tuple(str(each) for each in values["warnings"]),
        engine=str(values["engine"]),
        facts=dict(values["facts"]),
    )


def _row(values: Mapping[str, Any]) -> Row:
    size_bytes, count = int(values["size_bytes"]), int(values["count"])
    root = _optional(int, values["root"])
    sides = (_side(values[name]) for name in ("out_of_place", "in_place"))
    return Row(
        size_bytes, count, str(values["dtype"]), str(values["redop"]), root, *sides
    )


def _side(values: Mapping[str, Any] | None) -> Side | None:
    if values is None:
        return None
    return Side(*(_optional(float, values[each.name]) for each in fields(Side)))


def _optional(kind: Callable[[Any], _Number], value: object) -> _Number | None:
    return None if value is None else kind(value)


def _extra(value: float | str) -> float | str:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else float(value)


def _finite(value: object) -> object:
    """Return ``value`` with infinities and NaN as text, and tuples as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value)
        return {str(k): _finite(v) for k, v in entries.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in cast("list[object]", value)]
    return value
