"""A thread-safe client of the store."""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ronde.errors import StoreError
from ronde.store.protocol import MAX_FRAME_BYTES, Op, Status, decode, encode
from ronde.units import list_first

_READ_BYTES = 256 << 10
_MAX_IDLE = 4


class StoreClient:
    """A client of the store, with one connection for each concurrent call.

    Args:
        dial: Opens a connection, within a time limit in seconds.
    """

    def __init__(self, dial: Callable[[float], "PlainConnection"]) -> None:
        self._dial = dial
        self._lock = threading.Lock()
        self._idle: list[PlainConnection] = []
        self._busy: set[PlainConnection] = set()
        self._is_ended = False
        self._pid = os.getpid()

    def ask(
        self, op: Op, fields: Sequence[str | bytes], timeout_s: float
    ) -> tuple[bytes, ...]:
        """Send a request, and return the fields of its answer; see ``Op``."""
        parts = [each.encode() if isinstance(each, str) else each for each in fields]
        frame = encode(op, parts)
        due_s = time.monotonic() + timeout_s
        try:
            connection = self._take() or self._dial(timeout_s)
            try:
                self._begin(connection)
                kind, answer = decode(connection.ask(frame, due_s - time.monotonic()))
            except BaseException:
                # Another call must not read this one's late reply.
                self._busy.discard(connection)
                connection.close()
                raise
        except TimeoutError:
            raise StoreError(
                f"timeout after {timeout_s:g} s: {_explain_lateness(op, parts)}"
            ) from None
        except OSError as error:
            raise StoreError(
                f"lost the connection to the rendezvous store: {error}"
            ) from error
        with self._lock:
            self._busy.discard(connection)
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
        if kind != Status.DONE:
            raise StoreError(b" ".join(answer).decode(errors="replace"))
        return answer

    def end(self) -> None:
        """Make all calls fail, now and later; any thread may call this."""
        with self._lock:
            self._is_ended = True
            self._idle = []
            busy = list(self._busy)
        for connection in busy:
            connection.interrupt()

    def _begin(self, connection: "PlainConnection") -> None:
        with self._lock:
            if self._is_ended:
                raise ConnectionAbortedError("the client was closed")
            self._busy.add(connection)

    def _take(self) -> "PlainConnection | None":
        with self._lock:
            if self._pid != os.getpid():
                # In a forked child: these are its parent's connections.
                self._pid, self._idle = os.getpid(), []
            return self._idle.pop() if self._idle else None


class PlainConnection:
    """A connection to the store without authentication."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def ask(self, frame: bytes, timeout_s: float) -> bytes:
        due_s = time.monotonic() + timeout_s
        self._sock.settimeout(max(timeout_s, 0.001))
        self._sock.sendall(frame)
        length = int.from_bytes(receive(self._sock, 4, due_s), "big")
        if length > MAX_FRAME_BYTES:
            raise ConnectionResetError(f"the store sent a reply of {length} bytes")
        return receive(self._sock, length, due_s)

    def interrupt(self) -> None:
        """Make a call in another thread fail."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def __del__(self) -> None:
        self.close()  # for a client that was never ended


def receive(sock: socket.socket, size: int, due_s: float) -> bytes:
    received = bytearray()
    while len(received) < size:
        left_s = due_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)
        data = sock.recv(min(size - len(received), _READ_BYTES))
        if not data:
            raise ConnectionResetError("the store closed the connection")
        received += data
    return bytes(received)


def _explain_lateness(op: Op, keys: Sequence[bytes]) -> str:
    if op not in (Op.GET, Op.WAIT):
        return "the rendezvous store does not answer"
    shown = list_first([key.decode(errors="replace") for key in keys], most=4)
    return f"other ranks did not set {shown} in the rendezvous store"
