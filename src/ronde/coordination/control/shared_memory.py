"""Links within a host, through memory that its ranks map.

Every rank has a segment with its bell. A rank that reports to another on its host has
two rings there as well, one for each direction.
"""

import os
import time
from collections.abc import Sequence

from ronde.collectives.engines.shared_memory.peers import PeerProcess
from ronde.collectives.engines.shared_memory.segment import (
    ExchangeBytes,
    Segment,
    share_segments,
)
from ronde.collectives.engines.shared_memory.waiting import fence
from ronde.coordination.control import bell, rounds
from ronde.coordination.control.bell import NEAR, Bell, Ears
from ronde.coordination.control.channel import Loss
from ronde.coordination.control.link import Link, Medium
from ronde.coordination.control.ring import Incoming, Outgoing, Shared
from ronde.coordination.tree import Tree
from ronde.errors import CollectiveError, PeerLostError

RING_BYTES = 1 << 16
_HEADER_BYTES = 4096
_ROUNDS_AT = _HEADER_BYTES + 2 * RING_BYTES
_SEGMENT_BYTES = _ROUNDS_AT + rounds.NUM_BYTES
_LINE = 8
"""Words in a cache line."""
_STATE = bell.NUM_BYTES // 8
_OPEN, _CLOSED = 1, 2
"""Bits of the state: a rank that fails to connect is closed and was never open."""
_UP = _STATE + _LINE
_DOWN = _UP + 3 * _LINE
_LOOK_EVERY_S = 0.25


class RingLink(Link):
    """Two rings of bytes, one for each direction, and the neighbour's bell."""

    def __init__(
        self,
        rank: int,
        process: PeerProcess,
        rings: tuple[Shared, Shared],
        bell: Bell,
        words: memoryview,
    ) -> None:
        self.rank = rank
        self._process = process
        self._out, self._in = Outgoing(rings[0]), Incoming(rings[1])
        self._bell = bell
        self._words = words

    def send(self, message: bytes) -> None:
        """Write into the ring: see ``Link``."""
        if self._out.put(message):
            self._bell.ring()

    def receive(self, into: list[tuple[int, bytes]]) -> None:
        """Empty the ring: see ``Link``."""
        has_news = self._in.take(self.rank, into)
        if self._out.write_backlog() or has_news:
            self._bell.ring()

    def has_unread(self) -> bool:
        """Say whether bytes are in the ring: see ``Link``."""
        return self._in.has_unread()

    def find_loss(self) -> Loss | None:
        """Look whether it closed or its process ended: see ``Link``."""
        # Looked at in this order: who has closed has just ended, perhaps.
        has_ended = not self._process.state()
        if self._words[_STATE] & _CLOSED:
            fence()
            return Loss(self.rank, f"rank {self.rank} said goodbye", is_orderly=True)
        if has_ended:
            name = f"rank {self.rank}, process {self._process.pid},"
            return Loss(self.rank, f"{name} ended", is_orderly=False)
        return None

    def is_open(self) -> bool:
        """Say whether the neighbour is connected, or has been."""
        return bool(self._words[_STATE] & _OPEN)

    def ring(self) -> None:
        """Have the neighbour look."""
        self._bell.ring()


class SharedMemoryMedium(Medium):
    """The links of one rank to neighbours on its host.

    Attributes:
        bell: This rank's.
        rounds: Those of the host's ranks.
    """

    def __init__(
        self, exchange: ExchangeBytes, ranks: Sequence[int], tree: Tree
    ) -> None:
        """Share memory among the ranks of a host; collective over them.

        Args:
            exchange: Tells these ranks some bytes.
            ranks: Them.
            tree: This rank's neighbours, there and elsewhere.

        Raises:
            CollectiveError: They cannot share memory; in the same words on all.
        """
        self._scene = f"connecting on rank {tree.rank} of {tree.size}"
        own = ranks.index(tree.rank)
        told = exchange(PeerProcess.of(os.getpid()).encode())
        processes = [PeerProcess.decode(text) for text in told]
        segments = share_segments(exchange, own, _SEGMENT_BYTES, is_populated=False)
        bells = [_bell(segment, own, len(ranks)) for segment in segments]
        links: list[RingLink] = []
        for rank in sorted(tree.local):
            other = ranks.index(rank)
            is_parent = rank == tree.parent
            up, down = _rings(segments[own if is_parent else other])
            rings = (up, down) if is_parent else (down, up)
            words = _words(segments[other])
            links.append(RingLink(rank, processes[other], rings, bells[other], words))
        self.bell = bells[own]
        self.rounds = rounds.Rounds(segments, _ROUNDS_AT, own, bells)
        self._words = _words(segments[own])
        self.links = self._links = links

    def open(self) -> None:
        """Tell the neighbours that this rank is connected."""
        self._enter(_OPEN)

    def await_neighbours(self, timeout_s: float) -> None:
        """Wait until they have opened theirs.

        Raises:
            CollectiveError: One of them ended, or did not come in time.
        """
        ears = Ears(self.bell, NEAR)
        deadline = time.monotonic() + timeout_s
        while absent := [link for link in self._links if not link.is_open()]:
            for link in absent:
                if (loss := link.find_loss()) and not link.is_open():
                    raise PeerLostError(
                        f"{self._scene} needs every rank, but one is gone "
                        f"({loss.reason}). Its own error says why."
                    )
            if time.monotonic() > deadline:
                ranks = [link.rank for link in absent[:8]]
                raise CollectiveError(
                    f"{self._scene} must complete within timeout_s, got no answer for "
                    f"{timeout_s:g} s from ranks {ranks}. See which rank hangs."
                )
            ears.wait(_LOOK_EVERY_S, is_eager=True)
            ears.hear()

    def close(self) -> None:
        """Tell the neighbours: see ``Medium``. What is in the rings stays there."""
        self._enter(_CLOSED)

    def _enter(self, state: int) -> None:
        self._words[_STATE] |= state
        for link in self._links:
            link.ring()


def _bell(segment: Segment, ringer: int, num_ringers: int) -> Bell:
    words = segment.view[: bell.NUM_BYTES].cast("Q")
    return Bell(words, segment.address, ringer=ringer, num_ringers=num_ringers)


def _words(segment: Segment) -> memoryview:
    return segment.view[:_HEADER_BYTES].cast("Q")


def _rings(segment: Segment) -> tuple[Shared, Shared]:
    """Return the ways up to the parent and down from it, in the child's segment."""
    words = _words(segment)
    begin = _HEADER_BYTES
    up = segment.view[begin : begin + RING_BYTES]
    down = segment.view[begin + RING_BYTES : begin + 2 * RING_BYTES]
    return _ring(words, _UP, up), _ring(words, _DOWN, down)


def _ring(words: memoryview, first: int, data: memoryview) -> Shared:
    return Shared(words, first, first + _LINE, first + 2 * _LINE, data)
