"""The output of ranks cut into lines, each with a prefix that names its rank."""

import time
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from ronde.errors import UsageError

HELD_BYTES = 64 << 10  # a line longer than this is shown in pieces
HELD_S = 2.0  # a line that rests unfinished so long is shown as it is
_TIME = "time"


class RankLines(NamedTuple):
    """One whole line, or several that follow each other."""

    text: bytes  # UTF-8 without the last line's end; undecodable bytes are escaped
    is_continuation: bool = False  # the beginning of the first was shown before


class LineAssembler:
    """Cuts one stream into lines.

    A line ends at its newline, at the end of the stream, at ``HELD_BYTES``, or after
    ``HELD_S`` unfinished; in the latter two what follows is marked as its continuation.
    Of a line with carriage returns only the newest part counts.
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._held_since_s = 0.0
        self._is_continuation = False

    @property
    def is_holding(self) -> bool:
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

    def feed(self, data: bytes, now_s: float) -> list[RankLines]:
        # No line is looked at by itself: a flood must not cost its number of lines.
        whole, newline, rest = data.rpartition(b"\n")
        lines: list[RankLines] = []
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

    def rest(self, now_s: float) -> list[RankLines]:
        """Return the unfinished line if it has rested long enough."""
        due_s = self.due_s
        is_due = due_s is not None and now_s >= due_s
        if not is_due or not whole_length(bytes(self._held)):
            return []
        return [self._cut(len(self._held))]

    def end(self) -> list[RankLines]:
        raw = bytes(self._held)
        self._held.clear()
        # A bar that was wiped out at its end leaves blanks; they are no line.
        is_wiped = b"\r" in raw and not newest_part(raw).strip()
        return [] if not raw or is_wiped else [self._lines(raw)]

    @property
    def _is_overwriting(self) -> bool:
        """Whether a progress bar is held, as ``_forget_overwritten`` marks it."""
        return self._held.startswith(b"\r")

    def _lines(self, raw: bytes) -> RankLines:
        if b"\r" in raw:
            raw = raw.replace(b"\r\n", b"\n")
        if b"\r" in raw:
            raw = b"\n".join(newest_part(line) for line in raw.split(b"\n"))
        lines = RankLines(printable(raw), self._is_continuation)
        self._is_continuation = False
        return lines

    def _cut(self, length: int) -> RankLines:
        piece = bytes(self._held[:length])
        piece = piece[: whole_length(piece) or length]
        del self._held[: len(piece)]
        line = self._lines(piece)
        self._is_continuation = True
        return line

    def _forget_overwritten(self) -> None:
        """Keep the newest part, and the return before it that marks it."""
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


class TagPlace(StrEnum):
    """What the prefix of a line shows."""

    AUTO = "auto"  # the rank, and its host where there are several
    RANK = "rank"
    HOST = "host"
    NONE = "none"


class Tag(NamedTuple):
    """What stands before each line."""

    place: TagPlace = TagPlace.AUTO
    has_time: bool = False  # the time of day comes first

    def places(self, hosts: Sequence[str]) -> tuple[bytes, ...]:
        """Return the prefix of each rank: ``[3]``, ``[node2:3]`` or nothing."""
        place = self.place
        if place is TagPlace.AUTO:
            place = TagPlace.HOST if len(set(hosts)) > 1 else TagPlace.RANK
        if place is TagPlace.NONE:
            return (b"",) * len(hosts)
        names = [f"{h}:" if place is TagPlace.HOST else "" for h in hosts]
        return tuple(
            f"[{name}{rank}]".encode("utf-8", "backslashreplace")
            for rank, name in enumerate(names)
        )


def parse_tag(text: str) -> Tag:
    """Read ``--tag``: ``rank``, ``host``, ``none``, each with ``,time``."""
    words = [word.strip() for word in text.split(",")]
    places = [word for word in words if word != _TIME]
    if len(places) > 1 or words.count(_TIME) > 1 or not set(places) <= set(TagPlace):
        raise UsageError(
            f"--tag must be rank, host, time or none, or one of them and time, got "
            f"{text!r}. Type: --tag host,time"
        )
    return Tag(TagPlace(places[0]) if places else TagPlace.AUTO, _TIME in words)


class Tagger:
    """Puts tags before lines."""

    def __init__(self, tag: Tag) -> None:
        self._tag = tag
        self._places: tuple[bytes, ...] = ()
        self._second = 0
        self._time_of_day = b""

    def begin(self, hosts: Sequence[str]) -> None:
        self._places = self._tag.places(hosts)

    def tagged(self, rank: int, lines: RankLines) -> bytes:
        """Return lines of a rank as they are shown; a continuation is marked by +."""
        first = self.tag(rank)
        head = first[:-1] + b"+" if lines.is_continuation and first else first
        return head + lines.text.replace(b"\n", b"\n" + first) + b"\n"

    def tag(self, rank: int) -> bytes:
        place = self._places[rank]
        if not self._tag.has_time:
            return place + b" " if place else b""
        now_s = time.time()
        if int(now_s) != self._second:
            self._second = int(now_s)
            self._time_of_day = time.strftime("%H:%M:%S").encode()
        at = b"%s.%03d " % (self._time_of_day, int(now_s % 1 * 1000))
        return at + place + b" " if place else at
