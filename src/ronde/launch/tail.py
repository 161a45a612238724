"""The last lines of a stream, and the Python traceback that it ends with."""

import re
import time
from collections.abc import Sequence

_KEPT_BYTES = 32 << 10
_MAX_MESSAGE_LINES = 12

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_NOT_FATAL = re.compile(r"^(Exception ignored |Exception in thread |Error in atexit)")
"""What Python puts before a traceback that ends no process."""
_FAREWELL = re.compile(
    r"^(\[(rank\d+\]:\[)?[WEIF]\d{4} |wandb: |terminate called|Aborted|Thread 0x"
    r"|Extension modules: |Fatal Python error|Current thread )"
    r"|Warning: |resource_tracker"
)
"""How lines begin, or what is in them, that follow a traceback while a process ends:
what Python, torch's C++ parts and trackers of experiments write then."""
_COLOUR = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")


class Tail:
    """Remembers the end of what a rank wrote.

    Args:
        num_lines: Lines to remember.
    """

    def __init__(self, num_lines: int = 20) -> None:
        self._num_lines = num_lines
        self._kept = bytearray()
        self.written_at_s = 0.0
        """When the last came, on the monotonic clock."""

    def add(self, data: bytes) -> None:
        """Take more of the stream."""
        self.written_at_s = time.monotonic()
        self._kept += data
        if len(self._kept) > 2 * _KEPT_BYTES:
            del self._kept[:-_KEPT_BYTES]

    def lines(self) -> tuple[str, ...]:
        """Return the last lines, of each what a progress bar left on the screen.

        What sets colours is taken away.
        """
        return tuple(self._lines()[-self._num_lines :])

    def traceback(self) -> str:
        """Return the Python traceback that is the last word, or an empty text.

        An older one, after which more was written, is none; what is written while a
        process ends does not count, nor do exceptions that Python ignores.

        With it come the exceptions that it was raised for, and the lines that belong
        to its message, as far as a text tells. A prefix of every line, such as
        torch's ``[rank0]: ``, is taken away.
        """
        if _TRACEBACK.encode() not in self._kept:
            return ""
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
    """Return the traceback that ``lines`` end with, or an empty text."""
    heads = [i for i in range(len(lines)) if _is_head(lines, i)]
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
    length = _length(rest)
    if not _is_farewell(rest[length:]):
        return ""
    return "\n".join(before + rest[:length])


def _is_farewell(lines: Sequence[str]) -> bool:
    """Whether these are but what is written while a process ends."""
    is_ignored = False
    for line in lines:
        if _NOT_FATAL.search(line):
            is_ignored = True
        elif is_ignored:
            # Its last line is the exception, which may be called anything.
            is_ignored = line[:1] in {" ", "\t"} or line.endswith(_TRACEBACK)
        elif line[:1].strip() and not _FAREWELL.search(line):
            return False
    return True


def _is_head(lines: Sequence[str], index: int) -> bool:
    """Whether a traceback begins here that may end a process.

    One within an exception group does not, nor one that Python ignores.
    """
    before = lines[index].removesuffix(_TRACEBACK)
    if before == lines[index] or before.rstrip().endswith("|"):
        return False
    above = lines[index - 1].removeprefix(before) if index else ""
    return not _NOT_FATAL.search(above)


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
    while end < limit and lines[end].strip() and not _is_own_word(lines[end]):
        end += 1
    return end


def _is_own_word(line: str) -> bool:
    """Whether this is no part of an exception's message."""
    return bool(_NOT_FATAL.search(line) or _FAREWELL.search(line))
