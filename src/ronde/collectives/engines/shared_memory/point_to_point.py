"""Messages between two ranks, through slots of the sender's.

A message goes in pieces. The sender writes a piece and counts it in its word for the
receiver (``ControlBlock.sent``); the receiver reads it and counts it in its own word
for the sender (``ControlBlock.taken``). Two pieces fit, so writing and reading overlap.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ronde.collectives.engines.shared_memory.progress import (
    PendingWord,
    ProgressEngine,
    Transfer,
)
from ronde.collectives.engines.shared_memory.shared_state import ControlBlock, Segment
from ronde.collectives.engines.shared_memory.waiting import IS_WEAKLY_ORDERED, fence
from ronde.collectives.torch_modes import writing_to
from ronde.errors import CollectiveError

PIECE_BYTES = 256 << 10
_NUM_PIECES = 2
_HEAD_BYTES = 64  # before each piece: the message's tag, length and kind of elements
CHANNEL_BYTES = _NUM_PIECES * (_HEAD_BYTES + PIECE_BYTES)


class MessageHeader(NamedTuple):
    """What the ends of a message must agree on; ``kind`` is a number for its dtype."""

    tag: int
    num_bytes: int
    kind: int


class ChannelMemory(NamedTuple):
    """Where all channels are: ``start`` bytes into the segment of each sender."""

    blocks: Sequence[ControlBlock]
    segments: Sequence[Segment]
    start: int


class Channel:
    """The slots of one ordered pair of ranks, as one of the two sees them."""

    def __init__(self, memory: ChannelMemory, sender: int, receiver: int) -> None:
        blocks, segments, start = memory
        self.sender, self.receiver = sender, receiver
        self.sent_at = blocks[sender].sent + receiver
        self.taken_at = blocks[sender].taken + sender
        self._sent, self._taken = blocks[sender], blocks[receiver]
        self.turn: deque[Sending] = deque()  # messages to be sent, in order
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
        """Return the header of the message that the next piece belongs to."""
        if IS_WEAKLY_ORDERED:
            fence()
        head = self._heads[self.num_taken() % _NUM_PIECES]
        return MessageHeader(head[0], head[1], head[2])

    def take(self, data: Tensor) -> None:
        number = self.num_taken()
        data.copy_(self._pieces[number % _NUM_PIECES][: data.numel()])
        self._taken.publish(self.taken_at, number + 1)


class Message(Transfer):
    """One end of a message; its tensor, as bytes, is in use until it is over."""

    __slots__ = ("data", "header")

    def __init__(
        self, progress: ProgressEngine, name: str, tensor: Tensor, tag: int
    ) -> None:
        super().__init__(progress, name)
        self.data = tensor.view(torch.uint8)
        kind = zlib.crc32(str(tensor.dtype).encode())
        self.header = MessageHeader(tag, self.data.numel(), kind)


class Sending(Message):
    """A message to one rank."""

    __slots__ = ("_num_done", "_queue")

    def __init__(
        self, progress: ProgressEngine, queue: Channel, tensor: Tensor, tag: int
    ) -> None:
        super().__init__(progress, "send", tensor, tag)
        self._queue = queue
        self._num_done = 0

    def start(self) -> None:
        self._queue.turn.append(self)

    def advance(self) -> None:
        """Write what there is room for, when it is this message's turn."""
        queue = self._queue
        if self.is_over or queue.turn[0] is not self:
            return
        while queue.num_sent() - queue.num_taken() < _NUM_PIECES:
            piece = self.data[self._num_done : self._num_done + PIECE_BYTES]
            queue.put(self.header, piece)
            self._num_done += piece.numel()
            if self._num_done == self.header.num_bytes:
                self.is_over = True
                queue.turn.popleft()
                return

    def find_pending(self) -> PendingWord | None:
        """Return the receiver's word while there is no room."""
        queue = self._queue
        taken = queue.num_taken()
        if queue.num_sent() - taken < _NUM_PIECES:
            return None
        return PendingWord(queue.receiver, queue.taken_at, taken, taken + 1)


class Receiving(Message):
    """A message from one rank."""

    __slots__ = ("_queue",)

    def __init__(
        self, progress: ProgressEngine, queue: "ReceiveQueue", tensor: Tensor, tag: int
    ) -> None:
        super().__init__(progress, "recv", tensor, tag)
        self._queue = queue

    def start(self) -> None:
        self._queue.add(self)

    def accept(self, header: MessageHeader, data: Tensor) -> None:
        """Be over: ``data`` has all bytes of a message with this header."""
        if header != self.header:
            self.fail(
                CollectiveError(
                    f"recv must be given as many bytes of the same dtype as were sent, "
                    f"{header.num_bytes}, got a tensor of {self.header.num_bytes} for "
                    f"tag {header.tag} from rank {self._queue.sender}."
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
        """Return the sender's word while nothing has come."""
        queue = self._queue
        sent = queue.num_sent()
        if sent != queue.num_taken():
            return None
        return PendingWord(queue.sender, queue.sent_at, sent, sent + 1)


class ReceiveQueue(Channel):
    """Messages from one rank: they come in the order sent, and are received by tag."""

    # Whoever advances it reads for all that wait, in whatever inference mode they wait.

    def __init__(self, memory: ChannelMemory, sender: int, receiver: int) -> None:
        super().__init__(memory, sender, receiver)
        self._waiting: list[Receiving] = []
        self._kept: list[tuple[MessageHeader, Tensor]] = []
        self._header: MessageHeader | None = None
        self._data = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._num_done = 0

    def add(self, receiving: Receiving) -> None:
        """Hand over a message that has come already, or note who waits for it."""
        for index, (header, data) in enumerate(self._kept):
            if header.tag == receiving.header.tag:
                del self._kept[index]
                receiving.accept(header, data)
                return
        self._waiting.append(receiving)

    def offers(self, tag: int) -> bool:
        """Say whether a message has come that nobody waits for; reads all that came."""
        self.advance(reads_all=True)
        is_awaited = any(each.header.tag == tag for each in self._waiting)
        return not is_awaited and any(header.tag == tag for header, _ in self._kept)

    def advance(self, *, reads_all: bool = False) -> None:
        """Read pieces as long as somebody waits for a message and some are there."""
        self._waiting = [each for each in self._waiting if not each.is_over]
        while (self._waiting or reads_all) and self.num_sent() != self.num_taken():
            header = self._header
            if header is None:
                header = self._header = self.header()
                self._begin(header)
            piece = self._data[self._num_done : self._num_done + PIECE_BYTES]
            with writing_to((piece,)):
                self.take(piece)
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
        """Choose where a message goes: at once to whoever waits, if it fits there."""
        self._num_done = 0
        receiving = self._find(header)
        if receiving is not None and receiving.header == header:
            self._data = receiving.data
        else:
            self._data = torch.empty(header.num_bytes, dtype=torch.uint8, device="cpu")


class PointToPoint:
    """The channels between this rank and all others, opened when they are needed."""

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
        """Return a rank that has sent a message which nobody waits for yet."""
        with self._progress.lock:
            others = [
                r for r in range(len(self._memory.blocks)) if r != self._progress.rank
            ]
            return next((r for r in others if self._receive_queue(r).offers(tag)), None)

    def _receive_queue(self, source: int) -> ReceiveQueue:
        queue = self._receive_queues.get(source)
        if queue is None:
            queue = ReceiveQueue(self._memory, source, self._progress.rank)
            self._receive_queues[source] = queue
        return queue
