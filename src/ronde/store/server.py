"""Answers for a store from a thread: where no controller does, in rank 0."""

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


class StrangerLimits(NamedTuple):
    """For clients that have not proven to be of the job; the oldest is dropped."""

    most: int = 256
    each_s: float = 5.0


_STRANGER_LIMITS = StrangerLimits()


@dataclass(eq=False, slots=True)
class _Client:
    sock: socket.socket
    session: ServerSession
    due_s: float


class StoreServer:
    """A store behind a socket that listens.

    Clients that have not proven to be of the job, strangers, keep nobody out.
    ``admit`` returns the session of a connection, None to refuse it.
    """

    def __init__(
        self,
        listener: socket.socket,
        admit: Callable[[socket.socket], ServerSession | None],
        max_clients: int,
        strangers: StrangerLimits = _STRANGER_LIMITS,
    ) -> None:
        self._admit = admit
        self._limits = strangers
        self._max_clients = max_clients
        self._state: StoreState[_Client] = StoreState()
        self._clients: set[_Client] = set()
        self._strangers: dict[_Client, None] = {}
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
        """End all connections; may be called again."""
        if self._thread.is_alive():
            os.write(self._closing, b"x")
            self._thread.join()

    def _serve(self) -> None:
        while True:
            oldest = next(iter(self._strangers), None)
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
            for stranger in [s for s in self._strangers if s.due_s <= now_s]:
                self._drop(stranger)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            # It has gone again, or no descriptor is free: a stranger's will be soon.
            self._drop(next(iter(self._strangers), None))
            return
        session = self._admit(sock)
        if session is None:
            sock.close()
            return
        sock.setblocking(False)  # noqa: FBT003  the socket's own method
        client = _Client(sock, session, time.monotonic() + self._limits.each_s)
        self._clients.add(client)
        self._strangers[client] = None
        self._selector.register(sock, selectors.EVENT_READ, client)
        self._settle(client)
        if len(self._strangers) > self._limits.most:
            self._drop(next(iter(self._strangers)))

    def _read(self, client: _Client) -> None:
        try:
            data = client.sock.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError
            for body in client.session.feed(data):
                for answered, reply in self._state.handle(client, body):
                    answered.session.send(reply)
                    self._settle(answered)
        except BlockingIOError:
            pass  # it takes more of what is to be sent
        except (OSError, StoreError):
            self._drop(client)
        self._settle(client)

    def _settle(self, client: _Client) -> None:
        """Send what can be sent to a client, and see what it is now."""
        if client not in self._clients:
            return
        unsent = client.session.unsent
        if client.session.is_trusted:
            self._strangers.pop(client, None)
        is_gone = len(self._clients) - len(self._strangers) > self._max_clients
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
            self._strangers.pop(client, None)
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
    """Answer on a unix socket, to processes of this user."""
    return StoreServer(
        listener, lambda sock: ServerSession() if is_own(sock) else None, max_clients
    )


def serve_network(
    listener: socket.socket,
    key: SharedKey,
    max_clients: int,
    strangers: StrangerLimits = _STRANGER_LIMITS,
) -> StoreServer:
    """Answer on a TCP socket, to clients that prove to be of the job."""

    def admit(sock: socket.socket) -> ServerSession:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return ServerSession(key)

    return StoreServer(listener, admit, max_clients, strangers)
