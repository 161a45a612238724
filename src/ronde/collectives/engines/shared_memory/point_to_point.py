"""Messages between two ranks, through slots in the sender's memory.

A message is sent in pieces. The sender writes a piece and increments its counter
for the receiver (``ControlBlock.sent``). The receiver reads the piece and increments
its counter for the sender (``ControlBlock.taken``). There is room for two pieces, so
writing and reading overlap.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ronde.collectives.engines.shared_memory.progress import (
    Message,
    MessageHeader,
    PendingWord,
    ProgressEngine,
)
from ronde.collectives.engines.shared_memory.shared_state import ControlBlock, Segment
from ronde.collectives.engines.shared_memory.waiting import IS_WEAKLY_ORDERED, fence
from ronde.collectives.torch_modes import writing_to
from ronde.errors import CollectiveError

PIECE_BYTES = 256 << 10
_NUM_PIECES = 2
_HEAD_BYTES = 64  # for the header before each piece
CHANNEL_BYTES = _NUM_PIECES * (_HEAD_BYTES + PIECE_BYTES)


class ChannelMemory(NamedTuple):
    """The memory of all channels, from byte ``start`` of each sender's segment."""

    blocks: Sequence[ControlBlock]
    segments: Sequence[Segment]
    start: int


class Channel:
    """The memory for messages from one rank to another."""

    def __init__(self, memory: ChannelMemory, sender: int, receiver: int) -> None:
        blocks, segments, start = memory
        self.sender, self.receiver = sender, receiver
        self.sent_at = blocks[sender].sent + receiver
        self.taken_at = blocks[sender].taken + sender
        self._sent, self._taken = blocks[sender], blocks[receiver]
        self.outgoing: deque[Sending] = deque()
        self._heads: list[memoryview] = []
        self._pieces: list[Tensor] = []
        segment = segments[sender]
        at = start + receiver * CHANNEL_BYTES
        for _ in range(_NUM_PIECES):
            self._heads.append(segment.view[at : at + _HEAD_BYTES].cast("q"))
            at += _HEAD_BYTES
            self._pieces.append(segment.tensor[at : at + PIECE_BYTES])
            at += PIECE_BYTES

    def num_sent(self) -> int:
        return self._sent.words[self.sent_at]

    def num_taken(self) -> int:
        return self._taken.words[self.taken_at]

    def put(self, header: MessageHeader, data: Tensor) -> None:
        if IS_WEAKLY_ORDERED:
            fence()
        number = self.num_sent()
        head = self._heads[number % _NUM_PIECES]
        head[0], head[1], head[2] = header
        self._pieces[number % _NUM_PIECES][: data.numel()].copy_(data)
        self._sent.publish(self.sent_at, number + 1)

    def header(self) -> MessageHeader:
        if IS_WEAKLY_ORDERED:
            fence()
        head = self._heads[self.num_taken() % _NUM_PIECES]
        return MessageHeader(head[0], head[1], head[2])

    def get(self, data: Tensor) -> None:
        number = self.num_taken()
        data.copy_(self._pieces[number % _NUM_PIECES][: data.numel()])
        self._taken.publish(self.taken_at, number + 1)


class Sending(Message):
    """A send in progress, which writes its pieces in the order of its queue."""

    __slots__ = ("_num_done", "_queue")

    def __init__(
        self, progress: ProgressEngine, queue: Channel, tensor: Tensor, tag: int
    ) -> None:
        super().__init__(progress, "send", tensor, tag)
        self._queue = queue
        self._num_done = 0

    def start(self) -> None:
        self._queue.outgoing.append(self)

    def advance(self) -> None:
        """Write pieces while there is room, if this message is first in its queue."""
        queue = self._queue
        if self.is_over or queue.outgoing[0] is not self:
            return
        while queue.num_sent() - queue.num_taken() < _NUM_PIECES:
            piece = self.data[self._num_done : self._num_done + PIECE_BYTES]
            queue.put(self.header, piece)
            self._num_done += piece.numel()
            if self._num_done == self.header.num_bytes:
                self.is_over = True
                queue.outgoing.popleft()
                return

    def find_pending(self) -> PendingWord | None:
        """Return the receiver's counter if this send waits for room, else None."""
        queue = self._queue
        taken = queue.num_taken()
        if queue.num_sent() - taken < _NUM_PIECES:
            return None
        return PendingWord(queue.receiver, queue.taken_at, taken, taken + 1)


class Receiving(Message):
    """A receive in progress, which ``ReceiveQueue`` matches with a message."""

    __slots__ = ("_queue",)

    def __init__(
        self, progress: ProgressEngine, queue: "ReceiveQueue", tensor: Tensor, tag: int
    ) -> None:
        super().__init__(progress, "recv", tensor, tag)
        self._queue = queue

    def start(self) -> None:
        self._queue.add(self)

    def accept(self, header: MessageHeader, data: Tensor) -> None:
        if header != self.header:
            self.fail(
                CollectiveError(
                    f"tensor of recv must have the dtype and the {header.num_bytes} "
                    f"bytes that were sent, got {self.header.num_bytes} bytes for tag "
                    f"{header.tag} from rank {self._queue.sender}."
                )
            )
            return
        if data is not self.data:
            with writing_to((self.data,)):
                self.data.copy_(data)
        self.is_over = True

    def advance(self) -> None:
        self._queue.advance()

    def find_pending(self) -> PendingWord | None:
        """Return the sender's counter if no unread piece has arrived, else None."""
        queue = self._queue
        sent = queue.num_sent()
        if sent != queue.num_taken():
            return None
        return PendingWord(queue.sender, queue.sent_at, sent, sent + 1)


class ReceiveQueue(Channel):
    """The messages from one rank, read in the order of sending, matched by tag."""

    # Any thread may advance the queue for all waiting receives, in any inference mode.

    def __init__(self, memory: ChannelMemory, sender: int, receiver: int) -> None:
        super().__init__(memory, sender, receiver)
        self._waiting: list[Receiving] = []
        self._kept: list[tuple[MessageHeader, Tensor]] = []
        self._header: MessageHeader | None = None
        self._data = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._num_done = 0

    def add(self, receiving: Receiving) -> None:
        """Match a receive with a message that has arrived, or queue the receive."""
        for index, (header, data) in enumerate(self._kept):
            if header.tag == receiving.header.tag:
                del self._kept[index]
                receiving.accept(header, data)
                return
        self._waiting.append(receiving)

    def has_unexpected(self, tag: int) -> bool:
        """Return True if a message with ``tag`` has arrived that no receive awaits."""
        self.advance(reads_all=True)
        is_awaited = any(each.header.tag == tag for each in self._waiting)
        return not is_awaited and any(header.tag == tag for header, _ in self._kept)

    def advance(self, *, reads_all: bool = False) -> None:
        """Read available pieces while a receive waits, or all if ``reads_all``."""
        self._waiting = [each for each in self._waiting if not each.is_over]
        while (self._waiting or reads_all) and self.num_sent() != self.num_taken():
            header = self._header
            if header is None:
                header = self._header = self.header()
                self._begin(header)
            piece = self._data[self._num_done : self._num_done + PIECE_BYTES]
            with writing_to((piece,)):
                self.get(piece)
            self._num_done += piece.numel()
            if self._num_done == header.num_bytes:
                self._header = None
                receiving = self._find(header)
                if receiving is None:
                    self._kept.append((header, self._data))
                else:
                    self._waiting.remove(receiving)
                    receiving.accept(header, self._data)

    def _find(self, header: MessageHeader) -> Receiving | None:
        return next((r for r in self._waiting if r.header.tag == header.tag), None)

    def _begin(self, header: MessageHeader) -> None:
        """Choose the target: a waiting receive's tensor if it fits, or new memory."""
        self._num_done = 0
        receiving = self._find(header)
        if receiving is not None and receiving.header == header:
            self._data = receiving.data
        else:
            self._data = torch.empty(header.num_bytes, dtype=torch.uint8, device="cpu")


class PointToPoint:
    """The channels between this rank and all others, opened at first use."""

    def __init__(self, progress: ProgressEngine, memory: ChannelMemory) -> None:
        self._progress = progress
        self._memory = memory
        self._send_queues: dict[int, Channel] = {}
        self._receive_queues: dict[int, ReceiveQueue] = {}

    def send(self, tensor: Tensor, to: int, tag: int) -> Sending:
        queue = self._send_queues.get(to)
        if queue is None:
            queue = Channel(self._memory, self._progress.rank, to)
            self._send_queues[to] = queue
        sending = Sending(self._progress, queue, tensor, tag)
        self._progress.deliver(sending)
        return sending

    def recv(self, tensor: Tensor, source: int, tag: int) -> Receiving:
        queue = self._receive_queue(source)
        receiving = Receiving(self._progress, queue, tensor, tag)
        self._progress.deliver(receiving)
        return receiving

    def find_sender(self, tag: int) -> int | None:
        with self._progress.lock:
            others = [
                r for r in range(len(self._memory.blocks)) if r != self._progress.rank
            ]
            return next(
                (r for r in others if self._receive_queue(r).has_unexpected(tag)), None
            )

    def _receive_queue(self, source: int) -> ReceiveQueue:
        queue = self._receive_queues.get(source)
        if queue is None:
            queue = ReceiveQueue(self._memory, source, self._progress.rank)
            self._receive_queues[source] = queue
        return queue
