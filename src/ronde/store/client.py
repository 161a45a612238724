"""Asks the store and waits for its replies; safe to use from several threads."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from ronde.errors import StoreError
from ronde.store.protocol import Op, Splitter, Status, decode, encode

_READ_BYTES = 256 << 10
_MAX_IDLE = 4
_NUM_NAMED = 4


class StoreClient:
    """The store, as one process sees it.

    Each call that is under way has a connection of its own, so that one that waits
    keeps no other off, and no thread ever holds a lock while it waits. ``dial`` makes a
    connection, within so many seconds.
    """

    def __init__(self, dial: Callable[[float], "PlainConnection"]) -> None:
        self._dial = dial
        self._lock = threading.Lock()
        self._idle: list[PlainConnection] = []
        self._pid = os.getpid()

    def set(self, pairs: Iterable[tuple[str, bytes]], timeout_s: float) -> None:
        """Give keys values, all at once."""
        fields = [part for key, value in pairs for part in (key.encode(), value)]
        self._ask(Op.SET, fields, timeout_s)

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Return the values of keys, once all have one."""
        return list(self._ask(Op.GET, _encoded(keys), timeout_s)) if keys else []

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Return once all keys have values."""
        if keys:
            self._ask(Op.WAIT, _encoded(keys), timeout_s)

    def check(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Return whether all keys have values."""
        return self._ask(Op.CHECK, _encoded(keys), timeout_s) == (b"1",)

    def add(self, key: str, amount: int, timeout_s: float) -> int:
        """Add to a number, 0 where there is none; return the sum."""
        fields = [key.encode(), b"%d" % amount]
        return int(self._ask(Op.ADD, fields, timeout_s)[0])

    def compare_set(
        self, key: str, expected: bytes, new: bytes, timeout_s: float
    ) -> bytes:
        """Set a value if it is the one that is expected; return what it then is.

        A key without value equals the empty one; expected to be another, it stays
        without, and what was expected is returned.
        """
        fields = [key.encode(), expected, new]
        return self._ask(Op.COMPARE_SET, fields, timeout_s)[0]

    def delete(self, key: str, timeout_s: float) -> bool:
        """Remove a key; return whether it was there."""
        return self._ask(Op.DELETE, [key.encode()], timeout_s) == (b"1",)

    def append(self, key: str, more: bytes, timeout_s: float) -> None:
        """Put something at the end of a value."""
        self._ask(Op.APPEND, [key.encode(), more], timeout_s)

    def count(self, timeout_s: float) -> int:
        """Return the number of keys."""
        return int(self._ask(Op.COUNT, [], timeout_s)[0])

    def _ask(
        self, op: Op, fields: Sequence[bytes], timeout_s: float
    ) -> tuple[bytes, ...]:
        frame = encode(op, fields)
        due_s = time.monotonic() + timeout_s
        try:
            connection = self._take() or self._dial(timeout_s)
            try:
                body = connection.ask(frame, due_s - time.monotonic())
                reply = decode(body)
            except BaseException:
                # The reply may still come: nobody else may take it for his.
                connection.close()
                raise
        except TimeoutError:
            _explain_lateness(op, fields, timeout_s)
        except OSError as error:
            raise StoreError(
                f"the store that the ranks meet in is gone: connection closed ({error})"
            ) from error
        self._give_back(connection)
        if reply.kind != Status.DONE:
            raise StoreError(b" ".join(reply.fields).decode(errors="replace"))
        return reply.fields

    def _take(self) -> "PlainConnection | None":
        with self._lock:
            if self._pid != os.getpid():
                # A process that was forked off: these are its parent's.
                self._pid, self._idle = os.getpid(), []
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: "PlainConnection") -> None:
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


class PlainConnection:
    """A connection that needs no protection: a socket within this host."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._splitter = Splitter()

    def ask(self, frame: bytes, timeout_s: float) -> bytes:
        """Send a request; return the body of its reply.

        ``OSError`` if there was none in time or the connection is gone.
        """
        due_s = time.monotonic() + timeout_s
        self._sock.settimeout(max(timeout_s, 0.001))
        self._sock.sendall(frame)
        while True:
            left_s = due_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._sock.settimeout(left_s)
            data = self._sock.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError("its other end is gone")
            bodies = self._splitter.feed(data)
            if bodies:
                return bodies[0]

    def close(self) -> None:
        """End it; may be called again."""
        self._sock.close()

    def __del__(self) -> None:
        """Close what a client that is dropped has kept."""
        self.close()


def _encoded(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _explain_lateness(op: Op, fields: Sequence[bytes], timeout_s: float) -> NoReturn:
    if op not in (Op.GET, Op.WAIT):
        raise StoreError(
            f"timeout after {timeout_s:g} s: the store that the ranks meet in does not "
            "answer"
        ) from None
    shown = ", ".join(key.decode(errors="replace") for key in fields[:_NUM_NAMED])
    more = f" and {len(fields) - _NUM_NAMED} more" if len(fields) > _NUM_NAMED else ""
    raise StoreError(
        f"timeout after {timeout_s:g} s: other ranks must have set {shown}{more} in "
        "the store by then, but some did not"
    ) from None
