"""Messages from one process to another through a ring of bytes that both map.

A message is its length in eight bytes, then itself, filled up to a multiple of eight,
so that no length is ever cut in two. Sender and receiver count the bytes that they have
written and taken since the beginning. Each word has one writer: see
``words.py``, Note [Memory order].
"""

import sys
from collections import deque
from dataclasses import dataclass

from ronde.collectives.engines.shared_memory.waiting import IS_WEAKLY_ORDERED, fence

_HEADER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Shared:
    """The memory of one ring.

    Attributes:
        words: Of eight bytes each; zeros to begin with.
        written: Which of them counts bytes written; the sender's.
        taken: Which counts bytes taken; the receiver's.
        is_full: Which says that the sender waits for room; the sender's.
        data: The ring itself; its length is a power of two.
    """

    words: memoryview
    written: int
    taken: int
    is_full: int
    data: memoryview


class Outgoing:
    """The sender's end."""

    __slots__ = (
        "_backlog",
        "_data",
        "_end",
        "_lengths",
        "_limit",
        "_shared",
        "_words",
        "_written",
        "_written_at",
    )

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._words = shared.words
        self._written_at = shared.written
        self._data = shared.data
        self._lengths = shared.data.cast("Q")
        self._end = len(shared.data)
        self._limit = self._end
        self._written = 0
        self._backlog: deque[memoryview] = deque()

    def put(self, message: bytes) -> bool:
        """Write a message, or keep what does not fit; say whether anything was written.

        This is written for the time it takes.
        """
        size = len(message)
        written = self._written
        at = written & (self._end - 1)
        num_bytes = (size + 15) & ~7
        if (
            self._backlog
            or written + num_bytes > self._limit
            or at + num_bytes > self._end
        ):
            return self._put_in_pieces(message)
        self._lengths[at >> 3] = size
        at += _HEADER_BYTES
        self._data[at : at + size] = message
        if IS_WEAKLY_ORDERED:
            fence()
        self._words[self._written_at] = self._written = written + num_bytes
        return True

    def write_backlog(self) -> bool:
        """Write what was kept as far as it fits; say whether anything was written."""
        if not self._backlog:
            return False
        before = self._written
        while self._backlog and self._has_room():
            piece = self._backlog[0]
            at = self._written & (self._end - 1)
            size = min(len(piece), self._limit - self._written, self._end - at)
            self._data[at : at + size] = piece[:size]
            if IS_WEAKLY_ORDERED:
                fence()
            self._written += size
            self._words[self._written_at] = self._written
            if size < len(piece):
                self._backlog[0] = piece[size:]
            else:
                self._backlog.popleft()
        self._words[self._shared.is_full] = bool(self._backlog)
        return self._written != before

    def _put_in_pieces(self, message: bytes) -> bool:
        size = len(message)
        header = size.to_bytes(_HEADER_BYTES, sys.byteorder)
        filling = bytes(-size % 8)
        self._backlog.append(memoryview(b"".join((header, message, filling))))
        return self.write_backlog()

    def _has_room(self) -> bool:
        """Say so; where there is none, have the receiver ring when it has made some."""
        shared = self._shared
        self._limit = self._words[shared.taken] + self._end
        if self._limit == self._written:
            self._words[shared.is_full] = True
            fence()
            self._limit = self._words[shared.taken] + self._end
        return self._limit > self._written


class Incoming:
    """The receiver's end."""

    __slots__ = (
        "_data",
        "_end",
        "_lengths",
        "_num_missing",
        "_part",
        "_shared",
        "_size",
        "_taken",
        "_words",
        "_written_at",
    )

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._words = shared.words
        self._written_at = shared.written
        self._data = shared.data
        self._lengths = shared.data.cast("Q")
        self._end = len(shared.data)
        self._taken = 0
        self._size = 0
        self._num_missing = 0
        self._part = bytearray()

    def has_unread(self) -> bool:
        """Say whether there are bytes that were not taken."""
        return self._words[self._written_at] != self._taken

    def take(self, sender: int, into: list[tuple[int, bytes]]) -> bool:
        """Append whole messages; say whether the sender waits for the room made."""
        written = self._words[self._written_at]
        taken = self._taken
        if written == taken:
            return False
        if IS_WEAKLY_ORDERED:
            fence()
        while taken != written:
            at = taken & (self._end - 1)
            if self._num_missing:
                taken += self._take_piece(at, written - taken, sender, into)
                continue
            size = self._lengths[at >> 3]
            num_bytes = (size + 15) & ~7
            if taken + num_bytes <= written and at + num_bytes <= self._end:
                at += _HEADER_BYTES
                into.append((sender, self._data[at : at + size].tobytes()))
                taken += num_bytes
            else:
                self._size = size
                self._num_missing = num_bytes - _HEADER_BYTES
                taken += _HEADER_BYTES
        self._words[self._shared.taken] = self._taken = taken
        fence()
        return bool(self._words[self._shared.is_full])

    def _take_piece(
        self, at: int, num_there: int, sender: int, into: list[tuple[int, bytes]]
    ) -> int:
        """Take some of a message that does not lie there in one piece."""
        num_bytes = min(self._num_missing, num_there, self._end - at)
        self._part += self._data[at : at + num_bytes]
        self._num_missing -= num_bytes
        if not self._num_missing:
            del self._part[self._size :]
            into.append((sender, bytes(self._part)))
            self._part = bytearray()
        return num_bytes
