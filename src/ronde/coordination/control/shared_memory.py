"""Connections within a host, through memory that its ranks map.

Every rank has a segment with its doorbell. A rank that reports to another on its host
has two ring buffers there as well, one for each direction.

A message is its length in eight bytes, then itself, filled up to a multiple of eight,
so that no length is ever cut in two. Sender and receiver count the bytes that they have
written and taken since the beginning. Each word has one writer: see
``words.py``, Note [Memory order].
"""

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ronde.collectives.engines.shared_memory.segment import (
    ExchangeBytes,
    Segment,
    share_segments,
)
from ronde.collectives.engines.shared_memory.waiting import (
    IS_WEAKLY_ORDERED,
    PeerProcess,
    fence,
)
from ronde.coordination.control import doorbell, rounds
from ronde.coordination.control.doorbell import NEAR, Doorbell, Waiter
from ronde.coordination.control.tree import Loss, Tree
from ronde.errors import CollectiveError, PeerLostError

RING_BYTES = 1 << 16
_PAGE_BYTES = 4096
_ROUNDS_AT = _PAGE_BYTES + 2 * RING_BYTES
_SEGMENT_BYTES = _ROUNDS_AT + rounds.NUM_BYTES
_LINE = 8
"""Words in a cache line."""
_STATE = doorbell.NUM_BYTES // 8
_OPEN, _CLOSED = 1, 2
"""Bits of the state: a rank that fails to connect is closed and was never open."""
_UP = _STATE + _LINE
_DOWN = _UP + 3 * _LINE
_LOOK_EVERY_S = 0.25
_LENGTH_BYTES = 8


class _RingBuffer(NamedTuple):
    """The memory of one ring buffer.

    Attributes:
        words: Of eight bytes each; zeros to begin with.
        written: Which of them counts bytes written; the sender's.
        taken: Which counts bytes taken; the receiver's.
        is_full: Which is set while the sender waits for room; the sender's.
        data: The ring itself; its length is a power of two.
    """

    words: memoryview
    written: int
    taken: int
    is_full: int
    data: memoryview


class _Sender:
    """The end that writes into a ring buffer."""

    def __init__(self, ring: _RingBuffer) -> None:
        self._ring = ring
        self._words = ring.words
        self._written_at = ring.written
        self._data = ring.data
        self._lengths = ring.data.cast("Q")
        self._end = len(ring.data)
        self._limit = self._end
        self._written = 0
        self._backlog: deque[memoryview] = deque()

    def put(self, message: bytes) -> bool:
        """Write a message, or keep what does not fit; return whether some was written.

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
            length = size.to_bytes(_LENGTH_BYTES, sys.byteorder)
            whole = b"".join((length, message, bytes(-size % 8)))
            self._backlog.append(memoryview(whole))
            return self.write_backlog()
        self._lengths[at >> 3] = size
        at += _LENGTH_BYTES
        self._data[at : at + size] = message
        if IS_WEAKLY_ORDERED:
            fence()
        self._words[self._written_at] = self._written = written + num_bytes
        return True

    def write_backlog(self) -> bool:
        """Write what was kept as far as it fits; return whether some was written."""
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
        self._words[self._ring.is_full] = bool(self._backlog)
        return self._written != before

    def _has_room(self) -> bool:
        """Where there is none, have the receiver notify when it has made some."""
        ring = self._ring
        self._limit = self._words[ring.taken] + self._end
        if self._limit == self._written:
            self._words[ring.is_full] = True
            fence()
            self._limit = self._words[ring.taken] + self._end
        return self._limit > self._written


class _Receiver:
    """The end that takes from a ring buffer."""

    def __init__(self, ring: _RingBuffer) -> None:
        self._ring = ring
        self._words = ring.words
        self._written_at = ring.written
        self._data = ring.data
        self._lengths = ring.data.cast("Q")
        self._end = len(ring.data)
        self._taken = 0
        self._size = 0
        self._num_missing = 0
        self._part = bytearray()

    def has_unread(self) -> bool:
        return self._words[self._written_at] != self._taken

    def take(self, sender: int, into: list[tuple[int, bytes]]) -> bool:
        """Append whole messages; return whether the sender waits for the room made."""
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
                at += _LENGTH_BYTES
                into.append((sender, self._data[at : at + size].tobytes()))
                taken += num_bytes
            else:
                self._size = size
                self._num_missing = num_bytes - _LENGTH_BYTES
                taken += _LENGTH_BYTES
        self._words[self._ring.taken] = self._taken = taken
        fence()
        return bool(self._words[self._ring.is_full])

    def _take_piece(
        self, at: int, num_there: int, sender: int, into: list[tuple[int, bytes]]
    ) -> int:
        num_bytes = min(self._num_missing, num_there, self._end - at)
        self._part += self._data[at : at + num_bytes]
        self._num_missing -= num_bytes
        if not self._num_missing:
            del self._part[self._size :]
            into.append((sender, bytes(self._part)))
            self._part = bytearray()
        return num_bytes


class SharedMemoryConnection:
    """Two ring buffers, and the neighbour's doorbell."""

    def __init__(
        self,
        rank: int,
        process: PeerProcess,
        rings: tuple[_RingBuffer, _RingBuffer],
        doorbell: Doorbell,
        words: memoryview,
    ) -> None:
        self.rank = rank
        self._process = process
        self._out, self._in = _Sender(rings[0]), _Receiver(rings[1])
        self._words = words
        self.notify = doorbell.notify

    def send(self, message: bytes) -> None:
        if self._out.put(message):
            self.notify()

    def receive(self, into: list[tuple[int, bytes]]) -> None:
        has_made_room = self._in.take(self.rank, into)
        if self._out.write_backlog() or has_made_room:
            self.notify()

    def has_unread(self) -> bool:
        return self._in.has_unread()

    def find_loss(self) -> Loss | None:
        # Looked at in this order: who has closed has just ended, perhaps.
        has_ended = not self._process.state()
        if self._words[_STATE] & _CLOSED:
            fence()
            text = f"rank {self.rank} closed its connections"
            return Loss(self.rank, text, is_orderly=True)
        if has_ended:
            name = f"rank {self.rank}, process {self._process.pid},"
            return Loss(self.rank, f"{name} ended", is_orderly=False)
        return None

    def is_open(self) -> bool:
        return bool(self._words[_STATE] & _OPEN)


class SharedMemoryTransport:
    """The connections of one rank to neighbours on its host.

    Attributes:
        doorbell: This rank's.
        rounds: Those of the host's ranks.
    """

    def __init__(
        self, exchange: ExchangeBytes, ranks: Sequence[int], tree: Tree
    ) -> None:
        """Share memory among the ranks of a host; collective over them.

        Raises:
            CollectiveError: They cannot share memory; in the same words on all.
        """
        self._context = f"connecting on rank {tree.rank} of {tree.size}"
        own = ranks.index(tree.rank)
        encoded = exchange(PeerProcess.of(os.getpid()).encode())
        processes = [PeerProcess.decode(text) for text in encoded]
        segments = share_segments(exchange, own, _SEGMENT_BYTES, is_populated=False)
        pages = [segment.view[:_PAGE_BYTES].cast("Q") for segment in segments]
        doorbells = [
            Doorbell(
                page[: doorbell.NUM_BYTES // 8],
                segment.address,
                index=own,
                num_notifiers=len(ranks),
            )
            for page, segment in zip(pages, segments, strict=True)
        ]
        self.connections = self._connections = list[SharedMemoryConnection]()
        for rank in sorted(tree.local):
            other = ranks.index(rank)
            child = own if rank == tree.parent else other
            up, down = _rings(segments[child], pages[child])
            rings = (up, down) if child == own else (down, up)
            self._connections.append(
                SharedMemoryConnection(
                    rank, processes[other], rings, doorbells[other], pages[other]
                )
            )
        self.doorbell = doorbells[own]
        self.rounds = rounds.ExchangeRounds(segments, _ROUNDS_AT, own, doorbells)
        self._words = pages[own]

    def open(self) -> None:
        self._enter(_OPEN)

    def await_neighbours(self, timeout_s: float) -> None:
        """Wait until they have opened theirs.

        Raises:
            CollectiveError: One of them ended, or did not come in time.
        """
        waiter = Waiter(self.doorbell, NEAR)
        deadline = time.monotonic() + timeout_s
        while absent := [each for each in self._connections if not each.is_open()]:
            for each in absent:
                if (loss := each.find_loss()) and not each.is_open():
                    raise PeerLostError(
                        f"{self._context} needs every rank, but one is gone "
                        f"({loss.reason}). Its own error shows why."
                    )
            if time.monotonic() > deadline:
                ranks = [each.rank for each in absent[:8]]
                raise CollectiveError(
                    f"{self._context} must complete within timeout_s, got no answer "
                    f"for {timeout_s:g} s from ranks {ranks}. See which rank hangs."
                )
            waiter.wait(_LOOK_EVERY_S, is_eager=True)
            waiter.read()

    def close(self) -> None:
        """What is in the ring buffers stays there."""
        self._enter(_CLOSED)

    def _enter(self, state: int) -> None:
        self._words[_STATE] |= state
        for each in self._connections:
            each.notify()


def _rings(segment: Segment, words: memoryview) -> tuple[_RingBuffer, _RingBuffer]:
    """Return the ways up to the parent and down from it, in the child's segment."""
    starts = (_PAGE_BYTES, _UP), (_PAGE_BYTES + RING_BYTES, _DOWN)
    up, down = (
        _RingBuffer(
            words,
            first,
            first + _LINE,
            first + 2 * _LINE,
            segment.view[at : at + RING_BYTES],
        )
        for at, first in starts
    )
    return up, down
