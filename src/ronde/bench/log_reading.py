"""Reader of benchmark results: nccl-tests' text or JSON, or ronde's records.

nccl-tests' JSON has versions 1 to 3 and is not always JSON: infinity stands there as a
bare ``inf``, and early releases misspelled two keys. Its list of environment variables
is not read, as it may hold secrets.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from ronde.bench.log_state import (
    AVERAGE,
    OUT_OF_BOUNDS,
    ListedDevice,
    Log,
    ParserState,
    name_in,
)
from ronde.bench.log_text import read_text
from ronde.bench.results import (
    HALVES,
    KIND,
    Extra,
    RankCount,
    RankSource,
    Row,
    Run,
    Side,
    from_record,
)
from ronde.errors import UsageError
from ronde.records import Record

VERSIONS = (1, 2, 3)

# A string that does not end reaches to the end of the text, in one pass.
_BARE = re.compile(r'"(?:[^"\\]|\\.)*+"?|-?\b(?:inf|nan)\b', re.DOTALL)
_JSON_NAMES = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN", "-nan": "NaN"}
_SPELLINGS = {
    "average_bus_bandwidith": "average_bus_bandwidth",
    "bandwidith": "bandwidth",
}
_INTEGER = re.compile(r"\s*-?\d{1,9}\s*")
_Object = Mapping[str, Any]
T = TypeVar("T")


def read_log(text: str, source: str, *, test: str = "") -> Log:
    """Read nccl-tests' text or JSON, or records of ronde's.

    Raises:
        UsageError: There is nothing to read.
    """
    if not text.lstrip("\ufeff \t\r\n").startswith("{"):
        return read_text(text, source, test=test)
    if '"schema"' in text.strip().split("\n", 1)[0]:
        return _read_records(text, source)
    return _read_json(text, source, test)


def _read_json(text: str, source: str, test: str) -> Log:
    content = _parse(text, source)
    state = ParserState(source, 1, is_json=True, has_table="results" in content)
    if content.get("version") not in VERSIONS:
        state.warnings.append(f"its version is {content.get('version')!r}, not 1 to 3")
    try:
        _read_head(content, state)
        _read_footers(content, state)
        results = _list(content, "results")
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error
    damage: list[str] = []
    for index, result in enumerate(results):
        try:
            _read_result(_object({"a result": result}, "a result"), state)
            state.positions.append(index)
        except UsageError as error:
            state.has_gap = True
            damage.append(f"{source}: result {index} was left out: {error}")
    if damage and not state.rows:
        raise UsageError(damage[0])
    cuts = [f"{source}: run 1 {each}" for each in state.missing()]
    return Log([state.finish(test)], damage, cuts)


def _parse(text: str, source: str) -> _Object:
    def named(match: re.Match[str]) -> str:
        return _JSON_NAMES.get(match[0], match[0])

    def spelled(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {_SPELLINGS.get(key, key): value for key, value in pairs}

    try:
        content = json.loads(_BARE.sub(named, text), object_pairs_hook=spelled)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{source}:{error.lineno}: log must be whole JSON: {error.msg} near "
            f"character {error.colno}."
        ) from error
    except ValueError as error:
        raise UsageError(f"{source}: log must be JSON: {error}.") from error
    except RecursionError as error:
        raise UsageError(f"{source}: log must not be nested so deep.") from error
    return cast("_Object", content)


def _read_head(content: _Object, state: ParserState) -> None:
    words = [str(each) for each in _list(content, "args")]
    ours, config = _object(content, "ronde"), _object(content, "config")
    state.title = name_in(str(ours.get("test") or (words[0] if words else "")))
    state.facts["arguments"] = " ".join(words[1:])
    state.engine = str(ours.get("engine", ""))
    names = ("start_time", "end_time", "nccl_version")
    state.facts |= {n: content[n] for n in names if content.get(n) is not None}
    for entry in _list(config, "devices"):
        device = _object({"a device": entry}, "a device")
        rank, group = _integer(device, "rank"), _integer(device, "group")
        host, name = device.get("hostname", ""), device.get("device_info", "")
        state.listed.devices.append(ListedDevice(rank, group, str(host), str(name)))
    if ours.get("size") is not None:
        size = _integer(ours, "size")
        state.given = RankCount.exactly(size, RankSource.GIVEN)
    elif "nthreads" in config and "ngpus" in config:
        num_each = _integer(config, "nthreads") * _integer(config, "ngpus")
        state.listed.num_each = max(1, num_each)


def _read_footers(content: _Object, state: ParserState) -> None:
    bounds = _object(content, "out_of_bounds")
    if "count" in bounds:
        okay = "OK" if str(bounds.get("okay")).lower() == "true" else "FAILED"
        state.add_footer(OUT_OF_BOUNDS, f"{_integer(bounds, 'count')} {okay}", -1)
    average = _object(content, "average_bus_bandwidth")
    bandwidth = _number("bandwidth", average.get("bandwidth"))
    if bandwidth is not None:
        verdict = {"true": " OK", "false": " FAILED"}
        okay = verdict.get(str(average.get("okay")).lower(), "")
        state.add_footer(AVERAGE, f"{bandwidth:g}{okay}", -1)
    errors = _list(content, "errors")
    state.failures += [(-1, f"error: {each}") for each in errors]


def _read_result(result: _Object, state: ParserState) -> None:
    extras: dict[str, Extra] = {}
    root = result.get("root")
    if isinstance(root, str) and _INTEGER.fullmatch(root):
        root = int(root)
    if root is not None and type(root) is not int:
        raise UsageError(f"root must be an integer, got {root!r}.")
    for name in ("type", "redop"):
        if not isinstance(result.get(name), str):
            raise UsageError(f"{name} must be text, got {result.get(name)!r}.")
    size_bytes, count = _integer(result, "size"), _integer(result, "count")
    kinds = (result["type"].strip(), result["redop"].strip())
    sides = [_side(result, half, extras) for half in HALVES]
    row = Row(size_bytes, count, *kinds, root, sides[0], sides[1])
    if result.get("actual_iterations") is not None:
        extras["actual_iterations"] = float(_integer(result, "actual_iterations"))
    percent = _number("limit_percent", _object(result, "ronde").get("limit_percent"))
    if percent is not None:
        extras["%limit"] = percent
    state.rows.append(row)
    state.extras.append(extras)


def _side(result: _Object, half: str, extras: dict[str, Extra]) -> Side | None:
    side = _object(result, half)
    if not side:
        return None
    names = ("time", "alg_bw", "bus_bw", "nwrong")
    time, algbw, busbw, wrong, cputime = (
        _number(name, side.get(name)) for name in (*names, "cpu_time")
    )
    if cputime is not None:
        extras[f"{half}.cputime_us"] = cputime
    for name, value in _object(result, f"{half}_per_iter").items():
        if not isinstance(value, list) and (number := _number(name, value)) is not None:
            spelled = "cv_percent" if name == "cv_pct" else name
            extras[f"{half}.i_{spelled}"] = number
    return Side(time, algbw, busbw, wrong)


def _entry(entries: _Object, name: str, kind: type[T]) -> T:
    value = entries.get(name)
    if value is not None and not isinstance(value, kind):
        rule = "an object" if kind is dict else "a list"
        raise UsageError(f"{name} must be {rule}, got {str(value)[:60]!r}.")
    return kind() if value is None else value


def _object(entries: _Object, name: str) -> _Object:
    return cast("_Object", _entry(entries, name, dict))


def _list(entries: _Object, name: str) -> list[Any]:
    return cast("list[Any]", _entry(entries, name, list))


def _integer(entries: _Object, name: str) -> int:
    value = entries.get(name)
    if type(value) is not int or value < 0:
        raise UsageError(f"{name} must be an integer of at least 0, got {value!r}.")
    return value


def _number(name: str, value: object) -> float | None:
    if isinstance(value, str) and value in _JSON_NAMES:
        value = float(value.removeprefix("-") if "nan" in value else value)
    if value is None or (isinstance(value, int | float) and type(value) is not bool):
        try:
            return None if value is None else float(value)
        except OverflowError:
            return math.inf
    raise UsageError(f"{name} must be a number, got {value!r}.")


def _read_records(text: str, source: str) -> Log:
    log = Log([], [], [])
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        try:
            record = Record.from_json(line) if line.strip() else None
            if record is not None and record.kind == KIND:
                run = from_record(record)
                at = f"{source}:{number}: "
                log.runs.append(_with_failures(run, at))
                if run.average_busbw_gb_per_s is None and not run.is_complete:
                    log.cuts.append(f"{at}the run is not complete")
        except UsageError as error:
            log.damage.append(f"{source}:{number}: {error}")
    if not log.runs:
        last = f"{source}:{len(lines)}: records must hold one of kind {KIND}, got none."
        raise UsageError([*log.damage, last][0])
    return log


def _with_failures(run: Run, at: str) -> Run:
    failures = list(run.failures)
    if not failures:
        failures = [text for _, text in run.bad_values()]
        if run.num_out_of_bounds:
            failures.append(f"checks that failed: {run.num_out_of_bounds}")
    # A run that was read from a log names that log's lines.
    at = "" if "source" in run.facts else at
    return replace(run, failures=tuple(f"{at}{each}" for each in failures))
