"""Results of benchmarks in whatever form they lie in a file: text, JSON or records.

nccl-tests' JSON has versions 1 to 3 and is not always JSON: infinity stands there as a
bare ``inf``, and early releases misspelled two keys. Its list of environment variables
is passed over, for it holds whatever the user's environment held.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, cast

from ronde.bench.log_state import (
    AVERAGE,
    OUT_OF_BOUNDS,
    ListedDevice,
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

_BARE = re.compile(r'"(?:[^"\\]|\\.)*"|-?\b(?:inf|nan)\b')
_JSON_NAMES = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN", "-nan": "NaN"}
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]')
_SPELLINGS = {
    "average_bus_bandwidith": "average_bus_bandwidth",
    "bandwidith": "bandwidth",
}
_INTEGER = re.compile(r"\s*-?\d{1,9}\s*")
_Object = Mapping[str, Any]


def read_json(
    text: str, source: str, *, test: str = "", keeps_partial: bool = False
) -> list[Run]:
    content, cut_at_line = _parse(text, source, keeps_partial=keeps_partial)
    state = ParserState(source, 1, has_table="results" in content)
    if cut_at_line:
        state.warnings.append(f"line {cut_at_line}: the file is cut here")
    if content.get("version") not in VERSIONS:
        state.warnings.append(f"its version is {content.get('version')!r}, not 1 to 3")
    try:
        _read_head(content, state)
        _read_footers(content, state)
        results = _list(content, "results")
    except UsageError as error:
        raise UsageError(f"{source}:1: {error}") from error
    for index, result in enumerate(results):
        try:
            _read_result(_as_object(result, "a result"), state)
        except UsageError as error:
            spans = _result_spans(text)[index : index + 1]
            line = 1 + text.count("\n", 0, spans[0][0] if spans else 0)
            raise UsageError(f"{source}:{line}: result {index}: {error}") from error
    return [state.finish(test)]


def _parse(text: str, source: str, *, keeps_partial: bool) -> tuple[_Object, int]:
    """Return the top object, and the line where the file is cut, or 0."""
    try:
        return _load(text), 0
    except json.JSONDecodeError as error:
        spans = _result_spans(text) if keeps_partial else []
        problem = f"{source}:{error.lineno}: log must be whole JSON: {error.msg}"
        message = f"{problem} near character {error.colno}."
        try:
            if spans:
                return _load(f"{text[: spans[-1][1]]}]}}"), error.lineno
        except json.JSONDecodeError:
            pass
        raise UsageError(
            f"{message} --partial reads the whole results before it, if any."
        ) from error
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
    state.arguments = " ".join(words[1:])
    state.engine = str(ours.get("engine", ""))
    names = ("start_time", "end_time", "nccl_version")
    state.facts |= {n: content[n] for n in names if content.get(n) is not None}
    for entry in _list(config, "devices"):
        device = _as_object(entry, "a device")
        rank, group = _integer(device, "rank"), _integer(device, "group")
        host, name = device.get("hostname", ""), device.get("device_info", "")
        state.devices.append(ListedDevice(rank, group, str(host), str(name)))
    if ours.get("size") is not None:
        size = _integer(ours, "size")
        state.given = RankCount.exactly(size, RankSource.GIVEN)
    elif state.devices:
        group = min(state.devices, key=lambda each: each.rank).group
        ranks = [each.rank for each in state.devices if each.group == group]
        # nccl-tests lists one rank a process, but a release that lists them all.
        each = 1
        if not ours and "nthreads" in config and "ngpus" in config:
            each = max(1, _integer(config, "nthreads") * _integer(config, "ngpus"))
        each = 1 if any(rank % each for rank in ranks) else each
        state.given = RankCount.exactly(len(ranks) * each, RankSource.DEVICES)


def _read_footers(content: _Object, state: ParserState) -> None:
    bounds = _object(content, "out_of_bounds")
    if "count" in bounds:
        okay = "OK" if str(bounds.get("okay")).lower() == "true" else "FAILED"
        state.add_footer(OUT_OF_BOUNDS, f"{_integer(bounds, 'count')} {okay}")
    average = _object(content, "average_bus_bandwidth")
    bandwidth = _number("bandwidth", average.get("bandwidth"))
    if bandwidth is not None:
        verdict = {"true": " OK", "false": " FAILED"}
        okay = verdict.get(str(average.get("okay")).lower(), "")
        state.add_footer(AVERAGE, f"{bandwidth:g}{okay}")
    state.warnings += [str(each) for each in _list(content, "errors")]


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


def _object(entries: _Object, name: str) -> _Object:
    return _as_object({} if entries.get(name) is None else entries[name], name)


def _as_object(value: object, name: str) -> _Object:
    if not isinstance(value, dict):
        raise UsageError(f"{name} must be an object, got {str(value)[:60]!r}.")
    return cast("_Object", value)


def _list(entries: _Object, name: str) -> list[Any]:
    value: object = entries.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise UsageError(f"{name} must be a list, got {str(value)[:60]!r}.")
    return cast("list[Any]", value)


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


def read_log(
    text: str, source: str, *, test: str = "", keeps_partial: bool = False
) -> list[Run]:
    """Read nccl-tests' text or JSON, or records of ronde's."""
    # Runs have warnings of what their log lacks; damage is an error.
    if not text.lstrip("\ufeff \t\r\n").startswith("{"):
        return read_text(text, source, test=test, keeps_partial=keeps_partial)
    first = text.strip().split("\n", 1)[0]
    try:
        content: Any = json.loads(first)
    except (json.JSONDecodeError, RecursionError):
        content = None
    # Or the first line of a records file that is cut there.
    if (isinstance(content, dict) and "schema" in content) or (
        content is None and first.startswith('{"schema"')
    ):
        return _read_records(text, source, keeps_partial=keeps_partial)
    return read_json(text, source, test=test, keeps_partial=keeps_partial)


def _read_records(text: str, source: str, *, keeps_partial: bool) -> list[Run]:
    runs: list[Run] = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = Record.from_json(line)
            if record.kind == KIND:
                runs.append(from_record(record))
        except UsageError as error:
            if keeps_partial and number == len(lines):
                break
            raise UsageError(f"{source}:{number}: {error}") from error
    if not runs:
        raise UsageError(
            f"{source}:{len(lines)}: records must hold one of kind {KIND}, got none."
        )
    return runs
