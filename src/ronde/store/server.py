"""The server of the store, in a thread."""

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ronde.errors import StoreError
from ronde.store.authentication import ServerSession, SharedKey
from ronde.store.local_socket import is_own
from ronde.store.protocol import StoreState

_READ_BYTES = 256 << 10
_MAX_UNSENT_BYTES = 32 << 20


class PendingLimits(NamedTuple):
    """Limits for unauthenticated clients; beyond them, the oldest one is dropped."""

    most: int = 256
    each_s: float = 5.0


_PENDING_LIMITS = PendingLimits()


@dataclass(eq=False, slots=True)
class _Client:
    sock: socket.socket
    session: ServerSession
    due_s: float


class StoreServer:
    """The server of a store, behind a listening socket.

    Clients that are not authenticated yet do not count towards ``max_clients``.

    Args:
        accept: Returns the session for a new connection, or None to refuse it.
    """

    def __init__(
        self,
        listener: socket.socket,
        accept: Callable[[socket.socket], ServerSession | None],
        max_clients: int,
        limits: PendingLimits = _PENDING_LIMITS,
    ) -> None:
        self._make_session = accept
        self._limits = limits
        self._max_clients = max_clients
        self._state: StoreState[_Client] = StoreState()
        self._clients: set[_Client] = set()
        self._pending: dict[_Client, None] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._woken, self._closing = os.pipe()
        for fd in (listener.fileno(), self._woken):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._serve, name="ronde-store", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Close all connections, and end the thread."""
        if self._thread.is_alive():
            os.write(self._closing, b"x")
            self._thread.join()

    def _serve(self) -> None:
        while True:
            oldest = next(iter(self._pending), None)
            wait_s = oldest and max(0.0, oldest.due_s - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                if key.fd == self._woken:
                    self._close()
                    return
                if key.fd == self._listener.fileno():
                    self._accept()
                elif key.data in self._clients:
                    self._read(key.data)
            now_s = time.monotonic()
            for client in [each for each in self._pending if each.due_s <= now_s]:
                self._drop(client)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            # It has gone again, or no descriptor is free.
            self._drop(next(iter(self._pending), None))
            return
        session = self._make_session(sock)
        if session is None:
            sock.close()
            return
        sock.setblocking(False)  # noqa: FBT003  the socket's own method
        client = _Client(sock, session, time.monotonic() + self._limits.each_s)
        self._clients.add(client)
        self._pending[client] = None
        self._selector.register(sock, selectors.EVENT_READ, client)
        self._update(client)
        if len(self._pending) > self._limits.most:
            self._drop(next(iter(self._pending)))

    def _read(self, client: _Client) -> None:
        try:
            data = client.sock.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError
            for body in client.session.feed(data):
                for answered, reply in self._state.handle(client, body):
                    answered.session.send(reply)
                    self._update(answered)
        except BlockingIOError:
            pass  # it is only ready for writing
        except (OSError, StoreError):
            self._drop(client)
        self._update(client)

    def _update(self, client: _Client) -> None:
        """Send queued data; drop the client if it is gone or exceeds a limit."""
        if client not in self._clients:
            return
        unsent = client.session.unsent
        if client.session.is_trusted:
            self._pending.pop(client, None)
        is_gone = len(self._clients) - len(self._pending) > self._max_clients
        try:
            if unsent:
                del unsent[: client.sock.send(unsent)]
        except BlockingIOError:
            is_gone = is_gone or len(unsent) > _MAX_UNSENT_BYTES
        except OSError:
            is_gone = True
        if is_gone:
            self._drop(client)
        else:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
            self._selector.modify(client.sock, events, client)

    def _drop(self, client: _Client | None) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._pending.pop(client, None)
            self._state.forget(client)
            self._selector.unregister(client.sock)
            client.sock.close()

    def _close(self) -> None:
        for client in list(self._clients):
            self._drop(client)
        self._selector.close()
        self._listener.close()
        os.close(self._woken)
        os.close(self._closing)


def serve_locally(listener: socket.socket, max_clients: int) -> StoreServer:
    """Serve processes of this user on a unix socket."""
    return StoreServer(
        listener, lambda sock: ServerSession() if is_own(sock) else None, max_clients
    )


def serve_network(
    listener: socket.socket,
    key: SharedKey,
    max_clients: int,
    limits: PendingLimits = _PENDING_LIMITS,
) -> StoreServer:
    """Serve clients that know the key on a TCP socket."""

    def accept(sock: socket.socket) -> ServerSession:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return ServerSession(key)

    return StoreServer(listener, accept, max_clients, limits)
