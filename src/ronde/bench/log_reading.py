"""Results of benchmarks, in whatever form they lie in a file."""

import json
from typing import Any, cast

from ronde.bench.bench_record import KIND, from_record
from ronde.bench.log_json import read_json
from ronde.bench.log_text import read_text
from ronde.bench.runs import Run
from ronde.errors import UsageError
from ronde.records import Record


def read_log(
    text: str, source: str, *, test: str = "", keeps_partial: bool = False
) -> list[Run]:
    """Read nccl-tests' text or JSON, or records of ronde's.

    Pure: it opens nothing. What a log lacks is warned of in its runs, what is damaged
    is an error.

    Args:
        text: The whole content.
        source: The file's name; its test is looked for there last of all.
        test: What the runs are of, where the user knows better.
        keeps_partial: Leave out what a cut breaks, where it would be an error.

    Returns:
        At least one run.

    Raises:
        UsageError: ``source:line: ...``: nothing to read, or damage.
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
