"""The store and who answers for it."""

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from ronde.errors import StoreError
from ronde.store.authentication import LocalSession, ProvenSession, Trust
from ronde.store.local_socket import is_own
from ronde.store.protocol import Frame, Op, Status, decode, encode

C = TypeVar("C", bound=Hashable)

_ENTRY_BYTES = 200  # what a key takes besides its bytes and those of its value


class Limits(NamedTuple):
    """What clients may have the store keep."""

    key_bytes: int = 4096  # length of a key
    value_bytes: int = 8 << 20  # length of a value
    total_bytes: int = 512 << 20  # all keys and values together


@dataclass(slots=True)
class _Waiter(Generic[C]):
    """A client whose request is answered when all of its keys are there."""

    client: C
    request: Frame
    missing: set[bytes]


@dataclass(slots=True)
class StoreState(Generic[C]):
    """What a store knows; ``handle`` is all there is to it.

    A client has one request at a time. One that waits says so by getting no reply yet;
    how long it does so is its own affair: it gives up by leaving.
    """

    limits: Limits = field(default_factory=Limits)
    _values: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    _num_bytes: int = 0
    _waiters: dict[C, _Waiter[C]] = field(default_factory=dict[C, _Waiter[C]])
    _by_key: dict[bytes, dict[C, None]] = field(
        default_factory=dict[bytes, dict[C, None]]
    )

    def handle(self, client: C, body: bytes) -> list[tuple[C, bytes]]:
        """Take a request; return the replies that can be given now, and to whom."""
        request = decode(body)
        if client in self._waiters:
            raise StoreError("a client must wait for its reply before it asks again.")
        try:
            replies = self._carry_out(client, request)
        except _RefusedError as error:
            return [(client, encode(Status.REFUSED, [str(error).encode()]))]
        return [(each, _reply(fields)) for each, fields in replies]

    def forget(self, client: C) -> None:
        """Drop what a client waits for: it is gone."""
        waiter = self._waiters.pop(client, None)
        for key in waiter.missing if waiter else ():
            self._by_key[key].pop(client)
            if not self._by_key[key]:
                del self._by_key[key]

    def _carry_out(  # noqa: PLR0911  one for each kind
        self, client: C, request: Frame
    ) -> list[tuple[C, Sequence[bytes]]]:
        kind, fields = request
        if kind in (Op.GET, Op.WAIT) and fields:
            return self._answer_or_wait(client, request)
        if kind == Op.SET and fields and not len(fields) % 2:
            changed = list(zip(fields[::2], fields[1::2], strict=True))
            return [(client, ()), *self._put(changed)]
        if kind == Op.CHECK:
            return [(client, (_flag(all(key in self._values for key in fields)),))]
        if kind == Op.COUNT and not fields:
            return [(client, (b"%d" % len(self._values),))]
        if kind == Op.DELETE and len(fields) == 1:
            return [(client, (_flag(self._remove(fields[0])),))]
        if kind not in (Op.ADD, Op.APPEND, Op.COMPARE_SET) or not fields:
            raise StoreError(f"a request must be known, got {kind}.")
        answer, value = self._changed(kind, *fields)
        changed = [] if value is None else [(fields[0], value)]
        return [(client, answer), *self._put(changed)]

    def _changed(
        self, kind: int, key: bytes, *fields: bytes
    ) -> tuple[Sequence[bytes], bytes | None]:
        """Return the reply to a request that looks at a value first, and the new one.

        The new value is None where it stays as it is.
        """
        before = self._values.get(key)
        match kind, fields:
            case Op.ADD, (amount,):
                total = b"%d" % (_integer(before or b"0") + _integer(amount))
                return (total,), total
            case Op.APPEND, (more,):
                return (), (before or b"") + more
            case Op.COMPARE_SET, (expected, new):
                # As TCPStore: a key that is not there equals the empty value.
                if (before or b"") == expected:
                    return (new,), new
                return (expected if before is None else before,), None
            case _:
                raise StoreError("a request must have the fields of its kind.")

    def _remove(self, key: bytes) -> bool:
        value = self._values.pop(key, None)
        self._num_bytes -= 0 if value is None else _size(key, value)
        return value is not None

    def _put(
        self, pairs: Sequence[tuple[bytes, bytes]]
    ) -> list[tuple[C, Sequence[bytes]]]:
        """Set values; return the replies to those that waited for them."""
        limits, grown = self.limits, 0
        for key, value in pairs:
            if len(key) > limits.key_bytes or len(value) > limits.value_bytes:
                raise _RefusedError(
                    f"key and value must be at most {limits.key_bytes} and "
                    f"{limits.value_bytes} bytes long, got {len(key)} and "
                    f"{len(value)} for {_shown(key)}"
                )
            before = self._values.get(key)
            grown += _size(key, value) - (0 if before is None else _size(key, before))
        if grown > 0 and self._num_bytes + grown > limits.total_bytes:
            raise _RefusedError(
                f"the store must hold at most {limits.total_bytes} bytes, got "
                f"{self._num_bytes + grown} with {_shown(pairs[0][0])}"
            )
        ready: deque[_Waiter[C]] = deque()
        for key, value in pairs:
            before = self._values.get(key)
            self._num_bytes += _size(key, value)
            self._num_bytes -= 0 if before is None else _size(key, before)
            self._values[key] = value
            for client in self._by_key.pop(key, ()):
                waiter = self._waiters[client]
                waiter.missing.discard(key)
                if not waiter.missing:
                    ready.append(self._waiters.pop(client))
        return [r for w in ready for r in self._answer_or_wait(w.client, w.request)]

    def _answer_or_wait(
        self, client: C, request: Frame
    ) -> list[tuple[C, Sequence[bytes]]]:
        keys = request.fields
        missing = {key for key in keys if key not in self._values}
        if not missing:
            if request.kind == Op.WAIT:
                return [(client, ())]
            return [(client, tuple(self._values[key] for key in keys))]
        self._waiters[client] = _Waiter(client, request, missing)
        for key in missing:
            self._by_key.setdefault(key, {})[client] = None
        return []


class _RefusedError(Exception):
    """The request is well formed and is not carried out."""


def _flag(is_so: bool) -> bytes:  # noqa: FBT001  it is the value
    return b"1" if is_so else b"0"


def _reply(fields: Sequence[bytes]) -> bytes:
    try:
        return encode(Status.DONE, fields)
    except StoreError as error:  # too long: it asked for much at once
        return encode(Status.REFUSED, [str(error).encode()])


def _size(key: bytes, value: bytes) -> int:
    return len(key) + len(value) + _ENTRY_BYTES


def _integer(text: bytes) -> int:
    try:
        number = int(text) if len(text) <= 20 else None
    except ValueError:
        number = None
    if number is None:
        raise _RefusedError(f"what is added to must be a number, got {text[:20]!r}")
    return number


def _shown(key: bytes) -> str:
    return repr(key[:80].decode(errors="replace"))


_READ_BYTES = 256 << 10
_MAX_UNSENT_BYTES = 32 << 20
_MAX_STRANGERS = 256
_STRANGER_S = 5.0


@dataclass(eq=False, slots=True)
class _Client:
    sock: socket.socket
    session: LocalSession
    due_s: float
    unsent: bytearray = field(default_factory=bytearray)


class StoreServer:
    """A store behind a socket that listens.

    Who has not shown that he may speak costs little: there may be ``_MAX_STRANGERS`` at
    a time, each for ``_STRANGER_S``, and when there are more the oldest goes first. So
    none of them keeps anybody else out.

    Args:
        admit: Returns the session of a connection, None to refuse it.
    """

    def __init__(
        self,
        listener: socket.socket,
        admit: Callable[[socket.socket], LocalSession | None],
        max_clients: int,
    ) -> None:
        self._admit = admit
        self._max_clients = max_clients
        self._state: StoreState[_Client] = StoreState()
        self._clients: set[_Client] = set()
        self._strangers: dict[_Client, None] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._bell, self._closing = os.pipe()
        for fd in (listener.fileno(), self._bell):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._serve, name="ronde-store", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End all connections; may be called again."""
        if self._thread.is_alive():
            os.write(self._closing, b"x")
            self._thread.join()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(self._patience_s()):
                if key.fd == self._bell:
                    self._close()
                    return
                if key.fd == self._listener.fileno():
                    self._accept()
                elif key.data in self._clients:
                    self._attend(key.data)
            now_s = time.monotonic()
            for stranger in [s for s in self._strangers if s.due_s <= now_s]:
                self._drop(stranger)

    def _patience_s(self) -> float | None:
        oldest = next(iter(self._strangers), None)
        return None if oldest is None else max(0.0, oldest.due_s - time.monotonic())

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            # It has gone again, or no descriptor is free: a stranger's will be soon.
            self._drop_oldest_stranger()
            return
        session = self._admit(sock)
        if session is None:
            sock.close()
            return
        sock.setblocking(False)  # noqa: FBT003  the socket's own method
        client = _Client(sock, session, time.monotonic() + _STRANGER_S)
        self._clients.add(client)
        self._strangers[client] = None
        self._selector.register(sock, selectors.EVENT_READ, client)
        self._settle(client)
        if len(self._strangers) > _MAX_STRANGERS:
            self._drop_oldest_stranger()

    def _attend(self, client: _Client) -> None:
        try:
            data = client.sock.recv(_READ_BYTES)
        except BlockingIOError:
            data = None
        except OSError:
            data = b""
        if data == b"":
            self._drop(client)
            return
        try:
            for body in client.session.feed(data or b""):
                for answered, reply in self._state.handle(client, body):
                    answered.unsent += answered.session.seal(reply)
                    self._settle(answered)
        except StoreError:
            self._drop(client)
            return
        self._settle(client)

    def _settle(self, client: _Client) -> None:
        """Send what can be sent to a client, and see what it is now."""
        if client not in self._clients:
            return
        client.unsent += client.session.to_say()
        if client.session.is_trusted and client in self._strangers:
            del self._strangers[client]
        num_trusted = len(self._clients) - len(self._strangers)
        is_gone = num_trusted > self._max_clients
        try:
            if client.unsent:
                del client.unsent[: client.sock.send(client.unsent)]
        except BlockingIOError:
            is_gone = is_gone or len(client.unsent) > _MAX_UNSENT_BYTES
        except OSError:
            is_gone = True
        if is_gone:
            self._drop(client)
            return
        events = selectors.EVENT_READ
        events |= selectors.EVENT_WRITE if client.unsent else 0
        self._selector.modify(client.sock, events, client)

    def _drop_oldest_stranger(self) -> None:
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            self._drop(oldest)

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._strangers.pop(client, None)
            self._state.forget(client)
            self._selector.unregister(client.sock)
            client.sock.close()

    def _close(self) -> None:
        for client in list(self._clients):
            self._drop(client)
        self._selector.close()
        self._listener.close()
        for fd in (self._bell, self._closing):
            with suppress(OSError):
                os.close(fd)


def serve_locally(listener: socket.socket, max_clients: int) -> StoreServer:
    """Answer on a unix socket, to processes of this user."""
    return StoreServer(
        listener, lambda sock: LocalSession() if is_own(sock) else None, max_clients
    )


def serve_network(
    listener: socket.socket, trust: Trust, max_clients: int
) -> StoreServer:
    """Answer on a TCP socket, to whoever proves to be of the job."""

    def admit(sock: socket.socket) -> LocalSession:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return ProvenSession(trust.find_key)

    return StoreServer(listener, admit, max_clients)
