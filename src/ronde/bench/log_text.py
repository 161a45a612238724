"""Parser of the text that nccl-tests prints, for all of its releases.

Releases differ in columns, and some rows lack cells that the header names. In all
releases a row begins with size, count and type, and ends with its numbers in the
header's order.

A damaged row is left out and reported with its line, rather than guessed. A last line
without a line break may be truncated and is never used. All patterns match in linear
time.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ronde.bench.log_state import (
    AVERAGE,
    CONCLUDED,
    OUT_OF_BOUNDS,
    WITHOUT_MPI,
    Log,
    ParserState,
    name_in,
)
from ronde.bench.results import HALVES, Row, Run, Side
from ronde.errors import UsageError

_PREFIX = re.compile(
    r"""(?:\s*(?:
        \[[^\]\s]*\](?:<std(?:out|err)>:|:|\+?[ ])    # mpirun, torchrun, ronde, kubectl
      | \d+:(?=\s|$)                                 # srun --label
      | \d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)[ ](?:std(?:out|err)[ ][FP][ ])?
      | \w[\w.-]*:(?=\s+(?:\#|[\d.]+\s|\S+:\d+:\d+[ ]\[))     # pdsh, stern: a name
    ))++""",
    re.VERBOSE,
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# After a host's name; WARN may have the time before the name.
_NCCL = re.compile(
    r"""(?<=\S):\d+:\d+[ ]\[\d+\][ ]
    (?:\S+:\d+[ ](?:\(\S+\)[ ])?)?          # WARN has file:line and the function
    NCCL[ ](?P<level>[A-Z]+)(?P<message>.*)""",
    re.VERBOSE,
)
_NCCL_TIME = re.compile(r"\[\d[\d:. -]*\] $")
_CELL = re.compile(r"N/A|-?\d+(?:\.\d+)?(?:e[+-]\d+)?")
_BANNERS = (
    ("version", re.compile(r"(?:nccl-tests|rccl-tests|ronde(?: bench)?) version\b")),
    ("start", re.compile(r"Collective test starting:\s*(?P<name>\S+)")),
    ("nThread", re.compile(r"nThread\b")),
)
_ENGINE = re.compile(r"engine: (\w+)")
_HALF = re.compile(r"out-of-place|in-place")
_PROGRAM = re.compile(r"\b([a-z_]+)_perf\b")
_DOTS = ("...", "\u2026")
_CONCLUDED = f"# {CONCLUDED}:"
# Text after a ``#``, for tables that were pasted without the ``#``.
_BARE_COMMENT = re.compile(
    r"""size\s+count\s+type\s | nThread\s+\d | Rank\s+\d+\s | (?:out-of|in)-place\b
    | (?:Out[ ]of[ ]bounds[ ]values|Avg[ ]bus[ ]bandwidth)\s*:
    | Collective[ ]test[ ](?:starting|concluded):""",
    re.VERBOSE,
)
_UNITS_OR_FENCE = re.compile(r"\(B\)\s|`{3}|~{3}")
# Signs that a run failed. Every alternative begins with rare words, so that most lines
# are matched quickly.
_SIGNS = re.compile(
    r"""(?P<failure>Test[ ](?:[A-Za-z]{2,8}[ ]failure|timeout)\b)
    | (?P<caller>Test[ ]failure\b)
    | (?P<report>^srun:[ ]error:[ ](?:Node[ ]failure|\S{1,64}:[ ]tasks?[ ]\d)
        | ^slurmstepd:[ ]error:[ ].{0,199}(?:execve\(\):|CANCELLED)
        | ^(?:mpi|orte|prte)(?:run|exec)[ ](?:was[ ]unable|noticed|detected|has[ ]exit)
        | (?:ORTE|PRTE)[ ](?:has[ ]lost|was[ ]unable|daemon[ ]has) | MPI_ABORT[ ]was
        | There[ ]are[ ]not[ ]enough[ ]s | Primary[ ]job[ ]+terminated
        | _perf:[ ](?:No[ ]such[ ]file|command[ ]not[ ]found|Permission[ ]denied)
        | Killed[ ]process[ ]\d | :[ ]error[ ]while[ ]loading[ ] | execvp[ ]error[ ]on
        | Signal[ ]\d+[ ][(]SIG | ^ronde:[ ]rank[ ]\d+[ ]failed | BAD[ ]TERMINATION
        | ^command[ ]terminated[ ]with[ ]exit[ ]code[ ][1-9] | ^terminate[ ]called[ ]
        | ChildFailedError | (?:Segmentation[ ]fault|Bus[ ]error)(?![)]))
    | (?P<stray>^slurmstepd:[ ]error:[ ].{0,99}oom.kill
        | (?:Killed|Aborted|Terminated)(?:$|[ ]{2}|[ ][(]))""",
    re.VERBOSE,
)
# Remarks of RCCL and old releases of NCCL at every start, even of good runs.
_REMARK = re.compile(
    r"\s*(?:Missing \"|Failed to open lib|LL cutoff|NUMA auto balancing)"
)
_MAX_QUOTED = 300
_MAX_COLUMNS = 64

_OPERATIONS = frozenset({"sum", "prod", "max", "min", "avg", "mulsum", "none", "all"})
_TIMES = ("time", "cputime")
_SIDE = ("time", "algbw", "busbw", "#wrong")
# The old column `error` is the largest deviation, not a number of elements.
_OF_A_SIDE = {*_SIDE, "cputime", "i_min", "i_max", "i_p99", "i_cv%", "error"}
_FIGURES = [tuple(f"{half}.{name}" for name in _SIDE) for half in HALVES]
_DIGITS = r"-?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|inf|nan)"
_NUMBER = re.compile(_DIGITS, re.IGNORECASE)
_CELLS = re.compile(rf"{_DIGITS}\**|N/A|--?", re.IGNORECASE)
# Words that continue a row: cells, a date and a time of day.
_REST = re.compile(rf"{_CELLS.pattern}|\d{{4}}-\d\d-\d\d|\d\d:\d\d:\d\d", re.IGNORECASE)
_INTEGER = re.compile(r"\d{1,18}")
_ROOT = re.compile(r"-?\d{1,9}")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_NOTHING = frozenset({"N/A", "-", "--"})


def read_text(text: str, source: str, *, test: str = "") -> Log:
    reader = _Reader(source, test)
    *lines, rest = _COLOUR.sub("", text.removeprefix("\ufeff")).split("\n")
    for number, line in enumerate(lines, 1):
        reader.feed(number, line)
    reader.end(len(lines) + 1, rest)
    if reader.damage and not any(run.rows for run in reader.runs):
        raise UsageError(reader.damage[0])
    if not reader.runs:
        last = len(lines) + bool(rest.strip())
        where = f"in {last} lines" if text.strip() else "because the file is empty"
        raise UsageError(
            f"{source}:{max(last, 1)}: found no nccl-tests table {where}. A table "
            "begins with: # size count type."
        )
    first, *more = runs = reader.runs
    if more and all((r.test, r.ranks.value) == (first.test, 1) for r in runs):
        warning = f"{len(runs)} runs of 1 rank each: {WITHOUT_MPI}"
        runs[0] = replace(first, warnings=(*first.warnings, warning))
    return Log(runs, reader.damage, reader.cuts)


class _Reader:
    """Line-by-line parser of a log."""

    def __init__(self, source: str, test: str) -> None:
        self.runs: list[Run] = []
        self.damage: list[str] = []
        self.cuts: list[str] = []
        self._at = 1  # the current line
        self._source = source
        self._test = test
        self._state = ParserState(source, 1)
        self._columns: _Columns | None = None
        self._row: list[str] = []  # words of a row that may continue on later lines
        self._row_at = 0  # the row's first line

    def feed(self, number: int, raw: str) -> None:
        self._at = number
        line, warning = _clean(raw)
        if warning:
            self._state.warnings.append(f"line {number}: NCCL: {warning}")
            if not self._state.nccl_warning and not _REMARK.match(warning):
                self._state.nccl_warning = number, f"NCCL: {warning}"
        text = line.strip()
        if not text:
            return
        first = text[0]
        self._mention(text)
        if first == "#" or (first.isalpha() and _BARE_COMMENT.match(text)):
            try:
                self._comment(text.removeprefix("#").strip())
            except UsageError as error:
                self._report(number, str(error))
        elif (not first.isdigit() or "Test " in text) and (sign := _SIGNS.search(text)):
            self._add_sign(text, sign)
        elif self._columns and not (self._state.is_over or _UNITS_OR_FENCE.match(text)):
            self._inside(line, self._columns)
        if self._columns is None and text.endswith(_DOTS):
            self._state.listed.is_cut = bool(self._state.listed.devices)

    def end(self, number: int, raw: str) -> None:
        """Read the last line, which has no line break, and close the last run."""
        self._at = number
        text = _clean(raw)[0].strip()
        if sign := _SIGNS.search(text):
            self._add_sign(text, sign)
        elif not _CONCLUDED.startswith(text[: len(_CONCLUDED)]):
            problem = "ends without a line break and may be cut: it was left out"
            self._state.warnings.append(f"line {number} {problem}")
            self._row = []
        self._close()

    def _report(self, line: int, damage: str) -> None:
        self.damage.append(f"{self._source}:{line}: {damage}")
        self._state.has_gap = True

    def _add_sign(self, text: str, found: re.Match[str]) -> None:
        kind = found.lastgroup
        if kind in ("failure", "caller"):
            if self._state.is_over:
                self._close()  # the sign is another program's only output
            if self._row or text[0].isdigit():
                # The sign directly follows the first cells of a row.
                word = "".join(text[: found.start()].split()[-1:])
                host = word.removeprefix(_cell_before_host(word))
                text = f"{host} {text[found.start() :]}"
            self._row = []
        state, sign = self._state, (self._at, text[:_MAX_QUOTED])
        if kind == "stray" and "_perf" not in text and "ronde" not in text:
            state.stray = state.stray or sign
        elif kind != "caller" or not state.signs:
            state.signs.append(sign)

    def _comment(self, comment: str) -> None:
        words = comment.split()
        if [word.lower() for word in words[:2]] == ["size", "count"]:
            self._open_table(words)
            return
        for kind, pattern in _BANNERS:
            if found := pattern.match(comment):
                self._open_run(kind)
                if kind == "start":
                    self._state.title = name_in(found["name"])
                elif kind == "nThread":
                    self._state.facts["arguments"] = comment
                return
        if self._columns is None:
            self._before_table(comment)
        else:
            self._below_table(comment)

    def _open_run(self, kind: str) -> None:
        state = self._state
        has_content = state.listed.devices or state.has_table
        is_new = state.signs or (has_content and kind in state.banners)
        if self._columns is not None or is_new:
            self._close()
        elif not state.banners:
            state.first_line = self._at
        self._state.banners.add(kind)

    def _open_table(self, words: list[str]) -> None:
        state = self._state
        if self._columns is not None:
            self._close()
            if not state.is_over:
                # The same program continues, with the same ranks.
                self._state.listed = state.listed
                self._state.title, self._state.mention = state.title, state.mention
        elif not state.banners and not state.listed.devices:
            state.first_line = self._at
        self._state.has_table = True
        self._columns = _parse_header(words, self._state.halves)

    def _close(self) -> None:
        if self._row and self._columns is not None:
            self._add_row(self._columns)
        state = self._state
        has_begun = self._columns is not None or state.banners or state.has_table
        if has_begun or state.has_failed:
            self.runs.append(state.finish(self._test))
            run = f"{self._source}:{self._at - 1}: run {len(self.runs)}"
            self.cuts += [f"{run} {each}" for each in state.missing()]
        self._state, self._columns = ParserState(self._source, self._at), None

    def _before_table(self, comment: str) -> None:
        state = self._state
        if engine := _ENGINE.fullmatch(comment):
            state.engine = engine[1]
        elif not state.add_device(comment):
            halves = [each.replace("-", "_") for each in _HALF.findall(comment)]
            state.halves = halves or state.halves

    def _below_table(self, comment: str) -> None:
        name, colon, value = (part.strip() for part in comment.partition(":"))
        if not colon or not name[:1].isalpha():
            return
        if self._row and self._columns is not None:
            # alltoallv reports its traffic inside a row; a footer ends the table.
            if name not in (AVERAGE, OUT_OF_BOUNDS):
                return
            self._add_row(self._columns)
        self._state.add_footer(name, value, self._at)
        if name == "error":
            self._state.failures.append((self._at, f"error: {value}"))

    def _mention(self, text: str) -> None:
        if self._columns is None and text[0] != "#" and not self._state.mention:
            found = _PROGRAM.search(text) if "_perf" in text else None
            self._state.mention = name_in(found[1] if found else "")

    def _inside(self, line: str, columns: "_Columns") -> None:
        text = line.split("#", 1)[0]
        words = text.split()
        if line.endswith(_DOTS) and not text.strip(" .\u2026"):
            if self._row:
                self._add_row(columns)
            self._state.has_gap = True
            self._state.warnings.append(f"line {self._at}: rows were left out here")
            return
        # A row that is torn after its size, count or type continues with words.
        is_torn = 0 < len(self._row) < 5 and not _begins_row(words)
        is_rest = self._row and all(map(_REST.fullmatch, words))
        if not (is_rest or (is_torn and _looks_like_row(words))):
            if not _looks_like_row(words):
                return
            if self._row:
                self._add_row(columns)
        if not self._row:
            self._row_at = self._at
        self._row += words
        if len(self._row) >= columns.num_words(self._row):
            self._add_row(columns)

    def _add_row(self, columns: "_Columns") -> None:
        try:
            row, has_errors = _parse_row(self._row, columns)
            above = self._state.rows[-1:]
            # The operation is blank in all rows of a table or in none.
            if columns.has_root and above and bool(above[0].redop) != bool(row.redop):
                raise UsageError(  # noqa: TRY301
                    "only some rows of the table have an operation."
                )
        except UsageError as error:
            self._report(self._row_at, f"a row was left out: {error}")
            return
        finally:
            self._row = []
        self._state.rows.append(row)
        self._state.positions.append(self._row_at)
        self._state.has_errors |= has_errors


def _clean(raw: str) -> tuple[str, str]:
    """Return the benchmark's part of a line, and NCCL's warning in the line."""
    # NCCL writes at any time, so its line may begin in the middle of a row, without a
    # blank before it.
    bare = raw.rstrip()
    if (":" in bare or "]" in bare) and (prefix := _PREFIX.match(bare)):
        bare = bare[prefix.end() :]
    found = _NCCL.search(bare) if "NCCL" in bare else None
    if found is None:
        return bare, ""
    host = bare[: found.start()].rsplit(None, 1)[-1]
    own = bare[: found.start() - len(host)]
    own = own[: time.start()] if (time := _NCCL_TIME.search(own)) else own
    if own.strip() or bare[:1].isspace():
        own += _cell_before_host(host)
    warning = found["message"].strip() if found["level"] == "WARN" else ""
    return own.rstrip(), warning


def _cell_before_host(word: str) -> str:
    """Return the cell directly before a host's name in the same word, or ""."""
    # A host name that begins with a digit cannot be separated from a number before it.
    cell = _CELL.match(word)
    is_host = cell is not None and word[cell.end() : cell.end() + 1].isalpha()
    return cell[0] if cell is not None and is_host else ""


def _begins_row(words: Sequence[str]) -> bool:
    return len(words) > 1 and words[0].isdecimal() and words[1].isdecimal()


def _looks_like_row(words: Sequence[str]) -> bool:
    """Return True if a line begins like a row or has mostly numbers."""
    if _begins_row(words):
        return True
    num_numbers = sum(_CELLS.fullmatch(word) is not None for word in words)
    return 2 * num_numbers >= max(len(words), 1)


class _Columns(NamedTuple):
    """The columns that a table's header names."""

    has_root: bool
    # Columns of the numbers at the end of a row: ``in_place.busbw``, ``%limit``, ...
    keys: tuple[str, ...]
    stamp_at: int  # index of a timestamp's two words; -1 for none
    num_numbers: int  # words at the end of a row, from the first half on

    def num_words(self, words: Sequence[str]) -> int:
        """Return the expected number of words in a row that begins with ``words``."""
        has_operation = len(words) > 3 and _WORD.fullmatch(words[3]) is not None
        return 3 + has_operation + self.has_root + self.num_numbers


def _parse_header(words: Sequence[str], titles: Sequence[str]) -> _Columns:
    # ``#wrong`` may also have lost its ``#``.
    names = ["#wrong" if word == "wrong" else word.lower() for word in words]
    starts = [index for index, name in enumerate(names) if name in _TIMES]
    problem = ""
    if names[:3] != ["size", "count", "type"] or not 1 <= len(starts) <= 2:
        problem = "begin with size, count, type and have one or two columns time"
    elif len(names) > _MAX_COLUMNS:
        problem = f"have at most {_MAX_COLUMNS} columns"
    if problem:
        raise UsageError(f"a table's header must {problem}, got {' '.join(words)!r}.")
    end = starts[-1]
    while end < len(names) and names[end] in _OF_A_SIDE:
        end += 1
    halves = [names[a:b] for a, b in itertools.pairwise([*starts, end])]
    if any("busbw" not in half or "algbw" not in half for half in halves):
        raise UsageError(
            f"each half of a table must have algbw and busbw, got {' '.join(words)!r}."
        )
    if len(titles) != len(halves):
        titles = HALVES[: len(halves)]
    keys = [
        f"{title}.{name}"
        for title, half in zip(titles, halves, strict=True)
        for name in half
    ]
    num_sides, tail = len(keys), names[end:]
    for index, name in enumerate(tail):
        # A column that is repeated for each half belongs to that half.
        is_twice = tail.count(name) == len(halves) == 2
        title = f"{titles[tail[:index].count(name)]}." if is_twice else ""
        keys += [f"{title}{name}"] if name != "timestamp" else []
    stamp_at = num_sides + tail.index("timestamp") if "timestamp" in tail else -1
    has_root = "root" in names[: starts[0]]
    num_numbers = len(keys) + (2 if stamp_at >= 0 else 0)
    return _Columns(has_root, tuple(keys), stamp_at, num_numbers)


def _parse_row(words: Sequence[str], columns: _Columns) -> tuple[Row, bool]:
    """Return the row, and True if its ``error`` cell (old releases) has a number."""
    needed = columns.num_words(words)
    # Old tables print a root without a column for it in the header.
    has_stray_root = not columns.has_root and len(words) == needed + 1
    if not (has_stray_root or len(words) == needed):
        least = columns.num_words(())
        raise UsageError(
            f"a row must have {least + 1} cells, or {least} without an operation, got "
            f"{len(words)}: {' '.join(words)[:90]!r}."
        )
    split = len(words) - columns.num_numbers
    head, cells = words[:split], [*words[split:]]
    for name, word in zip(("size", "count"), head, strict=False):
        if _INTEGER.fullmatch(word) is None:
            raise UsageError(f"a row's {name} must be an integer, got {word!r}.")
    dtype, (operation, root) = head[2], _operation_and_root(head[3:])
    if _WORD.fullmatch(dtype) is None or dtype in _OPERATIONS:
        raise UsageError(f"a row's type must be a dtype, got {dtype!r}.")
    if columns.stamp_at >= 0:
        del cells[columns.stamp_at : columns.stamp_at + 2]
    numbers = dict(zip(columns.keys, map(_number, columns.keys, cells), strict=True))
    halves = [
        Side(*map(numbers.get, figures)) if figures[2] in numbers else None
        for figures in _FIGURES
    ]
    row = Row(int(head[0]), int(head[1]), dtype, operation, root, *halves)
    return row, any(numbers.get(f"{half}.error") is not None for half in HALVES)


def _operation_and_root(words: Sequence[str]) -> tuple[str, int | None]:
    """Parse the operation and root of a row; either may be missing."""
    operation, root, rest = "", None, words
    if rest and _WORD.fullmatch(rest[0]):
        operation, *rest = rest
    if rest and _ROOT.fullmatch(rest[0]):
        root, rest = int(rest[0]), rest[1:]
    if rest:
        raise UsageError(
            "a row must have only an operation and a root between its type and its "
            f"numbers, got {' '.join(rest)!r}."
        )
    return operation, root


def _number(key: str, word: str) -> float | None:
    if word in _NOTHING:
        return None
    bare = word.rstrip("*%")  # old releases mark an error above their threshold with *
    if _NUMBER.fullmatch(bare) is None:
        name = key.rpartition(".")[2]
        raise UsageError(f"a row's {name} must be a number, got {word!r}.")
    return float(bare)
