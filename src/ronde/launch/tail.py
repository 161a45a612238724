"""The last lines of a stream, and the last Python traceback in it."""

import re
from collections.abc import Sequence

_KEPT_BYTES = 32 << 10
_MAX_MESSAGE_LINES = 12

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_COLOUR = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")


class Tail:
    """Remembers the end of what a rank wrote.

    Args:
        num_lines: Lines to remember.
    """

    def __init__(self, num_lines: int = 20) -> None:
        self._num_lines = num_lines
        self._kept = bytearray()

    def add(self, data: bytes) -> None:
        """Take more of the stream."""
        self._kept += data
        if len(self._kept) > 2 * _KEPT_BYTES:
            del self._kept[:-_KEPT_BYTES]

    def lines(self) -> tuple[str, ...]:
        """Return the last lines, of each what a progress bar left on the screen.

        What sets colours is taken away.
        """
        return tuple(self._lines()[-self._num_lines :])

    def traceback(self) -> str:
        """Return the last traceback of Python's, or an empty text.

        With it come the exceptions that it was raised for, and the lines that belong
        to its message, as far as a text tells. A prefix of every line, such as
        torch's ``[rank0]: ``, is taken away.
        """
        return find_traceback(self._lines())

    def _lines(self) -> list[str]:
        lines = bytes(self._kept[-_KEPT_BYTES:]).split(b"\n")
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        if not shown[-1]:
            shown.pop()
        return [
            _COLOUR.sub("", line.decode("utf-8", "backslashreplace")) for line in shown
        ]


def find_traceback(lines: Sequence[str]) -> str:
    """Return the last traceback in ``lines``, or an empty text."""
    heads = [i for i, line in enumerate(lines) if _is_head(line)]
    if not heads:
        return ""
    prefix = _prefix(lines[heads[-1]])
    first = heads[-1]
    for head in reversed(heads[:-1]):
        if not _is_chained(lines, first, prefix):
            break
        first = head
    rest = [line.removeprefix(prefix) for line in lines[heads[-1] :]]
    before = [line.removeprefix(prefix) for line in lines[first : heads[-1]]]
    return "\n".join(before + rest[: _length(rest)])


def _is_head(line: str) -> bool:
    """Whether a traceback begins here, and not one within an exception group."""
    before = line.removesuffix(_TRACEBACK)
    return before != line and not before.rstrip().endswith("|")


def _prefix(head: str) -> str:
    """Return what a wrapper put before a traceback's first line."""
    before = head.removesuffix(_TRACEBACK)
    # The border of an exception group is Python's own.
    return before.removesuffix("  + Exception Group ")


def _is_chained(lines: Sequence[str], head: int, prefix: str) -> bool:
    """Whether the traceback that begins at ``head`` goes on from one before."""
    before = [line.removeprefix(prefix) for line in lines[max(0, head - 2) : head]]
    return len(before) == 2 and before[0] in _CHAINED and not before[1].strip()


def _length(lines: Sequence[str]) -> int:
    """Return how many of the lines are the traceback that the first of them begins."""
    end = 1
    while end < len(lines) and lines[end][:1] in {" ", "\t"}:
        end += 1
    # What follows the calls is the exception, whose message may have several lines.
    limit = min(len(lines), end + _MAX_MESSAGE_LINES)
    while end < limit and lines[end].strip():
        end += 1
    return end
