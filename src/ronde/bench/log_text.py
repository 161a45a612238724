"""The text that nccl-tests prints, in the forms of all its releases.

Releases differ in columns, and some rows lack cells that the header names. In all of
them a row begins with size, count and type, and its numbers stand at the right end in
the header's order.

Drift is read, with a warning. Damage, such as a row in which a cell is missing or no
number, is left out and reported with its line: to guess would invent a figure. A last
line without a line break may be cut anywhere and is never used. All patterns take time
in proportion to the text.
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
    End,
    Log,
    ParserState,
    name_in,
)
from ronde.bench.results import PLACES, Extra, Row, Run, Side
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
# Behind a host's name, before which WARN may have the time.
_NCCL = re.compile(
    r"""(?<=\S):\d+:\d+[ ]\[\d+\][ ]
    (?:\S+:\d+[ ](?:\(\S+\)[ ])?)?          # WARN has file:line and the function
    NCCL[ ](?P<level>[A-Z]+)(?P<message>.*)""",
    re.VERBOSE,
)
_NCCL_TIME = re.compile(r"\[\d[\d:. -]*\] $")
_MAX_HOST_CHARS = 64  # Linux's HOST_NAME_MAX
_CELL = re.compile(r"N/A|-?\d+(?:\.\d+)?(?:e[+-]\d+)?")
_BANNERS = (
    ("version", re.compile(r"(?:nccl-tests|rccl-tests|ronde(?: bench)?) version\b")),
    ("start", re.compile(r"Collective test starting:\s*(?P<name>\S+)")),
    ("nThread", re.compile(r"nThread\b")),
)
_ENGINE = re.compile(r"engine: (\w+)")
_PLACES = re.compile(r"out-of-place|in-place")
_PROGRAM = re.compile(r"\b([a-z_]+)_perf\b")
_DOTS = ("...", "\u2026")
_CONCLUDED = f"# {CONCLUDED}:"
# What stands behind ``#``, where a table was pasted without.
_BARE_COMMENT = re.compile(
    r"""size\s+count\s+type\s | nThread\s+\d | Rank\s+\d+\s | (?:out-of|in)-place\b
    | (?:Out[ ]of[ ]bounds[ ]values|Avg[ ]bus[ ]bandwidth)\s*:
    | Collective[ ]test[ ](?:starting|concluded):""",
    re.VERBOSE,
)
_UNITS_OR_FENCE = re.compile(r"\(B\)\s|`{3}|~{3}")
# Each group is an ``End``. Every alternative begins with a sign that is rare, so that
# most lines take no time.
_ENDS = re.compile(
    r"""(?P<FAILURE>Test[ ](?:[A-Za-z]{2,8}[ ]failure|timeout)\b)
    | (?P<ECHO>Test[ ]failure\b)
    | (?P<CAUSE>^srun:[ ]error:[ ](?:Node[ ]failure|\S{1,64}:[ ]task.{1,99}Out[ ]Of)
        | ^slurmstepd:[ ]error:[ ].{0,199}(?:execve\(\):|DUE[ ]TO[ ](?!TASK|NODE))
        | ^(?:mpi|orte|prte)(?:run|exec)[ ]was[ ]unable | There[ ]are[ ]not[ ]enough[ ]s
        | _perf:[ ](?:No[ ]such[ ]file|command[ ]not[ ]found|Permission[ ]denied)
        | Killed[ ]process[ ]\d | :[ ]error[ ]while[ ]loading[ ] | execvp[ ]error[ ]on)
    | (?P<PROCESS>^srun:[ ]error:[ ]\S{1,64}:[ ]tasks?[ ]\d | Signal[ ]\d+[ ][(]SIG
        | ^slurmstepd:[ ]error:[ ].{0,99}CANCELLED | ^ronde:[ ]rank[ ]\d+[ ]failed
        | ^(?:mpi|orte|prte)(?:run|exec)[ ](?:noticed|detected|has[ ]exited)
        | (?:ORTE|PRTE)[ ](?:has[ ]lost|was[ ]unable|daemon[ ]has) | MPI_ABORT[ ]was)
    | (?P<VAGUE>^srun:[ ]Job[ ]step[ ]aborted
        | ^command[ ]terminated[ ]with[ ]exit[ ]code[ ][1-9] | ^terminate[ ]called[ ]
        | Primary[ ]job[ ]+terminated | BAD[ ]TERMINATION | ChildFailedError
        | (?:Segmentation[ ]fault|Bus[ ]error)(?![)]))
    | (?P<STRAY>^slurmstepd:[ ]error:[ ].{0,99}oom.kill
        | (?:Killed|Aborted|Terminated)(?:$|[ ]{2}|[ ][(]))""",
    re.VERBOSE,
)
# Signs of Open MPI are sentences and go on in the lines below, unlike any other's.
_SENTENCE = re.compile(r"(?:mpi|orte|prte)\w+ |Primary |MPI_A|.*[OP]RTE |There ")
# Remarks of RCCL and of old releases of NCCL on every start, also of good runs.
_REMARK = re.compile(
    r"\s*(?:Missing \"|Failed to open lib|LL cutoff|NUMA auto balancing)"
)
_MAX_STRAYS = 1000
_MAX_QUOTED = 300
_MAX_COLUMNS = 64

_OPERATIONS = frozenset({"sum", "prod", "max", "min", "avg", "mulsum", "none", "all"})
_TIMES = ("time", "cputime")
# What follows the rates and #wrong in a half; the old column `error` is the largest
# deviation and no number of elements.
_UNITS = {
    "cputime": "cputime_us",
    "i_min": "i_min_us",
    "i_max": "i_max_us",
    "i_p99": "i_p99_us",
    "i_cv%": "i_cv_percent",
    "error": "error",
}
_SIDE = ("time", "algbw", "busbw", "#wrong")
_OF_A_SIDE = frozenset({*_SIDE, *_UNITS})
_FIGURES = [tuple(f"{place}.{name}" for name in _SIDE) for place in PLACES]
_DIGITS = r"-?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|inf|nan)"
_NUMBER = re.compile(_DIGITS, re.IGNORECASE)
_CELLS = re.compile(rf"{_DIGITS}\**|N/A|--?", re.IGNORECASE)
# What a row may go on with: its cells, a date and a time of day.
_REST = re.compile(rf"{_CELLS.pattern}|\d{{4}}-\d\d-\d\d|\d\d:\d\d:\d\d", re.IGNORECASE)
_INTEGER = re.compile(r"\d{1,18}")
_ROOT = re.compile(r"-?\d{1,9}")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_NOTHING = frozenset({"N/A", "-", "--"})
_GAP = " " * 24  # in place of a half; between cells there are at most a dozen


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
        got = f"{last} lines without one" if text.strip() else "an empty file"
        raise UsageError(
            f"{source}:{max(last, 1)}: log must have a table of nccl-tests, got {got}. "
            "Its header begins with: # size count type."
        )
    first, *more = runs = _without_tries(reader)
    if more and all((r.test, r.ranks.value) == (first.test, 1) for r in runs):
        warning = f"{len(runs)} runs of 1 rank each: {WITHOUT_MPI}"
        runs[0] = replace(first, warnings=(*first.warnings, warning))
    return Log(runs, reader.damage, reader.cuts)


def _without_tries(reader: "_Reader") -> list[Run]:
    """Drop tries that did not start, where a later run of the same test is whole."""
    runs: list[Run] = []
    for run in reversed(reader.runs):
        later = [r.test for r in runs if r.is_complete and not r.failures]
        if run in reader.tries and run.test in later:
            why = run.failures[0].removeprefix(f"{run.facts['source']}:")
            warning = f"line {why.replace('the run failed', 'a try failed', 1)}"
            runs[-1] = replace(runs[-1], warnings=(*runs[-1].warnings, warning))
        else:
            runs.append(run)
    return runs[::-1]


class _Reader:
    """Takes a log line by line; see ``read_text``."""

    def __init__(self, source: str, test: str) -> None:
        self.runs: list[Run] = []
        self.tries: list[Run] = []  # those of them that printed nothing else
        self.damage: list[str] = []
        self.cuts: list[str] = []
        self._at = 1  # the line that is read
        self._source = source
        self._test = test
        self._state = ParserState(source, 1)
        self._columns: _Columns | None = None
        self._row: list[str] = []  # words of a row that may go on below
        self._row_at = 0  # the line that it began in
        self._has_gap = False  # whether it has so many blanks as a half takes
        self._hosts: set[str] = set()
        self._sentence: tuple[End, int] | None = None  # a sign, the line below it

    def feed(self, number: int, raw: str) -> None:
        self._at = number
        line, warning = self._clean(raw)
        if warning:
            self._state.warnings.append(f"line {number}: NCCL: {warning}")
            if not _REMARK.match(warning):
                self._state.ends.setdefault(End.WARNING, (number, f"NCCL: {warning}"))
        text = line.strip()
        if not text:
            return
        first = text[0]
        self._mention(text)
        sentence, self._sentence = self._sentence, None
        if first == "#" or (first.isalpha() and _BARE_COMMENT.match(text)):
            try:
                self._comment(text.removeprefix("#").strip())
            except UsageError as error:
                self._report(number, str(error))
        elif (not first.isdigit() or "Test " in text) and (end := _ENDS.search(text)):
            self._end_run(text, end)
        elif self._goes_on(sentence, line, text) or _UNITS_OR_FENCE.match(text):
            pass
        elif self._columns is None or self._state.is_over:
            self._outside(text)
        else:
            self._inside(line, self._columns)
        if self._columns is None and text.endswith(_DOTS):
            self._state.listed.is_cut = bool(self._state.listed.devices)

    def end(self, number: int, raw: str) -> None:
        """Take the last line, which no line break ends, and close the last run."""
        self._at = number
        text = self._clean(raw)[0].strip()
        if end := _ENDS.search(text):
            self._end_run(text, end)
        elif not _CONCLUDED.startswith(text[: len(_CONCLUDED)]):
            what = "ends without a line break and may be cut: it was left out"
            self._state.warnings.append(f"line {number} {what}")
            self._row = []
        self._close()

    def _report(self, line: int, damage: str) -> None:
        self.damage.append(f"{self._source}:{line}: {damage}")
        self._state.has_gap = True

    def _clean(self, raw: str) -> tuple[str, str]:
        """Return the benchmark's part of a line, and what NCCL warns of in it."""
        # NCCL writes at any time: its line may begin in the middle of a row, with no
        # blank between.
        bare = raw.rstrip()
        if bare[:1] == ">":
            bare = bare.lstrip("> ")  # a quotation in a mail
        if (":" in bare or "]" in bare) and (prefix := _PREFIX.match(bare)):
            bare = bare[prefix.end() :]
        found = _NCCL.search(bare) if "NCCL" in bare else None
        if found is None:
            return bare, ""
        words = bare[: found.start()].rsplit(None, 1)
        host = words[-1]
        own = bare[: found.start() - len(host)]
        own = own[: time.start()] if (time := _NCCL_TIME.search(own)) else own
        if own.strip() or bare[:1].isspace():
            own += self._glued_cell(host)
        else:
            self._hosts.add(host)
        warning = found["message"].strip() if found["level"] == "WARN" else ""
        return own.rstrip(), warning

    def _glued_cell(self, word: str) -> str:
        """Return the cell that a host's name was printed right behind, or nothing."""
        for length in range(min(len(word), _MAX_HOST_CHARS), 0, -1):
            if word[-length:] in self._hosts:
                return word[:-length]
        cell = _CELL.match(word)
        # A host that begins with a digit cannot be told from a number before it.
        if cell is None or not word[cell.end() : cell.end() + 1].isalpha():
            return ""
        return cell[0]

    def _end_run(self, text: str, found: re.Match[str]) -> None:
        """Take a sign that something ended the run."""
        kind = End[found.lastgroup or ""]
        if kind is End.STRAY and ("_perf" in text or "ronde" in text):
            kind = End.VAGUE
        if kind in (End.FAILURE, End.ECHO):
            if self._state.is_over:
                self._close()  # the sign is of a program that printed nothing else
            if self._row or text[0].isdigit():
                # It stands right behind what was printed of a row.
                word = "".join(text[: found.start()].split()[-1:])
                host = word.removeprefix(self._glued_cell(word))
                text = f"{host} {text[found.start() :]}"
            self._row = []
        sign = self._at, text[:_MAX_QUOTED]
        if self._state.ends.setdefault(kind, sign) is sign and _SENTENCE.match(text):
            self._sentence = kind, self._at + 1

    def _goes_on(self, sentence: tuple[End, int] | None, line: str, text: str) -> bool:
        """Take a further line of a sign; return whether it was one."""
        if sentence is None or not text[0].isalpha():
            return False
        kind, next_line = sentence
        # Below a blank line there follow indented facts, then advice.
        if self._at > next_line and line[0] != " ":
            return False
        at, above = self._state.ends[kind]
        self._state.ends[kind] = at, f"{above} {' '.join(text.split())}"[:_MAX_QUOTED]
        self._sentence = kind, self._at + 1
        return True

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
        has_content = state.listed.devices or state.is_headless
        has_failed = min(state.ends, default=End.WARNING) < End.STRAY
        is_new = has_failed or (has_content and kind in state.banners)
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
                # The same program goes on: its ranks are still the same.
                self._state.listed = state.listed
                self._state.title, self._state.mention = state.title, state.mention
        elif not state.banners and not state.listed.devices:
            state.first_line = self._at
        self._state.has_table = self._state.is_headless = True
        self._columns = _parse_header(words, self._state.places)
        self._state.is_headless = False

    def _close(self) -> None:
        if self._row and self._columns is not None:
            self._take_row(self._columns)
        state = self._state
        has_begun = self._columns is not None or state.banners or state.is_headless
        if has_begun or state.has_ended:
            self.runs.append(state.finish(self._test))
            if not has_begun and min(state.ends) is End.CAUSE:
                self.tries.append(self.runs[-1])
            run = f"{self._source}:{self._at - 1}: run {len(self.runs)}"
            self.cuts += [f"{run} {each}" for each in state.missing()]
        self._state, self._columns = ParserState(self._source, self._at), None

    def _before_table(self, comment: str) -> None:
        state = self._state
        if engine := _ENGINE.fullmatch(comment):
            state.engine = engine[1]
        elif not state.add_device(comment):
            places = [each.replace("-", "_") for each in _PLACES.findall(comment)]
            state.places = places or state.places

    def _below_table(self, comment: str) -> None:
        name, colon, value = (part.strip() for part in comment.partition(":"))
        if not colon or not name[:1].isalpha():
            return
        if self._row and self._columns is not None:
            # alltoallv reports its traffic inside a row; a footer ends the table.
            if name not in (AVERAGE, OUT_OF_BOUNDS):
                return
            self._take_row(self._columns)
        self._state.add_footer(name, value, self._at)
        if name == "error":
            self._state.failures.append((self._at, f"error: {value}"))

    def _outside(self, text: str) -> None:
        """Take a line outside a table, where a row is an error."""
        words = text.split() if text[0].isdigit() else []
        is_row = len(words) > 6 and words[0].isdecimal() and _claims_to_be_row(words)
        if is_row and not self._state.is_headless:
            self._state.is_headless = True
            self._report(
                self._at,
                "rows from here on were left out: a row must stand below a header "
                f"(# size count type ...), got {text[:60]!r} without one",
            )

    def _mention(self, text: str) -> None:
        if self._columns is None and text[0] != "#" and not self._state.mention:
            found = _PROGRAM.search(text) if "_perf" in text else None
            self._state.mention = name_in(found[1] if found else "")

    def _inside(self, line: str, columns: "_Columns") -> None:
        text = line.split("#", 1)[0]
        words = text.split()
        if line.endswith(_DOTS) and not text.strip(" .\u2026"):
            if self._row:
                self._take_row(columns)
            self._state.has_gap = True
            self._state.warnings.append(f"line {self._at}: rows were left out here")
            return
        # A row that is torn behind its size, count or type goes on with words.
        is_torn = 0 < len(self._row) < 5 and not _begins_row(words)
        is_rest = self._row and all(map(_REST.fullmatch, words))
        if not (is_rest or (is_torn and _claims_to_be_row(words))):
            if not _claims_to_be_row(words):
                if len(self._state.strays) < _MAX_STRAYS:
                    self._state.strays.append(f"line {self._at}: {line.strip()[:50]!r}")
                return
            if self._row:
                self._take_row(columns)
        has_gap = _GAP in text.strip()
        if not self._row:
            self._row_at, self._has_gap = self._at, has_gap
        self._row += words
        self._has_gap |= has_gap
        num_blank = columns.num_first if self._has_gap else 0
        if len(self._row) >= columns.num_words(self._row) - num_blank:
            self._take_row(columns)

    def _take_row(self, columns: "_Columns") -> None:
        try:
            row, extras = _parse_row(self._row, columns, has_gap=self._has_gap)
            above = self._state.rows[-1:]
            # The operation is blank in all rows of a table or in none.
            if columns.has_root and above and bool(above[0].redop) != bool(row.redop):
                raise UsageError(  # noqa: TRY301
                    f"its operation must be there as above it, got {row.redop!r}"
                )
        except UsageError as error:
            self._report(self._row_at, f"a row was left out: {error}")
            return
        finally:
            self._row = []
        self._state.rows.append(row)
        self._state.lines.append(self._row_at)
        self._state.extras.append(extras)


def _begins_row(words: Sequence[str]) -> bool:
    return len(words) > 1 and words[0].isdecimal() and words[1].isdecimal()


def _claims_to_be_row(words: Sequence[str]) -> bool:
    """Say whether a line of a table begins as a row, or is full of numbers as one."""
    if _begins_row(words):
        return True
    num_numbers = sum(_CELLS.fullmatch(word) is not None for word in words)
    return 2 * num_numbers >= max(len(words), 1)


class _Columns(NamedTuple):
    """What a table's header promises."""

    has_root: bool
    # Of the numbers at the right end of a row: ``in_place.busbw``, ``%limit``, ...
    keys: tuple[str, ...]
    further: tuple[str, ...]  # those that no ``Side`` has
    num_first: int  # how many are of the first of two halves, which may be blank
    stamp_at: int  # among the numbers, the two words of a timestamp; -1 for none
    num_numbers: int  # words at the right end of a row, from the first half on

    def num_words(self, words: Sequence[str]) -> int:
        """Return how many words the row that begins with ``words`` must have."""
        has_operation = len(words) > 3 and _WORD.fullmatch(words[3]) is not None
        return 3 + has_operation + self.has_root + self.num_numbers


def _parse_header(words: Sequence[str], places: Sequence[str]) -> _Columns:
    # Without its ``#`` where they were all taken away.
    names = ["#wrong" if word == "wrong" else word.lower() for word in words]
    starts = [index for index, name in enumerate(names) if name in _TIMES]
    problem = ""
    if names[:3] != ["size", "count", "type"] or not 1 <= len(starts) <= 2:
        problem = "be size, count, type and one or two halves from time on"
    elif len(names) > _MAX_COLUMNS:
        problem = f"have at most {_MAX_COLUMNS} columns"
    if problem:
        raise UsageError(f"header of a table must {problem}, got {' '.join(words)!r}.")
    end = starts[-1]
    while end < len(names) and names[end] in _OF_A_SIDE:
        end += 1
    halves = [names[a:b] for a, b in itertools.pairwise([*starts, end])]
    if any("busbw" not in half or "algbw" not in half for half in halves):
        raise UsageError(
            f"each half of a table must have algbw and busbw, got {' '.join(words)!r}."
        )
    titles = places if len(places) == len(halves) else PLACES[: len(halves)]
    keys = [
        f"{place}.{_UNITS.get(name, name)}"
        for place, half in zip(titles, halves, strict=True)
        for name in half
    ]
    num_sides, tail = len(keys), names[end:]
    for index, name in enumerate(tail):
        # A column that comes once for each half belongs to that half.
        is_twice = tail.count(name) == len(halves) == 2
        place = f"{titles[tail[:index].count(name)]}." if is_twice else ""
        keys += [f"{place}{name}"] if name != "timestamp" else []
    stamp_at = num_sides + tail.index("timestamp") if "timestamp" in tail else -1
    num_first = len(halves[0]) if len(halves) == 2 else 0
    further = tuple(key for key in keys if key not in itertools.chain(*_FIGURES))
    has_root = "root" in names[: starts[0]]
    num_numbers = len(keys) + (2 if stamp_at >= 0 else 0)
    return _Columns(has_root, tuple(keys), further, num_first, stamp_at, num_numbers)


def _parse_row(
    words: Sequence[str], columns: _Columns, *, has_gap: bool
) -> tuple[Row, dict[str, Extra]]:
    needed = columns.num_words(words)
    is_half = has_gap and len(words) == needed - columns.num_first
    num_blank = columns.num_first if is_half else 0
    # Old tables put a root where their header has no column for it.
    has_stray_root = not columns.has_root and len(words) == needed + 1
    if not (is_half or has_stray_root or len(words) == needed):
        least = columns.num_words(())
        raise UsageError(
            f"row must have {least + 1} cells, {least} if its operation is blank, got "
            f"{len(words)}: {' '.join(words)[:90]!r}."
        )
    split = len(words) - columns.num_numbers + num_blank
    head, cells = words[:split], [*words[split:]]
    for name, word in zip(("size", "count"), head, strict=False):
        if _INTEGER.fullmatch(word) is None:
            raise UsageError(f"{name} of a row must be an integer, got {word!r}.")
    dtype, (operation, root) = head[2], _operation_and_root(head[3:])
    if _WORD.fullmatch(dtype) is None or dtype in _OPERATIONS:
        raise UsageError(f"type of a row must be a dtype's name, got {dtype!r}.")
    extras: dict[str, Extra] = {}
    if columns.stamp_at >= 0:
        start = columns.stamp_at - num_blank
        extras["timestamp"] = " ".join(cells[start : start + 2])
        del cells[start : start + 2]
    keys = columns.keys[num_blank:]
    numbers = dict(zip(keys, map(_number, keys, cells), strict=True))
    halves = [
        Side(*map(numbers.get, figures)) if figures[2] in numbers else None
        for figures in _FIGURES
    ]
    for key in columns.further:
        if (number := numbers.get(key)) is not None:
            extras[key] = number
    size_bytes, count = int(head[0]), int(head[1])
    return Row(size_bytes, count, dtype, operation, root, *halves), extras


def _operation_and_root(words: Sequence[str]) -> tuple[str, int | None]:
    """Read what stands between type and numbers, either of which may be missing."""
    operation, root, rest = "", None, words
    if rest and _WORD.fullmatch(rest[0]):
        operation, *rest = rest
    if rest and _ROOT.fullmatch(rest[0]):
        root, rest = int(rest[0]), rest[1:]
    if rest:
        raise UsageError(
            "between type and numbers a row must have an operation and a root, got "
            f"{' '.join(rest)!r}."
        )
    return operation, root


def _number(key: str, word: str) -> float | None:
    if word in _NOTHING:
        return None
    bare = word.rstrip("*%")  # old releases mark an error above their threshold with *
    if _NUMBER.fullmatch(bare) is None:
        name = key.rpartition(".")[2]
        raise UsageError(f"{name} of a row must be a number, got {word!r}.")
    return float(bare)
