"""Results of benchmarks in whatever form they lie in a file: text, JSON or records.

nccl-tests' JSON has versions 1 to 3 and is not always JSON: infinity stands there as a
bare ``inf``, and early releases misspelled two keys. Its list of environment variables
is passed over, for it holds whatever the user's environment held.
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
    KIND,
    PLACES,
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

# A string that does not end is taken to the end of the text, in one pass.
_STRING = r'"(?:[^"\\]|\\.)*+"?'
_BARE = re.compile(rf"{_STRING}|-?\b(?:inf|nan)\b", re.DOTALL)
_JSON_NAMES = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN", "-nan": "NaN"}
_TOKEN = re.compile(rf"{_STRING}|[{{}}\[\]]", re.DOTALL)
_SPELLINGS = {
    "average_bus_bandwidith": "average_bus_bandwidth",
    "bandwidith": "bandwidth",
}
_INTEGER = re.compile(r"\s*-?\d{1,9}\s*")
_Object = Mapping[str, Any]
T = TypeVar("T")


def read_json(text: str, source: str, *, test: str = "") -> Log:
    content, damage = _parse(text, source)
    state = ParserState(source, 1, has_table="results" in content)
    state.has_gap = bool(damage)
    if content.get("version") not in VERSIONS:
        state.warnings.append(f"its version is {content.get('version')!r}, not 1 to 3")
    try:
        _read_head(content, state)
        _read_footers(content, state, text)
        results = _list(content, "results")
    except UsageError as error:
        raise UsageError(f"{source}:1: {error}") from error
    bad: dict[int, str] = {}
    for index, result in enumerate(results):
        try:
            _read_result(_object({"a result": result}, "a result"), state)
            state.lines.append(index)
        except UsageError as error:
            bad[index] = str(error)
    spans: list[tuple[int, int]] = []

    def line_of(index: int) -> int:
        spans.extend(() if spans else _result_spans(text))
        return _line_at(text, spans[index][0])

    for index, why in bad.items():
        state.has_gap = True
        damage.append(f"{source}:{line_of(index)}: result {index} was left out: {why}")
    if damage and not state.rows:
        raise UsageError(damage[0])
    cuts = [f"{source}:{_line_at(text, len(text))}: run 1 {e}" for e in state.missing()]
    return Log([state.finish(test, line_of)], damage, cuts)


def _line_at(text: str, position: int) -> int:
    return 1 + text.count("\n", 0, max(position, 0))


def _parse(text: str, source: str) -> tuple[_Object, list[str]]:
    """Return the top object, and where the file is cut."""
    try:
        return _load(text), []
    except json.JSONDecodeError as error:
        spans = _result_spans(text)
        problem = f"{source}:{error.lineno}: log must be whole JSON: {error.msg}"
        problem += f" near character {error.colno}"
        try:
            if spans:
                return _load(f"{text[: spans[-1][1]]}]}}"), [problem]
        except (ValueError, RecursionError):
            pass
        raise UsageError(f"{problem}.") from error
    except ValueError as error:
        raise UsageError(f"{source}:1: log must be JSON: {error}.") from error
    except RecursionError as error:
        raise UsageError(f"{source}:1: log must not be nested so deep.") from error


def _load(text: str) -> _Object:
    """Parse JSON with bare ``inf`` and ``nan``; lines keep their numbers."""

    def named(match: re.Match[str]) -> str:
        return _JSON_NAMES.get(match[0], match[0])

    def spelled(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {_SPELLINGS.get(key, key): value for key, value in pairs}

    content = json.loads(_BARE.sub(named, text), object_pairs_hook=spelled)
    if not isinstance(content, dict):
        raise json.JSONDecodeError("the top must be an object", text, 0)
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


def _read_footers(content: _Object, state: ParserState, text: str) -> None:
    def line_of(name: str) -> int:
        return _line_at(text, text.rfind(f'"{name}'))

    bounds = _object(content, "out_of_bounds")
    if "count" in bounds:
        okay = "OK" if str(bounds.get("okay")).lower() == "true" else "FAILED"
        state.add_footer(
            OUT_OF_BOUNDS,
            f"{_integer(bounds, 'count')} {okay}",
            line_of("out_of_bounds"),
        )
    average = _object(content, "average_bus_bandwidth")
    bandwidth = _number("bandwidth", average.get("bandwidth"))
    if bandwidth is not None:
        verdict = {"true": " OK", "false": " FAILED"}
        okay = verdict.get(str(average.get("okay")).lower(), "")
        state.add_footer(AVERAGE, f"{bandwidth:g}{okay}", line_of("average_bus"))
    errors = _list(content, "errors")
    state.failures += [(line_of("errors"), f"error: {each}") for each in errors]


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
    sides = [_side(result, place, extras) for place in PLACES]
    row = Row(size_bytes, count, *kinds, root, sides[0], sides[1])
    if result.get("actual_iterations") is not None:
        extras["actual_iterations"] = float(_integer(result, "actual_iterations"))
    percent = _number("limit_percent", _object(result, "ronde").get("limit_percent"))
    if percent is not None:
        extras["%limit"] = percent
    state.rows.append(row)
    state.extras.append(extras)


def _side(result: _Object, place: str, extras: dict[str, Extra]) -> Side | None:
    side = _object(result, place)
    if not side:
        return None
    names = ("time", "alg_bw", "bus_bw", "nwrong")
    time, algbw, busbw, wrong, cputime = (
        _number(name, side.get(name)) for name in (*names, "cpu_time")
    )
    if cputime is not None:
        extras[f"{place}.cputime_us"] = cputime
    for name, value in _object(result, f"{place}_per_iter").items():
        if not isinstance(value, list) and (number := _number(name, value)) is not None:
            spelled = "cv_percent" if name == "cv_pct" else name
            extras[f"{place}.i_{spelled}"] = number
    return Side(time, algbw, busbw, wrong)


def _entry(entries: _Object, name: str, kind: type[T]) -> T:
    """Return an entry of one kind, an empty one where there is none."""
    value = entries.get(name)
    if value is not None and not isinstance(value, kind):
        what = "an object" if kind is dict else "a list"
        raise UsageError(f"{name} must be {what}, got {str(value)[:60]!r}.")
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
    """Return a number; infinity and NaN may stand as text."""
    if isinstance(value, str) and value in _JSON_NAMES:
        value = float(value.removeprefix("-") if "nan" in value else value)
    if value is None or (isinstance(value, int | float) and type(value) is not bool):
        try:
            return None if value is None else float(value)
        except OverflowError:
            return math.inf
    raise UsageError(f"{name} must be a number, got {value!r}.")


def _result_spans(text: str) -> list[tuple[int, int]]:
    """Return where each whole object of ``results`` begins and ends."""
    spans: list[tuple[int, int]] = []
    depth, start, key, is_results = 0, 0, "", False
    for match in _TOKEN.finditer(text):
        mark = match[0]
        if mark[0] == '"':
            key = mark if depth == 1 else key
        elif mark in "{[":
            depth += 1
            if depth == 2:
                is_results = key == '"results"' and mark == "["
            elif depth == 3:
                start = match.start()
        else:
            if depth == 3 and is_results and mark == "}":
                spans.append((start, match.end()))
            depth -= 1
    return spans


def read_log(text: str, source: str, *, test: str = "") -> Log:
    """Read nccl-tests' text or JSON, or records of ronde's."""
    # Runs have warnings of what their log lacks; damage is what could not be read.
    if not text.lstrip("\ufeff \t\r\n").startswith("{"):
        return read_text(text, source, test=test)
    if '"schema"' in text.strip().split("\n", 1)[0]:
        return _read_records(text, source)
    return read_json(text, source, test=test)


def _with_failures(run: Run, at: str) -> Run:
    failures = list(run.failures)
    if not failures:
        failures = [text for _, text in run.bad_values()]
        if run.num_out_of_bounds:
            failures.append(f"checks that failed: {run.num_out_of_bounds}")
    # A run that was read from a log names that log's lines.
    at = "" if "source" in run.facts else at
    return replace(run, failures=tuple(f"{at}{each}" for each in failures))


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
