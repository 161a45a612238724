"""Bytes of one stream of one rank -> whole lines and progress, never mixed.

Pure: it is told the time and touches nothing.
"""

from dataclasses import dataclass

HELD_BYTES = 64 << 10
"""A line longer than this is shown in pieces."""

HELD_S = 2.0
"""A line that rests unfinished so long is shown as it is."""


@dataclass(frozen=True, slots=True)
class Lines:
    """One whole line, or several that follow each other.

    Attributes:
        text: UTF-8 without the last line's end; undecodable bytes are escaped.
        is_continuation: True when the beginning of the first was shown before.
    """

    text: bytes
    is_continuation: bool = False


class LineAssembler:
    """Cuts one stream into lines.

    A line is whole at its newline, at the end of the stream, at ``HELD_BYTES``, or
    when it rests ``HELD_S`` unfinished; in the latter two what follows is marked as
    its continuation. Of a line with carriage returns only the newest part counts.
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._held_since_s = 0.0
        self._is_continuation = False

    @property
    def is_holding(self) -> bool:
        """Whether an unfinished line is held."""
        return bool(self._held)

    @property
    def due_s(self) -> float | None:
        """When the unfinished line will have rested long enough; None without one."""
        if not self._held or self._is_overwriting:
            return None
        return self._held_since_s + HELD_S

    @property
    def progress(self) -> bytes | None:
        """The newest text of a line that its writer overwrites, None without one."""
        if not self._is_overwriting:
            return None
        text = newest_part(bytes(self._held))
        return printable(text[: whole_length(text)])

    def feed(self, data: bytes, now_s: float) -> list[Lines]:
        """Take more of the stream; return the lines that are whole now."""
        # No line is looked at by itself: a flood must not cost its number of lines.
        whole, newline, rest = data.rpartition(b"\n")
        lines: list[Lines] = []
        if newline:
            lines.append(self._lines(bytes(self._held) + whole))
            self._held.clear()
        if rest:
            self._held += rest
            self._held_since_s = now_s
        if b"\r" in rest or self._is_overwriting:
            self._forget_overwritten()
        while len(self._held) >= HELD_BYTES:
            lines.append(self._cut(HELD_BYTES))
        return lines

    def rest(self, now_s: float) -> list[Lines]:
        """Return the unfinished line if it has rested long enough."""
        due_s = self.due_s
        if due_s is None or now_s < due_s:
            return []
        if not whole_length(bytes(self._held)):
            return []
        return [self._cut(len(self._held))]

    def end(self) -> list[Lines]:
        """Return the unfinished line: the stream has ended."""
        raw = bytes(self._held)
        self._held.clear()
        # A bar that was wiped out at its end leaves blanks; they are no line.
        is_wiped = b"\r" in raw and not newest_part(raw).strip()
        return [] if not raw or is_wiped else [self._lines(raw)]

    @property
    def _is_overwriting(self) -> bool:
        """Whether a progress bar is held; ``_forget_overwritten`` marks it so."""
        return self._held.startswith(b"\r")

    def _lines(self, raw: bytes) -> Lines:
        if b"\r" in raw:
            raw = raw.replace(b"\r\n", b"\n")
        if b"\r" in raw:
            raw = b"\n".join(newest_part(line) for line in raw.split(b"\n"))
        lines = Lines(printable(raw), self._is_continuation)
        self._is_continuation = False
        return lines

    def _cut(self, length: int) -> Lines:
        piece = bytes(self._held[:length])
        piece = piece[: whole_length(piece) or length]
        del self._held[: len(piece)]
        line = self._lines(piece)
        self._is_continuation = True
        return line

    def _forget_overwritten(self) -> None:
        """Keep the newest part, and the return before it that tells what it is."""
        newest = newest_part(bytes(self._held))
        is_ended = self._held.endswith(b"\r")
        self._held[:] = b"\r" + newest + (b"\r" if is_ended and newest else b"")


def newest_part(raw: bytes) -> bytes:
    """Return what stands after the last carriage return that anything follows."""
    return raw.rstrip(b"\r").rpartition(b"\r")[2]


def whole_length(raw: bytes) -> int:
    """Return the length of ``raw`` without a UTF-8 sequence begun at its end."""
    for back in range(1, min(4, len(raw)) + 1):
        byte = raw[-back]
        if byte & 0xC0 == 0x80:
            continue
        needed = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        return len(raw) - back if needed > back else len(raw)
    return len(raw)


def printable(raw: bytes) -> bytes:
    """Return valid UTF-8; undecodable bytes are written out in hexadecimal."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return raw.decode("utf-8", "backslashreplace").encode()
    return raw
