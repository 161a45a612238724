"""Lines, columns and rows of nccl-tests' tables.

Releases differ in columns, and some rows lack cells that the header names. What holds
for all: a row begins with size, count and type, and its numbers stand at the right end
in the header's order.
"""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ronde.bench.results import Extra, Row, Side
from ronde.errors import UsageError

_PREFIX = re.compile(
    r"""\s*(?:
        \[[^\]\s]*\]<std(?:out|err)>:       # mpirun --tag-output
      | \d+:(?=\s|$)                        # srun --label
      | \[\d+\]\+?[ ]                       # ronde run
      | \d{4}-\d\d-\d\dT[\d:.]+Z?[ ]        # kubectl logs --timestamps
    )""",
    re.VERBOSE,
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NCCL = re.compile(
    r"""(?:\[\d[\d:. -]*\][ ])?             # WARN may have the time
    (?P<host>\S+):\d+:\d+[ ]\[\d+\][ ]
    (?:\S+:\d+[ ](?:\(\S+\)[ ])?)?          # WARN has file:line and the function
    NCCL[ ](?P<level>[A-Z]+)(?P<said>.*)""",
    re.VERBOSE,
)
_CELL = re.compile(r"N/A|-?\d+(?:\.\d+)?(?:e[+-]\d+)?")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log."""

    number: int  # where it stands in its file, from 1
    text: str  # what the benchmark itself printed
    warning: str = ""  # what NCCL warned of on this line, or empty


def split_lines(text: str) -> tuple[list[Line], Line | None]:
    """Split a log into lines; a carriage return before the break is none of it.

    Returns:
        The lines that end with a line break, and what stands after the last, which may
        be cut anywhere; None where there is nothing.
    """
    hosts: set[str] = set()
    lines = [
        _clean(number, each, hosts)
        for number, each in enumerate(text.removeprefix("\ufeff").split("\n"), 1)
    ]
    last = lines.pop()
    return lines, last if last.text.strip() else None


def _clean(number: int, text: str, hosts: set[str]) -> Line:
    """Return the benchmark's part of a line.

    NCCL writes whenever it likes: its line may begin where a row has got to, with no
    blank between. ``hosts`` are those that earlier lines began with.
    """
    bare = _COLOUR.sub("", text.rstrip())
    prefix = _PREFIX.match(bare)
    if prefix is not None:
        bare = bare[prefix.end() :]
    said = _NCCL.search(bare)
    if said is None:
        return Line(number, bare)
    warning = said["said"].strip() if said["level"] == "WARN" else ""
    own = bare[: said.start()]
    if own.strip() or bare[:1].isspace():
        own += _glued_cell(said["host"], hosts)
    else:
        hosts.add(said["host"])
    return Line(number, own.rstrip(), warning)


def _glued_cell(word: str, hosts: set[str]) -> str:
    """Return the cell that a host's name was printed right behind, or nothing."""
    for host in sorted(hosts, key=len, reverse=True):
        if word.endswith(host):
            return word.removesuffix(host)
    cell = _CELL.match(word)
    # A host that begins with a digit cannot be told from a number before it.
    if cell is None or not word[cell.end() : cell.end() + 1].isalpha():
        return ""
    return cell[0]


OUT_OF_PLACE = "out_of_place"
IN_PLACE = "in_place"
OPERATIONS = frozenset({"sum", "prod", "max", "min", "avg", "mulsum", "none", "all"})

_FIRST = ("size", "count", "type")
_TIMES = ("time", "cputime")
_OF_A_SIDE = frozenset(
    {*_TIMES, "algbw", "busbw", "#wrong", "error", "i_min", "i_max", "i_p99", "i_cv%"}
)
_NUMBER = re.compile(
    r"(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|-?inf|-?nan", re.IGNORECASE
)
_INTEGER = re.compile(r"\d{1,18}")
_ROOT = re.compile(r"-?\d{1,9}")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_UNITS = {
    "cputime": "cputime_us",
    "i_min": "i_min_us",
    "i_max": "i_max_us",
    "i_p99": "i_p99_us",
    "i_cv%": "i_cv_percent",
    "error": "error",
}
_NOTHING = frozenset({"N/A", "-", "--"})
_MIN_GAP = 24
"""Blanks in place of a half; between cells there are at most a dozen."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What a table's header promises."""

    has_root: bool
    # The halves' places and the names of their columns.
    sides: tuple[tuple[str, tuple[str, ...]], ...]
    tail: tuple[str, ...]  # columns after the halves; ``timestamp`` has two words a row

    @property
    def num_numbers(self) -> int:
        """Words at the right end of a row, from the first half on."""
        num_tail = sum(2 if name == "timestamp" else 1 for name in self.tail)
        return sum(len(names) for _, names in self.sides) + num_tail

    def num_words(self, words: Sequence[str]) -> int:
        """Return how many words the row that begins with ``words`` must have."""
        has_operation = len(words) > 3 and _WORD.fullmatch(words[3]) is not None
        return 3 + has_operation + self.has_root + self.num_numbers


def is_number(word: str) -> bool:
    """Say whether a word may stand in a column of numbers."""
    return word in _NOTHING or _NUMBER.fullmatch(word.rstrip("*")) is not None


def parse_header(words: Sequence[str], places: Sequence[str]) -> Columns:
    names = [word.lower() for word in words]
    starts = [index for index, name in enumerate(names) if name in _TIMES]
    if tuple(names[:3]) != _FIRST or not 1 <= len(starts) <= 2:
        raise UsageError(
            "header of a table must be size, count, type and one or two halves from "
            f"time on, got {' '.join(words)!r}."
        )
    end = starts[-1]
    while end < len(names) and names[end] in _OF_A_SIDE:
        end += 1
    bounds = [*starts, end]
    halves = [tuple(names[a:b]) for a, b in itertools.pairwise(bounds)]
    if any("busbw" not in half or "algbw" not in half for half in halves):
        raise UsageError(
            f"each half of a table must have algbw and busbw, got {' '.join(words)!r}."
        )
    titles = tuple(places)
    if len(titles) != len(halves):
        titles = (OUT_OF_PLACE, IN_PLACE)[: len(halves)]
    return Columns(
        has_root="root" in names[: starts[0]],
        sides=tuple(zip(titles, halves, strict=True)),
        tail=tuple(names[end:]),
    )


def parse_row(text: str, columns: Columns) -> tuple[Row, dict[str, Extra]]:
    """Read one row, and the cells of it that a ``Row`` has no place for."""
    head, numbers, is_half = _divide(text, columns)
    operation, root = _between(head[3:])
    for name, word in zip(("size", "count"), head, strict=False):
        if _INTEGER.fullmatch(word) is None:
            raise UsageError(f"{name} of a row must be an integer, got {word!r}.")
    dtype = head[2]
    if _WORD.fullmatch(dtype) is None or dtype in OPERATIONS:
        raise UsageError(f"type of a row must be a dtype's name, got {dtype!r}.")
    extras: dict[str, Extra] = {}
    sides: dict[str, Side] = {}
    rest = iter(numbers)
    for place, names in columns.sides[is_half:]:
        cells = {name: _number(name, next(rest)) for name in names}
        # The old column `error` is the largest deviation and no number of elements.
        more = {n: v for n, v in cells.items() if n in _UNITS and v is not None}
        extras |= {f"{place}.{_UNITS[name]}": value for name, value in more.items()}
        sides[place] = Side(*map(cells.get, ("time", "algbw", "busbw", "#wrong")))
    # A column that comes once for each half belongs to that half.
    places = [place for place, _ in columns.sides]
    seen: Counter[str] = Counter()
    for name in columns.tail:
        if name == "timestamp":
            extras[name] = f"{next(rest)} {next(rest)}"
            continue
        is_twice = columns.tail.count(name) == len(places) == 2
        number = _number(name, next(rest).removesuffix("%"))
        if number is not None:
            extras[f"{places[seen[name]]}.{name}" if is_twice else name] = number
        seen[name] += 1
    row = Row(
        size_bytes=int(head[0]),
        count=int(head[1]),
        dtype=dtype,
        redop=operation,
        root=root,
        out_of_place=sides.get(OUT_OF_PLACE),
        in_place=sides.get(IN_PLACE),
    )
    return row, extras


def _divide(text: str, columns: Columns) -> tuple[list[str], list[str], bool]:
    """Return a row's head, its numbers, and whether its first half was left blank."""
    words = text.split()
    needed, num_numbers = columns.num_words(words), columns.num_numbers
    first = len(columns.sides[0][1])
    is_short = len(columns.sides) == 2 and len(words) == needed - first
    is_half = is_short and " " * _MIN_GAP in text.strip()
    if is_half:
        num_numbers -= first
    # Old tables put a root where their header has no column for it.
    has_stray_root = not columns.has_root and len(words) == needed + 1
    if not (is_half or has_stray_root or len(words) == needed):
        raise UsageError(
            f"row must have {needed} cells, as its header has, got {len(words)}: "
            f"{' '.join(words)[:90]!r}."
        )
    return words[:-num_numbers], words[-num_numbers:], is_half


def _between(words: Sequence[str]) -> tuple[str, int | None]:
    """Return the operation and the root, either of which may be missing."""
    operation, root = "", None
    rest = list(words)
    if rest and _WORD.fullmatch(rest[0]):
        operation = rest.pop(0)
    if rest and _ROOT.fullmatch(rest[0]):
        root = int(rest.pop(0))
    if rest:
        raise UsageError(
            "between type and numbers a row must have an operation and a root, got "
            f"{' '.join(words)!r}."
        )
    return operation, root


def _number(name: str, word: str) -> float | None:
    """Return a cell's number; None where nothing was measured."""
    if word in _NOTHING:
        return None
    bare = word.rstrip("*")  # how rccl-tests marks an error above its threshold
    if _NUMBER.fullmatch(bare) is None:
        raise UsageError(f"{name} of a row must be a number, got {word!r}.")
    return float(bare)
