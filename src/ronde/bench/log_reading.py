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
from ronde.bench.log_table import IN_PLACE, OUT_OF_PLACE
from ronde.bench.log_text import read_text
from ronde.bench.results import (
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
            line = _line_of_result(text, index)
            raise UsageError(f"{source}:{line}: result {index}: {error}") from error
    return [state.finish(test)]


def _parse(text: str, source: str, *, keeps_partial: bool) -> tuple[_Object, int]:
    """Return the top object, and the line where the file is cut or 0."""
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
    ours = _object(content, "ronde")
    state.title = name_in(str(ours.get("test") or (words[0] if words else "")))
    state.arguments = " ".join(words[1:])
    state.engine = str(ours.get("engine", ""))
    for name in ("start_time", "end_time", "nccl_version"):
        if content.get(name) is not None:
            state.facts[name] = content[name]
    config = _object(content, "config")
    for entry in _list(config, "devices"):
        device = _as_object(entry, "a device")
        state.devices.append(
            ListedDevice(
                rank=_integer(device, "rank"),
                group=_integer(device, "group"),
                host=str(device.get("hostname", "")),
                name=str(device.get("device_info", "")),
            )
        )
    state.given = _count_ranks(config, ours, state)


def _count_ranks(
    config: _Object, ours: _Object, state: ParserState
) -> RankCount | None:
    """Return how many ranks there were; nccl-tests lists one a process."""
    if ours.get("size") is not None:
        return RankCount.exactly(_integer(ours, "size"), RankSource.GIVEN)
    if not state.devices:
        return None
    group = min(state.devices, key=lambda each: each.rank).group
    ranks = [each.rank for each in state.devices if each.group == group]
    each = 1
    if not ours and "nthreads" in config and "ngpus" in config:
        each = max(1, _integer(config, "nthreads") * _integer(config, "ngpus"))
    if any(rank % each for rank in ranks):
        each = 1  # a release that lists them all
    return RankCount.exactly(len(ranks) * each, RankSource.DEVICES)


def _read_footers(content: _Object, state: ParserState) -> None:
    bounds = _object(content, "out_of_bounds")
    if "count" in bounds:
        okay = "OK" if str(bounds.get("okay")).lower() == "true" else "FAILED"
        state.add_footer(OUT_OF_BOUNDS, f"{_integer(bounds, 'count')} {okay}")
    average = _object(content, "average_bus_bandwidth")
    bandwidth = _number(average, "bandwidth")
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
    row = Row(
        size_bytes=_integer(result, "size"),
        count=_integer(result, "count"),
        dtype=result["type"].strip(),
        redop=result["redop"].strip(),
        root=root,
        out_of_place=_side(result, OUT_OF_PLACE, extras),
        in_place=_side(result, IN_PLACE, extras),
    )
    if result.get("actual_iterations") is not None:
        extras["actual_iterations"] = float(_integer(result, "actual_iterations"))
    percent = _number(_object(result, "ronde"), "limit_percent")
    if percent is not None:
        extras["%limit"] = percent
    state.rows.append(row)
    state.extras.append(extras)


def _side(result: _Object, place: str, extras: dict[str, Extra]) -> Side | None:
    side = _object(result, place)
    if not side:
        return None
    cputime = _number(side, "cpu_time")
    if cputime is not None:
        extras[f"{place}.cputime_us"] = cputime
    for name, value in _object(result, f"{place}_per_iter").items():
        if not isinstance(value, list):
            spelled = "cv_percent" if name == "cv_pct" else name
            number = _as_number(name, value)
            if number is not None:
                extras[f"{place}.i_{spelled}"] = number
    return Side(
        time_us=_number(side, "time"),
        algbw_gb_per_s=_number(side, "alg_bw"),
        busbw_gb_per_s=_number(side, "bus_bw"),
        num_wrong=_number(side, "nwrong"),
    )


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


def _number(entries: _Object, name: str) -> float | None:
    return _as_number(name, entries.get(name))


def _as_number(name: str, value: object) -> float | None:
    """Return a number; infinity and NaN may stand as text."""
    if isinstance(value, str) and value in _JSON_NAMES:
        value = float(value.removeprefix("-") if "nan" in value else value)
    if value is None or (isinstance(value, int | float) and type(value) is not bool):
        try:
            return None if value is None else float(value)
        except OverflowError:
            return math.inf
    raise UsageError(f"{name} must be a number, got {value!r}.")


def _line_of_result(text: str, index: int) -> int:
    spans = _result_spans(text)
    return 1 + text.count("\n", 0, spans[index][0]) if index < len(spans) else 1


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
    """Read nccl-tests' text or JSON, or records of ronde's.

    Pure: it opens nothing. What a log lacks is warned of in its runs, what is damaged
    is an error.
    """
    if not text.lstrip("\ufeff \t\r\n").startswith("{"):
        return read_text(text, source, test=test, keeps_partial=keeps_partial)
    if _is_record(text.strip().split("\n", 1)[0]):
        return _read_records(text, source, keeps_partial=keeps_partial)
    return read_json(text, source, test=test, keeps_partial=keeps_partial)


def _is_record(line: str) -> bool:
    try:
        content = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        # The first line of a records file that is cut there.
        return line.startswith('{"schema"')
    return isinstance(content, dict) and "schema" in cast("dict[str, Any]", content)


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
