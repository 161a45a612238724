"""Messages between two ranks, through slots of the sender's.

A message goes in pieces. The sender writes a piece and counts it in its word for the
receiver (``Places.sent``); the receiver reads it and counts it in its own word for the
sender (``Places.taken``). Two pieces fit, so that writing and reading overlap.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ronde.collectives.arithmetic import as_bytes, dense, put_back
from ronde.collectives.communicator import Look
from ronde.collectives.engines.shared_memory.executor import Executor
from ronde.collectives.engines.shared_memory.segment import Segment
from ronde.collectives.engines.shared_memory.waiting import Lag
from ronde.collectives.engines.shared_memory.words import (
    IS_WEAKLY_ORDERED,
    Header,
    fence,
)
from ronde.collectives.inference import writing_to
from ronde.errors import CollectiveError, fresh

PIECE_BYTES = 256 << 10
_NUM_PIECES = 2
_HEAD_BYTES = 64
"""Before each piece: the message's tag, length and kind of elements."""
BOX_BYTES = _NUM_PIECES * (_HEAD_BYTES + PIECE_BYTES)


@dataclass(frozen=True, slots=True)
class Label:
    """What a message says of itself.

    Attributes:
        tag: As given.
        num_bytes: Its length.
        kind: A number for its dtype.
    """

    tag: int
    num_bytes: int
    kind: int


class Box:
    """The slots of one ordered pair of ranks, as one of the two sees them."""

    def __init__(
        self,
        headers: Sequence[Header],
        segments: Sequence[Segment],
        start: int,
        *,
        sender: int,
        receiver: int,
    ) -> None:
        """Look at the pair's part of the sender's segment.

        Args:
            headers: All ranks' words.
            segments: All ranks' memory.
            start: Where boxes begin in every segment, in bytes.
            sender: Who writes.
            receiver: Who reads.
        """
        self.sender, self.receiver = sender, receiver
        places = headers[sender].places
        self.sent_at = places.sent + receiver
        self.taken_at = places.taken + sender
        self._sent, self._taken = headers[sender], headers[receiver]
        first = start + receiver * BOX_BYTES
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

    def put(self, label: Label, data: Tensor) -> None:
        """Write a piece."""
        if IS_WEAKLY_ORDERED:
            fence()
        number = self.num_sent()
        head = self._heads[number % _NUM_PIECES]
        head[0], head[1], head[2] = label.tag, label.num_bytes, label.kind
        self._pieces[number % _NUM_PIECES][: data.numel()].copy_(data)
        self._sent.publish(self.sent_at, number + 1)

    def label(self) -> Label:
        """Return what the message says of itself that the next piece belongs to."""
        if IS_WEAKLY_ORDERED:
            fence()
        head = self._heads[self.num_taken() % _NUM_PIECES]
        return Label(head[0], head[1], head[2])

    def take(self, data: Tensor) -> None:
        """Read a piece."""
        number = self.num_taken()
        data.copy_(self._pieces[number % _NUM_PIECES][: data.numel()])
        self._taken.publish(self.taken_at, number + 1)


class _Message:
    """A message under way: a ``Work``."""

    def __init__(self, executor: Executor, name: str, label: Label) -> None:
        self.name = name
        self.is_over = False
        self.label = label
        self._executor = executor
        self._failure: Exception | None = None

    def is_done(self) -> bool:
        """Say whether ``wait()`` would return without blocking."""
        if not self.is_over:
            self._executor.poll()
        return self.is_over

    def wait_watched(self, look: Look) -> bool:
        """Block until it is over or ``look`` says to stop: see ``Work``."""
        if not self.is_over:
            self._executor.finish(self, look)  # pyright: ignore[reportArgumentType]
        return self.is_over

    def fail(self, error: Exception) -> None:
        """Be over, with an error."""
        self._failure = error
        self.is_over = True

    def finish(self) -> None:
        """Wait until it is over; raise if it failed."""
        if not self.is_over:
            self._executor.finish(self)  # pyright: ignore[reportArgumentType]
        if self._failure is not None:
            raise fresh(self._failure)


class Sending(_Message):
    """A message to one rank."""

    def __init__(
        self, executor: Executor, outbox: "Outbox", label: Label, data: Tensor
    ) -> None:
        super().__init__(executor, "send", label)
        self._outbox = outbox
        self._data = data
        self._num_done = 0

    def start(self) -> None:
        """Queue behind earlier messages to the same rank."""
        self._outbox.turn.append(self)

    def wait(self) -> None:
        """Block until the tensor may be changed.

        Raises:
            CollectiveError: The receiver is gone.
        """
        self.finish()

    def advance(self) -> None:
        """Write what there is room for, when it is this message's turn."""
        box = self._outbox.box
        while not self.is_over and self._outbox.turn[0] is self and not box.is_full():
            piece = self._data[self._num_done : self._num_done + PIECE_BYTES]
            box.put(self.label, piece)
            self._num_done += piece.numel()
            if self._num_done == self.label.num_bytes:
                self.is_over = True
                self._outbox.turn.popleft()

    def find_lag(self) -> Lag | None:
        """Return the receiver's word while there is no room."""
        box = self._outbox.box
        taken = box.num_taken()
        if box.num_sent() - taken < _NUM_PIECES:
            return None
        return Lag(box.receiver, box.taken_at, taken, taken + 1)


class Outbox:
    """Messages to one rank, in order."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.turn: deque[Sending] = deque()


class Receiving(_Message):
    """A message from one rank."""

    def __init__(
        self,
        executor: Executor,
        inbox: "Inbox",
        label: Label,
        tensor: Tensor,
    ) -> None:
        super().__init__(executor, "recv", label)
        self._inbox = inbox
        self._tensor = tensor
        self._values = dense(tensor)
        self.data = as_bytes(self._values)

    def start(self) -> None:
        """Ask for a message of this tag, after earlier requests."""
        self._inbox.ask(self)

    def wait(self) -> Tensor:
        """Block until the message is there and return the tensor.

        Raises:
            CollectiveError: The sender is gone, or sent something else.
        """
        self.finish()
        return self._tensor

    def accept(self, label: Label, data: Tensor) -> None:
        """Be over: ``data`` has all bytes of a message so labelled."""
        if label != self.label:
            self.fail(
                CollectiveError(
                    f"recv must be given as many bytes of the same dtype as were sent, "
                    f"{label.num_bytes}, got a tensor of {self.label.num_bytes} for "
                    f"tag {label.tag} from rank {self._inbox.box.sender}."
                )
            )
            return
        with writing_to((self.data, self._tensor)):
            if data is not self.data:
                self.data.copy_(data)
            put_back(self._values, self._tensor)
        self.is_over = True

    def advance(self) -> None:
        """Read what has come."""
        self._inbox.advance()

    def find_lag(self) -> Lag | None:
        """Return the sender's word while nothing has come."""
        box = self._inbox.box
        sent = box.num_sent()
        if sent != box.num_taken():
            return None
        return Lag(box.sender, box.sent_at, sent, sent + 1)


class Inbox:
    """Messages from one rank: they come in the order sent, and are asked for by tag.

    Whoever advances it reads for all who ask, in whatever inference mode they asked.
    """

    def __init__(self, box: Box) -> None:
        self.box = box
        self._asked: list[Receiving] = []
        self._kept: list[tuple[Label, Tensor]] = []
        self._label: Label | None = None
        self._data = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._num_done = 0

    def ask(self, receiving: Receiving) -> None:
        """Hand over a message that has come already, or note who waits for it."""
        for index, (label, data) in enumerate(self._kept):
            if label.tag == receiving.label.tag:
                del self._kept[index]
                receiving.accept(label, data)
                return
        self._asked.append(receiving)

    def advance(self) -> None:
        """Read pieces as long as somebody asks for a message and some are there."""
        self._asked = [each for each in self._asked if not each.is_over]
        while self._asked and not self.box.is_empty():
            label = self._label
            if label is None:
                label = self._label = self.box.label()
                self._begin(label)
            piece = self._data[self._num_done : self._num_done + PIECE_BYTES]
            with writing_to((piece,)):
                self.box.take(piece)
            self._num_done += piece.numel()
            if self._num_done == label.num_bytes:
                self._label = None
                self._end(label)

    def _find(self, label: Label) -> Receiving | None:
        return next((r for r in self._asked if r.label.tag == label.tag), None)

    def _begin(self, label: Label) -> None:
        """Choose where a message goes: at once to whoever asks, if it fits there."""
        self._num_done = 0
        receiving = self._find(label)
        if receiving is not None and receiving.label == label:
            self._data = receiving.data
        else:
            self._data = torch.empty(label.num_bytes, dtype=torch.uint8, device="cpu")

    def _end(self, label: Label) -> None:
        receiving = self._find(label)
        if receiving is None:
            self._kept.append((label, self._data))
        else:
            self._asked.remove(receiving)
            receiving.accept(label, self._data)


class PostOffice:
    """The boxes between this rank and all others, opened when they are needed."""

    def __init__(
        self,
        executor: Executor,
        headers: Sequence[Header],
        segments: Sequence[Segment],
        start: int,
    ) -> None:
        """Look at the boxes, which begin ``start`` bytes into every segment."""
        self._executor = executor
        self._headers = headers
        self._segments = segments
        self._start = start
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}

    def send(self, tensor: Tensor, to: int, tag: int) -> Sending:
        """Send a tensor that has elements."""
        outbox = self._outboxes.get(to)
        if outbox is None:
            box = self._box(self._executor.rank, to)
            outbox = self._outboxes[to] = Outbox(box)
        data = as_bytes(dense(tensor))
        sending = Sending(self._executor, outbox, _label(tensor, tag), data)
        self._executor.deliver(sending)
        return sending

    def recv(self, tensor: Tensor, source: int, tag: int) -> Receiving:
        """Receive into a tensor that has elements."""
        inbox = self._inboxes.get(source)
        if inbox is None:
            box = self._box(source, self._executor.rank)
            inbox = self._inboxes[source] = Inbox(box)
        receiving = Receiving(self._executor, inbox, _label(tensor, tag), tensor)
        self._executor.deliver(receiving)
        return receiving

    def _box(self, sender: int, receiver: int) -> Box:
        return Box(
            self._headers,
            self._segments,
            self._start,
            sender=sender,
            receiver=receiver,
        )


def _label(tensor: Tensor, tag: int) -> Label:
    kind = zlib.crc32(str(tensor.dtype).encode())
    return Label(tag, tensor.numel() * tensor.element_size(), kind)
