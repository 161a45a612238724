"""Bytes of one stream of one rank -> whole lines and progress, never mixed.

Pure: it is told the time and touches nothing.
"""

from dataclasses import dataclass

HELD_BYTES = 64 << 10
"""A line longer than this is shown in pieces."""

HELD_S = 2.0
"""A line that rests unfinished so long is shown as it is."""


@dataclass(frozen=True, slots=True)
class Line:
    """Text to show on a line of its own.

    Attributes:
        text: UTF-8 without a line end; undecodable bytes are escaped.
        is_continuation: True when the piece before was shown before its line ended.
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
        if not self._held or b"\r" in self._held:
            return None
        return self._held_since_s + HELD_S

    @property
    def progress(self) -> bytes | None:
        """The newest text of a line that its writer overwrites, None without one."""
        if b"\r" not in self._held:
            return None
        text = newest_part(bytes(self._held))
        return printable(text[: whole_length(text)])

    def feed(self, data: bytes, now_s: float) -> list[Line]:
        """Take more of the stream; return the lines that are whole now."""
        *whole, rest = data.split(b"\n")
        lines: list[Line] = []
        for part in whole:
            lines.append(self._line(bytes(self._held) + part))
            self._held.clear()
        if rest:
            self._held += rest
            self._held_since_s = now_s
        if b"\r" in self._held:
            self._forget_overwritten()
        while len(self._held) >= HELD_BYTES:
            lines.append(self._cut(HELD_BYTES))
        return lines

    def rest(self, now_s: float) -> list[Line]:
        """Return the unfinished line if it has rested long enough."""
        due_s = self.due_s
        if due_s is None or now_s < due_s:
            return []
        if not whole_length(bytes(self._held)):
            return []
        return [self._cut(len(self._held))]

    def end(self) -> list[Line]:
        """Return the unfinished line: the stream has ended."""
        raw = bytes(self._held)
        self._held.clear()
        # A bar that was wiped out at its end leaves blanks; they are no line.
        is_wiped = b"\r" in raw and not newest_part(raw).strip()
        return [] if not raw or is_wiped else [self._line(raw)]

    def _line(self, raw: bytes) -> Line:
        line = Line(printable(newest_part(raw)), self._is_continuation)
        self._is_continuation = False
        return line

    def _cut(self, length: int) -> Line:
        piece = bytes(self._held[:length])
        piece = piece[: whole_length(piece) or length]
        del self._held[: len(piece)]
        line = self._line(piece)
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
