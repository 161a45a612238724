"""Connections through Gloo, between hosts or where memory cannot be shared.

A message is sent as a frame of fixed length, which begins with the length of the
message or a negative code. A remainder that does not fit into the frame is sent under
another tag. Gloo needs a tensor until it is sent, and reports completion only to a
wait. So a thread waits for the sends, many at once.

Note [Close handshake]
    Gloo moves bytes when the receiver has posted a receive, and a connection closed
    with unread bytes may lose sent ones. So a closing rank sends CLOSE and waits a
    little until the neighbour's listening thread answers CLOSE_ACK: then all messages
    have arrived. If both send CLOSE, each CLOSE answers the other.
"""

import atexit
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue

import torch

from ronde.collectives.engines.torch_distributed import BackendWork, Groups
from ronde.coordination.control.doorbell import Doorbell
from ronde.coordination.messages import Loss

_logger = logging.getLogger("ronde")
_FRAME_BYTES = 256
_HEADER = struct.Struct("=q")
_INLINE_BYTES = _FRAME_BYTES - _HEADER.size
_FRAMES, _REMAINDERS = 0, 1  # tags; messages with equal tags keep their order
_CLOSE, _CLOSE_ACK = -1, -2
_FOR_EVER = timedelta(days=3650)
_CLOSE_S = 5.0
_ENDING_S = 2.0  # for threads to end after Gloo has released them
_MOST_KEPT = 32
_MOST_KEPT_BYTES = 1 << 20


class GlooTransport:
    """The connections of one rank to neighbours on any host."""

    def __init__(
        self,
        groups: Groups,
        neighbours: Mapping[int, tuple[int, str]],
        doorbell: Doorbell,
        *,
        close_s: float = _CLOSE_S,
    ) -> None:
        """Take ownership of a Gloo group of this rank and its neighbours.

        Args:
            groups: The Gloo group, closed by ``close()``.
            neighbours: The neighbours' ranks and hosts, by rank in the group.
            doorbell: This rank's doorbell, notified of each message and loss.
            close_s: The limit of the close handshake.
        """
        self._close_s = close_s
        self.backend = groups.of(torch.device("cpu"))
        self.doorbell = doorbell
        self._groups = groups
        self._lock = threading.Lock()
        self._kept: list[BackendWork] = []  # sends in progress
        self._num_bytes = 0
        self._batches: SimpleQueue[list[BackendWork] | None] = SimpleQueue()
        self._sent = threading.Thread(
            target=self._await_sends, name="ronde control sent", daemon=True
        )
        self._sent.start()
        self.connections = [
            GlooConnection(self, peer, rank, host)
            for peer, (rank, host) in neighbours.items()
        ]
        # C++ aborts if a thread is inside Gloo when the interpreter exits.
        atexit.register(self.close)

    def keep(self, work: BackendWork, num_bytes: int) -> None:
        with self._lock:
            self._kept.append(work)
            self._num_bytes += num_bytes
            if len(self._kept) < _MOST_KEPT and self._num_bytes < _MOST_KEPT_BYTES:
                return
            self._batches.put(self._kept)
            self._kept, self._num_bytes = [], 0

    def close(self) -> None:
        """Close the connections and end all threads; see Note [Close handshake]."""
        atexit.unregister(self.close)
        for each in self.connections:
            each.close()
        self._join(time.monotonic() + self._close_s)
        self._groups.abort()  # ends waits for a hanging neighbour
        deadline = time.monotonic() + _ENDING_S
        self._join(deadline)
        self._batches.put(None)
        self._sent.join(max(0.0, deadline - time.monotonic()))
        self._kept = []
        for each in self.connections:
            if each.thread.is_alive():
                _logger.warning("the connection to %s could not be closed", each.name)
        self.connections = []  # the connections refer to this object and its Gloo group

    def _join(self, deadline: float) -> None:
        for each in self.connections:
            each.thread.join(max(0.0, deadline - time.monotonic()))

    def _await_sends(self) -> None:
        while (batch := self._batches.get()) is not None:
            for work in batch:
                # After a failure the listening thread fails as well.
                with suppress(RuntimeError):
                    work.wait()


class GlooConnection:
    """A connection to a neighbour, with a thread that receives from it."""

    def __init__(
        self, transport: GlooTransport, peer: int, rank: int, host: str
    ) -> None:
        self.rank = rank
        self.name = f"rank {rank}, on {host},"
        self._transport, self._peer = transport, peer
        self._received: deque[bytes] = deque()
        self._loss: Loss | None = None
        self._is_closing = False
        self.thread = threading.Thread(
            target=self._listen, name=f"ronde control {rank}", daemon=True
        )
        self.thread.start()

    def send(self, message: bytes) -> None:
        if self._loss is None:
            self._put_frame(len(message), message[:_INLINE_BYTES])
            if len(message) > _INLINE_BYTES:
                self._put(message[_INLINE_BYTES:], _REMAINDERS)

    def receive(self, into: list[tuple[int, bytes]]) -> None:
        while self._received:
            into.append((self.rank, self._received.popleft()))

    def has_unread(self) -> bool:
        return bool(self._received)

    def find_loss(self) -> Loss | None:
        return self._loss

    def close(self) -> None:
        self._is_closing = True
        if self._loss is None:
            self._put_frame(_CLOSE)

    def _listen(self) -> None:
        while self._loss is None:
            try:
                frame = self._receive(_FRAME_BYTES, _FRAMES)
                length: int = _HEADER.unpack_from(frame)[0]
                message = frame[_HEADER.size : _HEADER.size + max(length, 0)]
                if length > _INLINE_BYTES:
                    message += self._receive(length - _INLINE_BYTES, _REMAINDERS)
            except RuntimeError:
                text = f"{self.name} ended or cannot be reached"
                self._loss = Loss(self.rank, text, is_orderly=False)
            else:
                if length >= 0:
                    self._received.append(message)
                else:
                    text = f"{self.name} closed its connections"
                    self._loss = Loss(self.rank, text, is_orderly=True)
                    if length == _CLOSE and not self._is_closing:
                        self._put_frame(_CLOSE_ACK)
            self._transport.doorbell.notify()

    def _put_frame(self, length: int, data: bytes = b"") -> None:
        frame = _HEADER.pack(length) + data
        self._put(frame.ljust(_FRAME_BYTES, b"\0"), _FRAMES)

    def _put(self, data: bytes, tag: int) -> None:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        # After a failure the listening thread also fails, and finds the reason.
        with suppress(RuntimeError):
            work = self._transport.backend.send([tensor], self._peer, tag)
            self._transport.keep(work, len(data))

    def _receive(self, num_bytes: int, tag: int) -> bytes:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self._transport.backend.recv([tensor], self._peer, tag).wait(_FOR_EVER)
        return tensor.numpy().tobytes()
