"""Connections within a host, and exchange rounds, through memory that its ranks map.

Every rank has a segment with its doorbell, two ring buffers to and from the rank on its
host that it reports to, and a place for the rounds.

A message is its length in eight bytes, then itself. Sender and receiver count the bytes
that they have written and taken since the beginning. Each word has one writer: see Note
[Memory order] in ``waiting``.

Note [One exchange]
    In a round all ranks of a host show each other a tag and a few bytes, at once.

    Every rank takes part in every round, once, and cannot take that back: so what comes
    of a round is the same on all ranks. The tags and bytes of a round lie apart from
    those of the next, and nobody takes part in a round before the one before it is
    complete: so they stay until all ranks have come to the next round but one, that is,
    have read them.

    A rank takes part (a store), then looks who has (loads); the last one so sees all,
    and wakes those who sleep. A sleeper marks that it sleeps, then looks once more,
    then sleeps on a word that its waker changes before it wakes. Several may find that
    they were last, and all store the same number.
"""

import os
import sys
import time
from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

from ronde.collectives.engines.shared_memory.shared_state import (
    ExchangeBytes,
    Segment,
    share_segments,
)
from ronde.collectives.engines.shared_memory.waiting import (
    CONTENTION,
    IS_WEAKLY_ORDERED,
    PeerProcess,
    fence,
    sleep_while,
    wake_all,
)
from ronde.coordination.control.doorbell import DOORBELL_BYTES, NEAR, Doorbell, Waiter
from ronde.coordination.messages import Loss, Tree
from ronde.errors import CollectiveError, PeerLostError

RING_BYTES = 1 << 16
_PAGE_BYTES = 4096
ROUND_BYTES = 4096  # what a rank can show in a round
_ROUNDS_AT = _PAGE_BYTES + 2 * RING_BYTES
_SEGMENT_BYTES = _ROUNDS_AT + _PAGE_BYTES + 2 * ROUND_BYTES
_LINE = 8  # words in a cache line
_STATE = DOORBELL_BYTES // 8
_OPEN, _CLOSED = 1, 2
"""Bits of the state: a rank that fails to connect is closed and was never open."""
_UP = _STATE + _LINE
_DOWN = _UP + 3 * _LINE
_LOOK_EVERY_S = 0.25
_LENGTH_BYTES = 8

REFUSED = 0  # the tag of a rank that has nothing to show
_NUMBER, _TAGS, _SLEEP_STATE, _WAKE = 0, 1, _LINE, 2 * _LINE
_AWAKE, _ASLEEP, _ASKING = 0, 1, 2
_FIRST_NAP_S = 0.001


_Ring = tuple[memoryview, int, memoryview]
"""The memory of a ring buffer: words of eight bytes, the place there of the first of
three counts (each in a cache line of its own), and the ring, a power of two long.

The counts are bytes written, the sender's; bytes taken, the receiver's; and whether the
sender waits for room, the sender's.
"""


class _Sender:
    """The end that writes into a ring buffer; what does not fit yet is kept."""

    def __init__(self, ring: _Ring) -> None:
        self._words, self._written_at, self._data = ring
        self._taken_at = self._written_at + _LINE
        self._is_full_at = self._written_at + 2 * _LINE
        self._written = 0
        self._kept = bytearray()

    def put(self, message: bytes) -> bool:
        self._kept += len(message).to_bytes(_LENGTH_BYTES, sys.byteorder) + message
        return self.write()

    def write(self) -> bool:
        """Write what is kept as far as it fits; return whether some was written."""
        kept, end, before = self._kept, len(self._data), self._written
        if not kept:
            return False
        while kept and (room := self._room()):
            at = self._written & (end - 1)
            size = min(len(kept), room, end - at)
            self._data[at : at + size] = kept[:size]
            del kept[:size]
            if IS_WEAKLY_ORDERED:
                fence()
            self._written += size
            self._words[self._written_at] = self._written
        self._words[self._is_full_at] = bool(kept)
        return self._written != before

    def _room(self) -> int:
        """Where there is none, have the receiver notify when it has made some."""
        limit = len(self._data) - self._written
        room = self._words[self._taken_at] + limit
        if not room:
            self._words[self._is_full_at] = True
            fence()
            room = self._words[self._taken_at] + limit
        return room


class _Receiver:
    """The end that takes from a ring buffer."""

    def __init__(self, ring: _Ring) -> None:
        self._words, self._written_at, self._data = ring
        self._taken_at = self._written_at + _LINE
        self._is_full_at = self._written_at + 2 * _LINE
        self._taken = 0
        self._part = bytearray()

    def has_unread(self) -> bool:
        return self._words[self._written_at] != self._taken

    def take(self, sender: int, into: list[tuple[int, bytes]]) -> bool:
        """Append whole messages; return whether the sender waits for the room made."""
        written = self._words[self._written_at]
        if written == self._taken:
            return False
        if IS_WEAKLY_ORDERED:
            fence()
        part, num_bytes = self._part, written - self._taken
        at = self._taken & (len(self._data) - 1)
        begin = self._data[at : at + num_bytes]
        part += begin
        part += self._data[: num_bytes - len(begin)]
        self._words[self._taken_at] = self._taken = written
        fence()
        start = 0
        while len(part) >= (at := start + _LENGTH_BYTES):
            stop = at + int.from_bytes(part[start:at], sys.byteorder)
            if stop > len(part):
                break
            into.append((sender, bytes(part[at:stop])))
            start = stop
        del part[:start]
        return bool(self._words[self._is_full_at])


class SharedMemoryConnection:
    """Two ring buffers, and the neighbour's doorbell."""

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
        self._out, self._in = _Sender(rings[0]), _Receiver(rings[1])
        self._words = words
        self.notify = doorbell.notify

    def send(self, message: bytes) -> None:
        if self._out.put(message):
            self.notify()

    def receive(self, into: list[tuple[int, bytes]]) -> None:
        has_made_room = self._in.take(self.rank, into)
        if self._out.write() or has_made_room:
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


class ExchangeRounds:
    """One rank's part in the rounds; one thread at a time, save where noted."""

    def __init__(
        self, segments: Sequence[Segment], own: int, doorbells: Sequence[Doorbell]
    ) -> None:
        """Begin with all ranks' memory, zeros, and doorbells; ``own`` is this one's."""
        start = _ROUNDS_AT
        words = [s.view[start : start + _PAGE_BYTES].cast("Q") for s in segments]
        addresses = [s.address + start + 8 * _WAKE for s in segments]
        CONTENTION.expect(len(segments))
        self.number = 0  # the last round that this rank took part in; the first is 1
        self.has_waiter = False  # a thread is in ``wait``
        self._own, self._address = words[own], addresses[own]
        self._others = list(zip(words, addresses, doorbells, strict=True))
        del self._others[own]
        self._other_words = [each for each, _, _ in self._others]
        self._segments = [segment.tensor for segment in segments]
        self._start = start + _PAGE_BYTES

    def views(self, dtype: torch.dtype, numel: int) -> list[list[Tensor]]:
        """Return all ranks' bytes as tensors: of even rounds, and of odd ones."""
        num_bytes = numel * dtype.itemsize
        # They outlive the call, and what that was made in.
        with torch.inference_mode(mode=False):
            return [
                [each[at : at + num_bytes].view(dtype) for each in self._segments]
                for at in (self._start, self._start + ROUND_BYTES)
            ]

    def take_part(self, tag: int) -> None:
        """Come to the next round, all bytes being there; the last must be complete."""
        number = self.number = self.number + 1
        own = self._own
        own[_TAGS + (number & 1)] = tag
        if IS_WEAKLY_ORDERED:
            fence()
        own[_NUMBER] = number
        fence()
        if self.is_complete(number):
            for words, address, doorbell in self._others:
                state = words[_SLEEP_STATE]
                if state == _ASLEEP:
                    words[_WAKE] = number
                    wake_all(address)
                elif state == _ASKING:
                    doorbell.notify()

    def is_complete(self, number: int) -> bool:
        """Return whether all have come to a round that this one came to; any thread."""
        for words in self._other_words:
            if words[_NUMBER] < number:
                return False
        if IS_WEAKLY_ORDERED:
            fence()
        return True

    def is_unanimous(self) -> bool:
        """Return whether all gave the same tag, and none refused, once complete."""
        place = _TAGS + (self.number & 1)
        tag = self._own[place]
        for words in self._other_words:
            if words[place] != tag:
                return False
        return tag != REFUSED

    def is_awaited(self) -> bool:
        return any(words[_NUMBER] > self.number for words in self._other_words)

    def is_asked(self) -> bool:
        """Return whether one of them wants an answer now."""
        return any(
            words[_SLEEP_STATE] == _ASKING and words[_NUMBER] > self.number
            for words in self._other_words
        )

    def wait(self, timeout_s: float) -> None:
        """Return when the round is complete, or will not be by itself.

        That is: it took too long, or another rank sleeps in an ordinary wait. The
        thread that took part may wait while others call ``is_complete``.
        """
        number, is_complete, pause = self.number, self.is_complete, CONTENTION.pause
        for _ in repeat(None, CONTENTION.num_looks(NEAR)):
            if is_complete(number):
                return
            if not pause():
                break
        own = self._own
        try:
            self.has_waiter = True
            own[_SLEEP_STATE] = _ASLEEP
            fence()
            self._sleep(number, time.monotonic() + timeout_s)
        finally:
            own[_SLEEP_STATE] = _AWAKE
            self.has_waiter = False

    def request_answers(self) -> None:
        """Have those answer who did not come, and the last one notify this rank."""
        self._own[_SLEEP_STATE] = _ASKING
        fence()
        for words, _, doorbell in self._others:
            if words[_NUMBER] < self.number:
                doorbell.notify()

    def rest(self) -> None:
        """End a round that is complete; wakes a thread of this rank that waits."""
        self._own[_SLEEP_STATE] = _AWAKE  # so that nobody else may wake it any more
        if self.has_waiter:
            self._own[_WAKE] = self.number
            wake_all(self._address)

    def _sleep(self, number: int, deadline: float) -> None:
        nap_s = _FIRST_NAP_S
        while True:
            value = self._own[_WAKE]
            if self.is_complete(number):
                return
            sleep_while(self._address, value & 0xFFFFFFFF, nap_s)
            if self.is_complete(number) or time.monotonic() >= deadline:
                return
            if any(
                words[_NUMBER] < number and doorbell.has_sleeper()
                for words, _, doorbell in self._others
            ):
                return
            nap_s *= 2


class SharedMemoryTransport:
    """The connections of one rank to neighbours on its host, and all ranks' rounds."""

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
        doorbells: list[Doorbell] = []
        for page, segment in zip(pages, segments, strict=True):
            words, address = page[: DOORBELL_BYTES // 8], segment.address
            bell = Doorbell(words, address, index=own, num_notifiers=len(ranks))
            doorbells.append(bell)
        self.connections = list[SharedMemoryConnection]()
        for rank in sorted(tree.local):
            other = ranks.index(rank)
            child = own if rank == tree.parent else other
            page, view = pages[child], segments[child].view
            up = page, _UP, view[_PAGE_BYTES : _PAGE_BYTES + RING_BYTES]
            down = page, _DOWN, view[_PAGE_BYTES + RING_BYTES : _ROUNDS_AT]
            rings = (up, down) if child == own else (down, up)
            ends = processes[other], rings, doorbells[other], pages[other]
            self.connections.append(SharedMemoryConnection(rank, *ends))
        self.doorbell = doorbells[own]
        self.rounds = ExchangeRounds(segments, own, doorbells)
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
        while absent := [each for each in self.connections if not each.is_open()]:
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
        for each in self.connections:
            each.notify()
