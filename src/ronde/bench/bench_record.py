"""Runs as records: what ``ronde bench`` and ``ronde bench read`` both write."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from ronde.bench.rows import Row, Side
from ronde.bench.runs import RankCount, RankSource, Run
from ronde.errors import UsageError
from ronde.records import MachineRecord, Record

KIND = "bench"
_ELSEWHERE = MachineRecord(num_cores=0, cpu="", python="", platform="")
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_record(run: Run, *, was_measured_here: bool = True) -> Record:
    """Return a run as a record of kind ``bench``; one record is one run.

    JSON has no infinity and no NaN: they are written as text.

    Args:
        run: What was measured.
        was_measured_here: False for a run read from a log, whose machine is unknown.

    Raises:
        UsageError: ``facts`` holds what JSON has no form for; from ``to_json()``.
    """
    values = cast("dict[str, Any]", _finite(asdict(run)))
    machine = MachineRecord.here() if was_measured_here else _ELSEWHERE
    return Record(KIND, values, machine=machine)


def from_record(record: Record) -> Run:
    """Return the run that a record was made of; entries of later versions are ignored.

    Raises:
        UsageError: The record is of another kind, or its values are no run's.
    """
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
    count = RankCount(
        value=_integer(ranks["value"]),
        source=RankSource(ranks["source"]),
        low=_integer(ranks["low"]),
        high=_integer(ranks["high"]),
    )
    extras: list[dict[str, Any]] = values["extras"]
    return Run(
        test=str(values["test"]),
        ranks=count,
        rows=tuple(_row(each) for each in values["rows"]),
        extras=tuple({k: _extra(v) for k, v in each.items()} for each in extras),
        footers={str(k): str(v) for k, v in values["footers"].items()},
        average_busbw_gb_per_s=_number(values["average_busbw_gb_per_s"]),
        num_out_of_bounds=_integer(values["num_out_of_bounds"]),
        is_complete=bool(values["is_complete"]),
        warnings=tuple(str(each) for each in values["warnings"]),
        engine=str(values["engine"]),
        facts=dict(values["facts"]),
    )


def _row(values: Mapping[str, Any]) -> Row:
    return Row(
        size_bytes=int(values["size_bytes"]),
        count=int(values["count"]),
        dtype=str(values["dtype"]),
        redop=str(values["redop"]),
        root=_integer(values["root"]),
        out_of_place=_side(values["out_of_place"]),
        in_place=_side(values["in_place"]),
    )


def _side(values: Mapping[str, Any] | None) -> Side | None:
    if values is None:
        return None
    return Side(
        time_us=_number(values["time_us"]),
        algbw_gb_per_s=_number(values["algbw_gb_per_s"]),
        busbw_gb_per_s=_number(values["busbw_gb_per_s"]),
        num_wrong=_number(values["num_wrong"]),
    )


def _integer(value: int | None) -> int | None:
    return None if value is None else int(value)


def _number(value: float | str | None) -> float | None:
    return None if value is None else float(value)


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
