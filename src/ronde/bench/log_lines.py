"""A log's lines, freed of what launchers, terminals and NCCL put around them.

Pure: no line is dropped here, so that numbers stay those of the file.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

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
    """One line of a log.

    Attributes:
        number: Where it stands in its file, from 1.
        text: What the benchmark itself printed.
        warning: What NCCL warned of on this line, or empty.
    """

    number: int
    text: str
    warning: str = ""


@dataclass(frozen=True, slots=True)
class Lines:
    """A whole log.

    Attributes:
        ended: The lines that end with a line break.
        rest: What stands after the last line break, which may be cut anywhere; None
            where there is nothing.
    """

    ended: Sequence[Line]
    rest: Line | None


def split_lines(text: str) -> Lines:
    """Split a log into lines; a carriage return before the break is none of it."""
    *ended, rest = text.removeprefix("\ufeff").split("\n")
    hosts: set[str] = set()
    lines = [_clean(number, each, hosts) for number, each in enumerate(ended, 1)]
    last = _clean(len(lines) + 1, rest, hosts)
    return Lines(lines, last if last.text.strip() else None)


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
