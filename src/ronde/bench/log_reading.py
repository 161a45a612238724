"""Reader of benchmark results: nccl-tests' text or JSON, or ronde's records.

nccl-tests' JSON has versions 1 to 3 and is not always valid: infinity is a bare
``inf``, and early releases misspelled two keys. The list of environment variables is
not read, as it may contain secrets.
"""

import json
import re
from dataclasses import replace
from typing import Any

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

# An unterminated string is matched to the end of the text, in linear time.
_BARE = re.compile(r'"(?:[^"\\]|\\.)*+"?|-?\b(?:inf|nan)\b', re.DOTALL)
_JSON_NAMES = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN", "-nan": "NaN"}
_SPELLINGS = {
    "average_bus_bandwidith": "average_bus_bandwidth",
    "bandwidith": "bandwidth",
}


def read_log(text: str, source: str, *, test: str = "") -> Log:
    """Read nccl-tests' text or JSON, or ronde's records.

    Raises:
        UsageError: The text has no results.
    """
    if not text.lstrip("\ufeff \t\r\n").startswith("{"):
        return read_text(text, source, test=test)
    if '"schema"' in text.strip().split("\n", 1)[0]:
        return _read_records(text, source)
    return _read_json(text, source, test)


def _read_json(text: str, source: str, test: str) -> Log:
    def named(match: re.Match[str]) -> str:
        return _JSON_NAMES.get(match[0], match[0])

    def spelled(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {_SPELLINGS.get(key, key): value for key, value in pairs}

    state = ParserState(source, 1, is_json=True)
    try:
        content = json.loads(_BARE.sub(named, text), object_pairs_hook=spelled)
        _read_head(content, state)
        for index, result in enumerate(content.get("results", ())):
            state.has_table = True
            state.rows.append(_row(result))
            state.positions.append(index)
        _read_footers(content, state)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{source}:{error.lineno}: this is not valid JSON: {error.msg} near "
            f"character {error.colno}. The log may be cut."
        ) from error
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise UsageError(
            f"{source}: this is JSON, but not as nccl-tests writes it: "
            f"{type(error).__name__} at result {len(state.rows)}: {error}."
        ) from error
    cuts = [f"{source}: run 1 {each}" for each in state.missing()]
    return Log([state.finish(test)], [], cuts)


def _read_head(content: dict[str, Any], state: ParserState) -> None:
    if content.get("version") not in VERSIONS:
        state.warnings.append(f"its version is {content.get('version')!r}, not 1 to 3")
    words: list[str] = content.get("args") or [""]
    config: dict[str, Any] = content.get("config", {})
    ours: dict[str, Any] = content.get("ronde") or {}
    state.title = name_in(ours.get("test") or words[0])
    state.facts["arguments"] = " ".join(words[1:])
    state.engine = ours.get("engine", "")
    names = ("start_time", "end_time", "nccl_version")
    state.facts |= {n: content[n] for n in names if content.get(n) is not None}
    for each in config.get("devices", ()):
        names = (each.get("hostname", ""), each.get("device_info", ""))
        device = ListedDevice(int(each["rank"]), int(each["group"]), *names)
        state.listed.devices.append(device)
    if "size" in ours:
        state.given = RankCount.exactly(int(ours["size"]), RankSource.GIVEN)
    elif "nthreads" in config and "ngpus" in config:
        state.listed.num_each = max(1, int(config["nthreads"]) * int(config["ngpus"]))


def _read_footers(content: dict[str, Any], state: ParserState) -> None:
    if bounds := content.get("out_of_bounds"):
        okay = "OK" if str(bounds["okay"]).lower() == "true" else "FAILED"
        state.add_footer(OUT_OF_BOUNDS, f"{int(bounds['count'])} {okay}", -1)
    if average := content.get("average_bus_bandwidth"):
        verdict = {"true": " OK", "false": " FAILED"}
        okay = verdict.get(str(average["okay"]).lower(), "")
        state.add_footer(AVERAGE, f"{float(average['bandwidth']):g}{okay}", -1)
    state.failures += [(-1, f"error: {each}") for each in content.get("errors", ())]


def _row(result: dict[str, Any]) -> Row:
    size_bytes, count = int(result["size"]), int(result["count"])
    root = None if result.get("root") is None else int(result["root"])
    if size_bytes < 0 or count < 0:
        raise ValueError(f"size {size_bytes} or count {count} is negative")
    names = (result["type"].strip(), result["redop"].strip())
    return Row(size_bytes, count, *names, root, *(_side(result.get(h)) for h in HALVES))


def _side(side: dict[str, Any] | None) -> Side | None:
    if not side:
        return None
    cells = [side.get(name) for name in ("time", "alg_bw", "bus_bw", "nwrong")]
    return Side(*(None if cell is None else float(cell) for cell in cells))


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
    # Problems of a run that was read from a log name that log's lines.
    at = "" if "source" in run.facts else at
    return replace(run, failures=tuple(f"{at}{each}" for each in failures))
