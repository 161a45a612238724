"""Links by Gloo's messages, between hosts and wherever memory cannot be shared.

Note [Parting]
    Gloo moves bytes once the receiver has asked for them, and a connection that is
    closed with bytes unread may lose what it sent. So whoever closes says goodbye and
    waits a little for the neighbour's listening thread to answer farewell: then all has
    arrived. A goodbye that crosses another is its answer.
"""

import atexit
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from queue import SimpleQueue

import torch
from torch import Tensor

from ronde.collectives.engines.torch_distributed.groups import (
    Backend,
    BackendWork,
    Groups,
)
from ronde.coordination.control.bell import Bell
from ronde.coordination.control.channel import Loss
from ronde.coordination.control.link import Link, Medium

_logger = logging.getLogger("ronde")
_FRAME_BYTES = 256
_HEADER = struct.Struct("=q")
_INLINE_BYTES = _FRAME_BYTES - _HEADER.size
_FRAMES, _REMAINDERS = 0, 1
"""Tags: each keeps its own order."""
_GOODBYE, _FAREWELL = -1, -2
_FOR_EVER = timedelta(days=3650)
_PARTING_S = 5.0
_ENDING_S = 2.0
"""Threads that Gloo lets go of end within this."""
_MOST_KEPT = 32
_MOST_KEPT_BYTES = 1 << 20


class GlooMedium(Medium):
    """The links of one rank to neighbours, wherever they are."""

    def __init__(
        self, groups: Groups, neighbours: Mapping[int, tuple[int, str]], bell: Bell
    ) -> None:
        """Take a process group over and listen.

        Args:
            groups: Its Gloo group holds this rank and its neighbours.
            neighbours: For the neighbour of each number there, its rank and its host.
            bell: This rank's.
        """
        self._groups = groups
        self._sent = _Sent()
        backend = groups.of(torch.device("cpu"))
        self.links = self._links = [
            GlooLink(_Wire(backend, peer, self._sent), rank, host, bell)
            for peer, (rank, host) in neighbours.items()
        ]
        # A thread inside of Gloo must not outlive the interpreter: C++ would abort.
        atexit.register(self.close)

    def close(self) -> None:
        """Part from the neighbours and end all threads: see ``Medium``."""
        atexit.unregister(self.close)
        for link in self._links:
            link.part()
        deadline = time.monotonic() + _PARTING_S
        for link in self._links:
            link.join(max(0.0, deadline - time.monotonic()))
        self._groups.abort()  # ends what a neighbour that hangs leaves waiting
        deadline = time.monotonic() + _ENDING_S
        for link in self._links:
            link.join(max(0.0, deadline - time.monotonic()))
        self._sent.close(max(0.0, deadline - time.monotonic()))
        for link in self._links:
            if link.is_alive():
                # A thread that never comes back from Gloo harms nobody at the end.
                _logger.warning("the connection to %s could not be closed", link.name)


class GlooLink(Link):
    """A connection, and a thread that listens to it."""

    def __init__(self, wire: "_Wire", rank: int, host: str, bell: Bell) -> None:
        self.rank = rank
        self.name = f"rank {rank}, on {host},"
        self._wire = wire
        self._bell = bell
        self._inbox: deque[bytes] = deque()
        self._loss: Loss | None = None
        self._has_parted = False
        self._thread = threading.Thread(
            target=self._listen, name=f"ronde control {rank}", daemon=True
        )
        self._thread.start()

    def send(self, message: bytes) -> None:
        """Hand the message to Gloo: see ``Link``."""
        if self._loss is None:
            self._wire.send(message)

    def receive(self, into: list[tuple[int, bytes]]) -> None:
        """Return what the thread has heard: see ``Link``."""
        inbox = self._inbox
        while inbox:
            into.append((self.rank, inbox.popleft()))

    def has_unread(self) -> bool:
        """Say whether the thread has heard more: see ``Link``."""
        return bool(self._inbox)

    def find_loss(self) -> Loss | None:
        """Return what the thread found out: see ``Link``."""
        return self._loss

    def part(self) -> None:
        """Say goodbye to whom is still there; see Note [Parting]."""
        self._has_parted = True
        if self._loss is None:
            self._wire.say(_GOODBYE)

    def join(self, timeout_s: float) -> None:
        """Wait until the thread ends, which it does when there is no more to hear."""
        self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        """Say whether the thread still listens."""
        return self._thread.is_alive()

    def _listen(self) -> None:
        while self._loss is None:
            try:
                heard = self._wire.hear()
            except RuntimeError:
                text = f"{self.name} ended or cannot be reached"
                self._loss = Loss(self.rank, text, is_orderly=False)
            else:
                if isinstance(heard, bytes):
                    self._inbox.append(heard)
                else:
                    text = f"{self.name} said goodbye"
                    self._loss = Loss(self.rank, text, is_orderly=True)
                    if heard == _GOODBYE and not self._has_parted:
                        self._wire.say(_FAREWELL)
            self._bell.ring()


class _Wire:
    """Frames to and from one neighbour, all of one length, and remainders of any.

    A frame begins with the length of the message, or with a sign below zero.
    """

    def __init__(self, backend: Backend, peer: int, sent: "_Sent") -> None:
        self._backend = backend
        self._peer = peer
        self._sent = sent
        self._heard = torch.empty(_FRAME_BYTES, dtype=torch.uint8, device="cpu")

    def send(self, message: bytes) -> None:
        """Send a message, if the connection still stands."""
        self._put(_HEADER.pack(len(message)) + message[:_INLINE_BYTES], _FRAMES)
        if len(message) > _INLINE_BYTES:
            self._put(message[_INLINE_BYTES:], _REMAINDERS)

    def say(self, sign: int) -> None:
        """Send a sign, if the connection still stands."""
        self._put(_HEADER.pack(sign), _FRAMES)

    def hear(self) -> bytes | int:
        """Wait for a message, or a sign, and return it.

        Raises:
            RuntimeError: The connection broke.
        """
        self._take(self._heard, _FRAMES)
        frame = self._heard.numpy().tobytes()
        length: int = _HEADER.unpack_from(frame)[0]
        if length < 0:
            return length
        begin = frame[_HEADER.size : _HEADER.size + length]
        if length <= _INLINE_BYTES:
            return begin
        rest = torch.empty(length - _INLINE_BYTES, dtype=torch.uint8, device="cpu")
        self._take(rest, _REMAINDERS)
        return begin + rest.numpy().tobytes()

    def _put(self, data: bytes, tag: int) -> None:
        padded = data.ljust(_FRAME_BYTES, b"\0") if tag == _FRAMES else data
        tensor = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        try:
            work: BackendWork = self._backend.send([tensor], self._peer, tag)
        except RuntimeError:
            return  # the listening thread is told as well, and tells why
        self._sent.keep(work, len(padded))

    def _take(self, tensor: Tensor, tag: int) -> None:
        self._backend.recv([tensor], self._peer, tag).wait(_FOR_EVER)


class _Sent:
    """Holds what is on its way: Gloo does not send what nobody holds any more.

    That it has been sent Gloo tells only who waits for it. So a thread does, for many
    messages at once: it need not run for every one of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[BackendWork] = []
        self._num_bytes = 0
        self._batches: SimpleQueue[list[BackendWork] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._let_go, name="ronde control sent", daemon=True
        )
        self._thread.start()

    def keep(self, work: BackendWork, num_bytes: int) -> None:
        """Hold a message until it is sent; any thread may."""
        with self._lock:
            self._kept.append(work)
            self._num_bytes += num_bytes
            if len(self._kept) < _MOST_KEPT and self._num_bytes < _MOST_KEPT_BYTES:
                return
            self._batches.put(self._kept)
            self._kept, self._num_bytes = [], 0

    def close(self, timeout_s: float) -> None:
        """Let everything go and end the thread; the connections are closed."""
        self._batches.put(None)
        self._thread.join(timeout_s)
        self._kept = []

    def _let_go(self) -> None:
        while (batch := self._batches.get()) is not None:
            for work in batch:
                try:
                    work.wait()
                except RuntimeError:
                    continue  # the listening thread is told as well, and tells why
