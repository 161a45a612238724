"""The text that nccl-tests prints, in all its releases' forms.

What is drift is read and warned of; what is damage is an error with its line. A row is
damaged when a cell is missing or no number: to skip it in silence would lose a figure,
to guess would invent one. The last line of a log may be cut anywhere where no line
break ends it, so that it is never believed.
"""

import re
from collections.abc import Generator
from contextlib import contextmanager

from ronde.bench.log_state import AVERAGE, OUT_OF_BOUNDS, ParserState, name_in
from ronde.bench.log_table import (
    Columns,
    Line,
    is_number,
    parse_header,
    parse_row,
    split_lines,
)
from ronde.bench.results import Run
from ronde.errors import UsageError

_BANNERS = (
    ("version", re.compile(r"(?:nccl-tests|rccl-tests|ronde(?: bench)?) version\b")),
    ("start", re.compile(r"Collective test starting:\s*(?P<name>\S+)")),
    ("nThread", re.compile(r"nThread\b")),
)
_ENGINE = re.compile(r"engine: (\w+)")
_PLACES = re.compile(r"out-of-place|in-place")
_PROGRAM = re.compile(r"\b([a-z_]+)_perf\b")
_FOOTER = re.compile(r"(?P<name>[A-Za-z][^:]*?)\s*:(?:\s+(?P<value>.*))?$")
_TIME_OF_DAY = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d")
_ELISION = re.compile(r"[.\u2026]*(?:\.{3}|\u2026)")
_CONCLUDED = "# Collective test concluded:"
_MAX_STRAYS = 1000


def read_text(
    text: str, source: str, *, test: str = "", keeps_partial: bool = False
) -> list[Run]:
    reader = _Reader(source, test)
    lines, rest = split_lines(text)
    for line in lines:
        reader.feed(line)
    reader.end(rest, keeps_partial=keeps_partial)
    if not reader.runs:
        last = len(lines) + (rest is not None)
        raise UsageError(
            f"{source}:{max(last, 1)}: log must have a table of nccl-tests, got none "
            "up to here. Its header begins with: # size count type."
        )
    return reader.runs


class _Reader:
    """Takes a log line by line; see ``read_text``."""

    def __init__(self, source: str, test: str) -> None:
        self.runs: list[Run] = []
        self._source = source
        self._test = test
        self._state = ParserState(source, 1)
        # A row whose numbers may go on below: where it began, and its text so far.
        self._row: Line | None = None

    def feed(self, line: Line) -> None:
        if line.warning:
            self._state.warnings.append(f"line {line.number}: NCCL: {line.warning}")
        text = line.text.strip()
        if not text:
            return
        if text.startswith("#"):
            self._comment(line, text[1:].strip())
        elif _ELISION.fullmatch(text):
            self._elision(line)
        elif self._state.columns is None or self._state.is_over:
            self._outside(line, text)
        else:
            self._inside(line, self._state.columns)

    def end(self, rest: Line | None, *, keeps_partial: bool) -> None:
        """Take what no line break ended, and close the last run."""
        state = self._state
        if rest is not None:
            self._rest(rest, keeps_partial=keeps_partial)
        if self._row is not None:
            if not keeps_partial:
                self._refuse_row(self._row)
            state.warnings.append(f"line {self._row.number}: a cut row was left out")
            self._row = None
        self._close(state.first_line)

    def _rest(self, line: Line, *, keeps_partial: bool) -> None:
        state, text = self._state, line.text.strip()
        columns = None if state.is_over else state.columns
        words = text.split("#", 1)[0].split()
        if columns is not None and words and _claims_to_be_row(words):
            row = self._continued(line)
            num_words = len(row.text.split())
            if not keeps_partial and num_words < columns.num_words(row.text.split()):
                self._refuse_row(row)
            self._row = None
        elif _CONCLUDED.startswith(text[: len(_CONCLUDED)]):
            return
        state.warnings.append(
            f"line {line.number} ends without a line break and may be cut: it was "
            "left out"
        )

    def _comment(self, line: Line, comment: str) -> None:
        words = comment.split()
        if not words:
            return
        if [word.lower() for word in words[:2]] == ["size", "count"]:
            self._open_table(line, words)
            return
        for kind, pattern in _BANNERS:
            found = pattern.match(comment)
            if found is not None:
                self._open_run(line, kind)
                if kind == "start":
                    self._state.title = name_in(found["name"])
                elif kind == "nThread":
                    self._state.arguments = comment
                return
        if self._state.columns is None:
            self._before_table(comment)
        else:
            self._below_table(line, comment)

    def _open_run(self, line: Line, kind: str) -> None:
        state = self._state
        if state.columns is not None or kind in state.banners:
            self._close(line.number)
        elif not state.banners:
            state.first_line = line.number
        self._state.banners.add(kind)

    def _open_table(self, line: Line, words: list[str]) -> None:
        state = self._state
        if state.columns is not None:
            self._close(line.number)
            if not state.is_over:
                # The same program goes on: its ranks are still the same.
                self._state.devices = state.devices
                self._state.title, self._state.mention = state.title, state.mention
        elif not state.banners and not state.devices:
            state.first_line = line.number
        with _position(self._source, line.number):
            self._state.columns = parse_header(words, self._state.places)
        self._state.has_table = True

    def _close(self, next_line: int) -> None:
        if self._row is not None:
            self._refuse_row(self._row)
        state = self._state
        if state.columns is not None or state.banners:
            self.runs.append(state.finish(self._test))
        self._state = ParserState(self._source, next_line)

    def _before_table(self, comment: str) -> None:
        state = self._state
        engine = _ENGINE.fullmatch(comment)
        if engine is not None:
            state.engine = engine[1]
        elif not state.add_device(comment):
            places = [each.replace("-", "_") for each in _PLACES.findall(comment)]
            state.places = places or state.places
        elif comment.endswith("..."):
            state.is_list_cut = True

    def _below_table(self, line: Line, comment: str) -> None:
        found = _FOOTER.match(comment)
        if found is None:
            return
        name = found["name"]
        if self._row is not None:
            # alltoallv tells of its traffic inside a row; a footer ends the table.
            if name not in (AVERAGE, OUT_OF_BOUNDS):
                return
            self._refuse_row(self._row)
        with _position(self._source, line.number):
            self._state.add_footer(name, found["value"] or "")
        if name == "error":
            self._state.warnings.append(f"line {line.number}: {found['value']}")

    def _elision(self, line: Line) -> None:
        state = self._state
        if self._row is not None:
            self._refuse_row(self._row)
        if state.columns is not None and not state.is_over:
            state.has_gap = True
            state.warnings.append(f"line {line.number}: rows were left out here")
        elif state.devices:
            state.is_list_cut = True

    def _outside(self, line: Line, text: str) -> None:
        """Take a line that stands in no table, where rows are lost ones."""
        words = text.split()
        if len(words) > 6 and words[0].isdecimal() and _claims_to_be_row(words):
            raise UsageError(
                f"{self._source}:{line.number}: row must stand below a header (# size "
                f"count type ...), got {text[:60]!r} without one."
            )
        found = _PROGRAM.search(text)
        if found is not None and not self._state.mention:
            self._state.mention = name_in(found[1])
        if text.endswith("...") and self._state.devices:
            self._state.is_list_cut = True

    def _inside(self, line: Line, columns: Columns) -> None:
        """Take a line of a table: a row, a part of one, or somebody else's."""
        text = line.text.split("#", 1)[0]
        words = text.split()
        if not _claims_to_be_row(words):
            if len(self._state.strays) < _MAX_STRAYS:
                stray = f"line {line.number}: {line.text.strip()[:50]!r}"
                self._state.strays.append(stray)
            return
        if self._row is not None and not all(
            is_number(word) or _TIME_OF_DAY.fullmatch(word) for word in words
        ):
            self._refuse_row(self._row)
        row = self._row = self._continued(Line(line.number, text))
        words = row.text.split()
        has_blank_half = " " * 30 in row.text.strip() and len(words) >= 7
        if len(words) >= columns.num_words(words) or has_blank_half:
            self._take_row(row, columns)

    def _continued(self, line: Line) -> Line:
        """Return the row that is under way, if any, with what ``line`` adds to it."""
        row = self._row
        return line if row is None else Line(row.number, f"{row.text} {line.text}")

    def _take_row(self, line: Line, columns: Columns) -> None:
        with _position(self._source, line.number):
            row, extras = parse_row(line.text, columns)
            above = self._state.rows[-1:]
            # The operation is blank in all rows of a table or in none.
            if columns.has_root and above and bool(above[0].redop) != bool(row.redop):
                raise UsageError(
                    f"operation of a row must be there as above it, got {row.redop!r}."
                )
        self._row = None
        self._state.rows.append(row)
        self._state.extras.append(extras)

    def _refuse_row(self, line: Line) -> None:
        with _position(self._source, line.number):
            if self._state.columns is not None:
                parse_row(line.text, self._state.columns)
            raise UsageError(f"row must be whole, got {line.text.strip()[:60]!r}.")


@contextmanager
def _position(source: str, number: int) -> Generator[None]:
    """Put file and line before the message of a ``UsageError``."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{source}:{number}: {error}") from error


def _claims_to_be_row(words: list[str]) -> bool:
    """Say whether a line of a table begins as a row, or is full of numbers as one."""
    begins = len(words) > 1 and words[0].isdecimal() and words[1].isdecimal()
    return begins or 2 * sum(map(is_number, words)) >= max(len(words), 1)
