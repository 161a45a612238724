"""Links within a host, through memory that its ranks map.

Every rank has a segment with its bell. A rank that reports to another on its host has
two rings there as well, one for each direction.
"""

import os
from collections.abc import Iterable

from ronde.collectives.engines.shared_memory.peers import Peers, Process
from ronde.collectives.engines.shared_memory.segment import (
    Exchange,
    Segment,
    share_segments,
)
from ronde.collectives.engines.shared_memory.words import fence
from ronde.coordination.control import bell
from ronde.coordination.control.bell import Bell
from ronde.coordination.control.channel import Loss
from ronde.coordination.control.link import Link, Medium
from ronde.coordination.control.ring import Incoming, Outgoing, Shared

RING_BYTES = 1 << 16
_HEADER_BYTES = 4096
_SEGMENT_BYTES = _HEADER_BYTES + 2 * RING_BYTES
_LINE = 8
"""Words in a cache line."""
_IS_CLOSED = bell.NUM_BYTES // 8
_UP = _IS_CLOSED + _LINE
_DOWN = _UP + 3 * _LINE


class RingLink(Link):
    """Two rings of bytes, one for each direction, and the neighbour's bell."""

    def __init__(
        self,
        rank: int,
        process: Process,
        rings: tuple[Outgoing, Incoming],
        *,
        bell: Bell,
        words: memoryview,
    ) -> None:
        self.rank = rank
        self._process = process
        self._out, self._in = rings
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
        if self._words[_IS_CLOSED]:
            fence()
            return Loss(self.rank, f"rank {self.rank} said goodbye", is_orderly=True)
        if has_ended:
            name = f"rank {self.rank}, process {self._process.pid},"
            return Loss(self.rank, f"{name} ended", is_orderly=False)
        return None

    def ring(self) -> None:
        """Have the neighbour look."""
        self._bell.ring()


class SharedMemoryMedium(Medium):
    """The links of one rank to neighbours on its host.

    Attributes:
        bell: This rank's.
        is_crowded: Whether the host's ranks have fewer cores than they are.
    """

    def __init__(
        self,
        exchange: Exchange,
        index: int,
        ranks: tuple[int, ...],
        *,
        parent: int | None,
        children: Iterable[int],
    ) -> None:
        """Share memory among the ranks of a host; collective over them.

        Args:
            exchange: Tells these ranks some bytes.
            index: This process among them.
            ranks: Them.
            parent: To which of them this rank reports, if to any.
            children: Which of them report to it.

        Raises:
            CollectiveError: They cannot share memory; in the same words on all.
        """
        told = exchange(Process.of(os.getpid()).encode())
        processes = [Process.decode(text) for text in told]
        segments = share_segments(exchange, index, _SEGMENT_BYTES, is_populated=False)
        num_ringers = len(ranks)

        def bell_of(segment: Segment) -> Bell:
            words = segment.view[: bell.NUM_BYTES].cast("Q")
            return Bell(words, segment.address, ringer=index, num_ringers=num_ringers)

        def link_to(rank: int, *, is_up: bool) -> RingLink:
            other = ranks.index(rank)
            up, down = _rings(segments[index if is_up else other])
            out, into = (up, down) if is_up else (down, up)
            return RingLink(
                rank,
                processes[other],
                (Outgoing(out), Incoming(into)),
                bell=bell_of(segments[other]),
                words=_words(segments[other]),
            )

        self.is_crowded = Peers(processes).is_crowded
        self.bell = bell_of(segments[index])
        self._words = _words(segments[index])
        links = [link_to(child, is_up=False) for child in children]
        if parent is not None:
            links.append(link_to(parent, is_up=True))
        self.links = self._links = links

    def close(self) -> None:
        """Tell the neighbours: see ``Medium``. What is in the rings stays there."""
        self._words[_IS_CLOSED] = True
        for link in self._links:
            link.ring()


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
