"""Messages between two ranks, through slots of the sender's.

A message goes in pieces. The sender writes a piece and counts it in its word for the
receiver (``ControlBlock.sent``); the receiver reads it and counts it in its own word
for the sender (``ControlBlock.taken``). Two pieces fit, so writing and reading overlap.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ronde.collectives.engines.shared_memory.progress import (
    PendingWord,
    ProgressEngine,
    Transfer,
)
from ronde.collectives.engines.shared_memory.segment import Segment
from ronde.collectives.engines.shared_memory.shared_state import ControlBlock
from ronde.collectives.engines.shared_memory.waiting import IS_WEAKLY_ORDERED, fence
from ronde.collectives.torch_modes import writing_to
from ronde.errors import CollectiveError

PIECE_BYTES = 256 << 10
_NUM_PIECES = 2
_HEAD_BYTES = 64
"""Before each piece: the message's tag, length and kind of elements."""
CHANNEL_BYTES = _NUM_PIECES * (_HEAD_BYTES + PIECE_BYTES)


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """What a message says of itself.

    Attributes:
        tag: As given.
        num_bytes: Its length.
        kind: A number for its dtype.
    """

    tag: int
    num_bytes: int
    kind: int


class Channel:
    """The slots of one ordered pair of ranks, as one of the two sees them."""

    def __init__(
        self,
        blocks: Sequence[ControlBlock],
        segments: Sequence[Segment],
        start: int,
        *,
        sender: int,
        receiver: int,
    ) -> None:
        """Look at the pair's part of the sender's segment.

        Args:
            blocks: All ranks' words.
            segments: All ranks' memory.
            start: Where channels begin in every segment, in bytes.
            sender: Who writes.
            receiver: Who reads.
        """
        self.sender, self.receiver = sender, receiver
        self.sent_at = blocks[sender].sent + receiver
        self.taken_at = blocks[sender].taken + sender
        self._sent, self._taken = blocks[sender], blocks[receiver]
        first = start + receiver * CHANNEL_BYTES
        segment = segments[sender]
        self._heads: list[memoryview] = []
        self._pieces: list[Tensor] = []
        for index in range(_NUM_PIECES):
            at = first + index * (_HEAD_BYTES + PIECE_BYTES)
            self._heads.append(segment.view[at : at + _HEAD_BYTES].cast("q"))
            at += _HEAD_BYTES
            self._pieces.append(segment.tensor[at : at + PIECE_BYTES])

    def num_sent(self) -> int:
        """Return how many pieces were written."""
        return self._sent.words[self.sent_at]

    def num_taken(self) -> int:
        """Return how many pieces were read."""
        return self._taken.words[self.taken_at]

    def is_full(self) -> bool:
        """Say whether the sender has to wait."""
        return self.num_sent() - self.num_taken() >= _NUM_PIECES

    def is_empty(self) -> bool:
        """Say whether the receiver has to wait."""
        return self.num_sent() == self.num_taken()

    def put(self, header: MessageHeader, data: Tensor) -> None:
        """Write a piece."""
        if IS_WEAKLY_ORDERED:
            fence()
        number = self.num_sent()
        head = self._heads[number % _NUM_PIECES]
        head[0], head[1], head[2] = header.tag, header.num_bytes, header.kind
        self._pieces[number % _NUM_PIECES][: data.numel()].copy_(data)
        self._sent.publish(self.sent_at, number + 1)

    def header(self) -> MessageHeader:
        """Return what the message says of itself that the next piece belongs to."""
        if IS_WEAKLY_ORDERED:
            fence()
        head = self._heads[self.num_taken() % _NUM_PIECES]
        return MessageHeader(head[0], head[1], head[2])

    def take(self, data: Tensor) -> None:
        """Read a piece."""
        number = self.num_taken()
        data.copy_(self._pieces[number % _NUM_PIECES][: data.numel()])
        self._taken.publish(self.taken_at, number + 1)


class Sending(Transfer):
    """A message to one rank; over when its tensor may be changed."""

    __slots__ = ("_data", "_num_done", "_queue", "header")

    def __init__(
        self,
        progress: ProgressEngine,
        send_queue: "SendQueue",
        header: MessageHeader,
        data: Tensor,
    ) -> None:
        super().__init__(progress, "send")
        self.header = header
        self._queue = send_queue
        self._data = data
        self._num_done = 0

    def start(self) -> None:
        """Queue behind earlier messages to the same rank."""
        self._queue.turn.append(self)

    def advance(self) -> None:
        """Write what there is room for, when it is this message's turn."""
        channel = self._queue.channel
        while (
            not self.is_over and self._queue.turn[0] is self and not channel.is_full()
        ):
            piece = self._data[self._num_done : self._num_done + PIECE_BYTES]
            channel.put(self.header, piece)
            self._num_done += piece.numel()
            if self._num_done == self.header.num_bytes:
                self.is_over = True
                self._queue.turn.popleft()

    def find_pending(self) -> PendingWord | None:
        """Return the receiver's word while there is no room."""
        channel = self._queue.channel
        taken = channel.num_taken()
        if channel.num_sent() - taken < _NUM_PIECES:
            return None
        return PendingWord(channel.receiver, channel.taken_at, taken, taken + 1)


class SendQueue:
    """Messages to one rank, in order."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.turn: deque[Sending] = deque()


class Receiving(Transfer):
    """A message from one rank."""

    __slots__ = ("_queue", "data", "header")

    def __init__(
        self,
        progress: ProgressEngine,
        receive_queue: "ReceiveQueue",
        header: MessageHeader,
        data: Tensor,
    ) -> None:
        super().__init__(progress, "recv")
        self.header = header
        self._queue = receive_queue
        self.data = data

    def start(self) -> None:
        """Ask for a message of this tag, after earlier requests."""
        self._queue.ask(self)

    def accept(self, header: MessageHeader, data: Tensor) -> None:
        """Be over: ``data`` has all bytes of a message with this header."""
        if header != self.header:
            self.fail(
                CollectiveError(
                    f"recv must be given as many bytes of the same dtype as were sent, "
                    f"{header.num_bytes}, got a tensor of {self.header.num_bytes} for "
                    f"tag {header.tag} from rank {self._queue.channel.sender}."
                )
            )
            return
        if data is not self.data:
            with writing_to((self.data,)):
                self.data.copy_(data)
        self.is_over = True

    def advance(self) -> None:
        """Read what has come."""
        self._queue.advance()

    def find_pending(self) -> PendingWord | None:
        """Return the sender's word while nothing has come."""
        channel = self._queue.channel
        sent = channel.num_sent()
        if sent != channel.num_taken():
            return None
        return PendingWord(channel.sender, channel.sent_at, sent, sent + 1)


class ReceiveQueue:
    """Messages from one rank: they come in the order sent, and are asked for by tag.

    Whoever advances it reads for all who ask, in whatever inference mode they asked.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._asked: list[Receiving] = []
        self._kept: list[tuple[MessageHeader, Tensor]] = []
        self._header: MessageHeader | None = None
        self._data = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._num_done = 0

    def ask(self, receiving: Receiving) -> None:
        """Hand over a message that has come already, or note who waits for it."""
        for index, (header, data) in enumerate(self._kept):
            if header.tag == receiving.header.tag:
                del self._kept[index]
                receiving.accept(header, data)
                return
        self._asked.append(receiving)

    def advance(self) -> None:
        """Read pieces as long as somebody asks for a message and some are there."""
        self._asked = [each for each in self._asked if not each.is_over]
        while self._asked and not self.channel.is_empty():
            header = self._header
            if header is None:
                header = self._header = self.channel.header()
                self._begin(header)
            piece = self._data[self._num_done : self._num_done + PIECE_BYTES]
            with writing_to((piece,)):
                self.channel.take(piece)
            self._num_done += piece.numel()
            if self._num_done == header.num_bytes:
                self._header = None
                self._end(header)

    def _find(self, header: MessageHeader) -> Receiving | None:
        return next((r for r in self._asked if r.header.tag == header.tag), None)

    def _begin(self, header: MessageHeader) -> None:
        """Choose where a message goes: at once to whoever asks, if it fits there."""
        self._num_done = 0
        receiving = self._find(header)
        if receiving is not None and receiving.header == header:
            self._data = receiving.data
        else:
            self._data = torch.empty(header.num_bytes, dtype=torch.uint8, device="cpu")

    def _end(self, header: MessageHeader) -> None:
        receiving = self._find(header)
        if receiving is None:
            self._kept.append((header, self._data))
        else:
            self._asked.remove(receiving)
            receiving.accept(header, self._data)


class PointToPoint:
    """The channels between this rank and all others, opened when they are needed."""

    def __init__(
        self,
        progress: ProgressEngine,
        blocks: Sequence[ControlBlock],
        segments: Sequence[Segment],
        start: int,
    ) -> None:
        """Look at the channels, which begin ``start`` bytes into every segment."""
        self._progress = progress
        self._blocks = blocks
        self._segments = segments
        self._start = start
        self._send_queues: dict[int, SendQueue] = {}
        self._receive_queues: dict[int, ReceiveQueue] = {}

    def send(self, tensor: Tensor, to: int, tag: int) -> Sending:
        """Send a tensor that has elements."""
        send_queue = self._send_queues.get(to)
        if send_queue is None:
            channel = self._channel(self._progress.rank, to)
            send_queue = self._send_queues[to] = SendQueue(channel)
        data = tensor.view(torch.uint8)
        sending = Sending(self._progress, send_queue, _header(tensor, tag), data)
        self._progress.deliver(sending)
        return sending

    def recv(self, tensor: Tensor, source: int, tag: int) -> Receiving:
        """Receive into a tensor that has elements."""
        receive_queue = self._receive_queues.get(source)
        if receive_queue is None:
            channel = self._channel(source, self._progress.rank)
            receive_queue = self._receive_queues[source] = ReceiveQueue(channel)
        data = tensor.view(torch.uint8)
        receiving = Receiving(self._progress, receive_queue, _header(tensor, tag), data)
        self._progress.deliver(receiving)
        return receiving

    def _channel(self, sender: int, receiver: int) -> Channel:
        return Channel(
            self._blocks,
            self._segments,
            self._start,
            sender=sender,
            receiver=receiver,
        )


def _header(tensor: Tensor, tag: int) -> MessageHeader:
    kind = zlib.crc32(str(tensor.dtype).encode())
    return MessageHeader(tag, tensor.numel() * tensor.element_size(), kind)
