"""Connections within a host, through memory that its ranks map.

Every rank has a segment with its doorbell, two ring buffers to and from its parent on
the host, and memory for the rounds of ``fast_path``.

A message is sent as its length in eight bytes, then its bytes. The sender counts all
bytes that it has written, the receiver all bytes that it has read. Each word has one
writer: see Note [Memory order] in ``waiting``.
"""

import sys
import time
from collections.abc import Sequence

from ronde.collectives.engines.shared_memory.shared_state import (
    ExchangeBytes,
    segment_files,
    share_segments,
)
from ronde.collectives.engines.shared_memory.waiting import (
    CONTENTION,
    IS_WEAKLY_ORDERED,
    PeerProcess,
    fence,
)
from ronde.collectives.scope import AbortScope
from ronde.coordination.control.doorbell import DOORBELL_BYTES, NEAR, Doorbell, Waiter
from ronde.coordination.messages import Loss, Tree
from ronde.errors import CollectiveError, PeerLostError

PAGE_BYTES = 4096
ROUND_BYTES = 4096  # the limit of an operation on the fast path
_RING_BYTES = 1 << 16
ROUNDS_AT = PAGE_BYTES + 2 * _RING_BYTES
_SEGMENT_BYTES = ROUNDS_AT + PAGE_BYTES + 2 * ROUND_BYTES
LINE = 8  # words in a cache line
_STATE = DOORBELL_BYTES // 8
_OPEN, _CLOSED = 1, 2
"""Bits of the state. A rank that fails to connect is closed and was never open."""
_UP = _STATE + LINE
_DOWN = _UP + 3 * LINE
_CHECK_EVERY_S = 0.25
_LENGTH_BYTES = 8
_WRITTEN, _TAKEN, _IS_FULL = 0, LINE, 2 * LINE

_Ring = tuple[memoryview, memoryview]
"""Counts and data of a ring buffer; the data's size is a power of two. The counts are
the bytes written, the bytes read, and the sender's flag that it waits for room.
"""


class SharedMemoryConnection:
    """A connection to a neighbour: two ring buffers and the neighbour's doorbell."""

    def __init__(
        self,
        rank: int,
        process: PeerProcess,
        rings: tuple[_Ring, _Ring],
        doorbell: Doorbell,
        words: memoryview,
    ) -> None:
        self.rank = rank
        self._process = process
        (self._out, self._out_data), (self._in, self._in_data) = rings
        self._written = self._taken = 0
        self._kept, self._part = bytearray(), bytearray()
        self._words = words
        self.notify = doorbell.notify

    def send(self, message: bytes) -> None:
        length = len(message).to_bytes(_LENGTH_BYTES, sys.byteorder)
        self._kept += length + message
        if self._write():
            self.notify()

    def receive(self, into: list[tuple[int, bytes]]) -> None:
        has_made_room = self._read(into)
        if self._write() or has_made_room:
            self.notify()

    def has_unread(self) -> bool:
        return self._in[_WRITTEN] != self._taken

    def _write(self) -> bool:
        """Write the pending bytes that fit; return True if any were written."""
        kept, data, before = self._kept, self._out_data, self._written
        if not kept:
            return False
        while kept and (room := self._room()):
            at = self._written & (len(data) - 1)
            size = min(len(kept), room, len(data) - at)
            data[at : at + size] = kept[:size]
            del kept[:size]
            if IS_WEAKLY_ORDERED:
                fence()
            self._written += size
            self._out[_WRITTEN] = self._written
        self._out[_IS_FULL] = bool(kept)
        return self._written != before

    def _room(self) -> int:
        """Return the number of free bytes; if 0, make the receiver notify this rank."""
        limit = len(self._out_data) - self._written
        room = self._out[_TAKEN] + limit
        if not room:
            self._out[_IS_FULL] = True
            fence()
            room = self._out[_TAKEN] + limit
        return room

    def _read(self, into: list[tuple[int, bytes]]) -> bool:
        """Append whole messages to ``into``; return True if the sender needs room."""
        written = self._in[_WRITTEN]
        if written == self._taken:
            return False
        if IS_WEAKLY_ORDERED:
            fence()
        part, num_bytes = self._part, written - self._taken
        at = self._taken & (len(self._in_data) - 1)
        begin = self._in_data[at : at + num_bytes]
        part += begin
        part += self._in_data[: num_bytes - len(begin)]
        self._in[_TAKEN] = self._taken = written
        fence()
        start = 0
        while len(part) >= (at := start + _LENGTH_BYTES):
            stop = at + int.from_bytes(part[start:at], sys.byteorder)
            if stop > len(part):
                break
            into.append((self.rank, bytes(part[at:stop])))
            start = stop
        del part[:start]
        return bool(self._in[_IS_FULL])

    def find_loss(self) -> Loss | None:
        # In this order, as a process may close and end in between.
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
    """The connections of one rank to neighbours on its host."""

    def __init__(
        self, exchange: ExchangeBytes, ranks: Sequence[int], tree: Tree
    ) -> None:
        """Share memory among the ranks of a host; collective over them.

        Raises:
            NoSharedMemoryError: The ranks cannot share memory.
        """
        self._context = f"connecting on rank {tree.rank} of {tree.size}"
        self.own = own = ranks.index(tree.rank)
        with segment_files(exchange, own) as files:
            processes = [each.process for each in files]
            self.segments = share_segments(
                exchange, own, files, _SEGMENT_BYTES, is_populated=False
            )
        CONTENTION.expect(len(ranks))
        pages = [segment.view[:PAGE_BYTES].cast("Q") for segment in self.segments]
        self.doorbells = [
            Doorbell(page, segment.address, index=own, num_notifiers=len(ranks))
            for page, segment in zip(pages, self.segments, strict=True)
        ]
        self.doorbell = self.doorbells[own]
        self._words = pages[own]
        self.connections = list[SharedMemoryConnection]()
        for rank in tree.neighbours(ranks):
            other = ranks.index(rank)
            child = own if rank == tree.parent else other
            page, view = pages[child], self.segments[child].view
            middle = PAGE_BYTES + _RING_BYTES
            up = page[_UP:], view[PAGE_BYTES:middle]
            down = page[_DOWN:], view[middle:ROUNDS_AT]
            rings = (up, down) if child == own else (down, up)
            ends = processes[other], rings, self.doorbells[other], pages[other]
            self.connections.append(SharedMemoryConnection(rank, *ends))

    def open(self) -> None:
        self._enter(_OPEN)

    def await_neighbours(self, timeout_s: float, scope: AbortScope) -> None:
        """Wait until all neighbours have connected; raise if one does not."""
        waiter = Waiter(self.doorbell, NEAR)
        deadline = time.monotonic() + timeout_s
        scope.add(waiter.wake)
        while absent := [each for each in self.connections if not each.is_open()]:
            for each in absent:
                if (loss := each.find_loss()) and not each.is_open():
                    raise PeerLostError(
                        f"{self._context} failed because another rank was lost "
                        f"({loss.reason}). See that rank's own error."
                    )
            if time.monotonic() > deadline:
                ranks = [each.rank for each in absent[:8]]
                raise CollectiveError(
                    f"{self._context} timed out after {timeout_s:g} s without an "
                    f"answer from ranks {ranks}. Find the rank that hangs."
                )
            waiter.wait(_CHECK_EVERY_S, is_eager=True)
            scope.check()
            waiter.read()

    def close(self) -> None:
        # Messages in the ring buffers stay there for the neighbours.
        self._enter(_CLOSED)

    def _enter(self, state: int) -> None:
        self._words[_STATE] |= state
        for each in self.connections:
            each.notify()
