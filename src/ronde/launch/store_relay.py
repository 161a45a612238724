"""The ranks' way to the store: the agent passes its bytes on to the controller.

The agent understands nothing of them. It sees to who may speak, Note [Who may speak on
a host] in ``store.local_socket``, and to how much is under way.
"""

import os
import selectors
import socket
from dataclasses import dataclass, field
from pathlib import Path

from ronde.launch.frames import Relayed
from ronde.launch.outbox import Outbox
from ronde.store.local_socket import (
    is_own,
    listen,
    own_directories,
    remove,
    remove_stale,
    temporary_directory,
)
from ronde.store.protocol import max_connections

_READ_BYTES = 32 << 10
"""A frame's worth: little enough not to hold up what is more urgent."""

_MAX_UNSENT_BYTES = 32 << 20


_PREFIX = "ronde-agent-"


def name_directory() -> Path:
    """Return where an agent may make its sockets; nobody can guess it before."""
    return temporary_directory() / f"{_PREFIX}{os.urandom(8).hex()}"


def _remove_left_behind() -> None:
    """Remove the sockets of agents that were killed together with their keepers."""
    for directory in own_directories(_PREFIX):
        if remove_stale(directory):
            remove(directory)


@dataclass(slots=True)
class _Connection:
    number: int
    sock: socket.socket
    unsent: bytearray = field(default_factory=bytearray)
    events: int = 0


class StoreRelay:
    """Takes the connections of one generation's ranks and passes on what they say.

    Args:
        directory: Nobody else's; made if it is not there.
        epoch: Of the generation.
        num_ranks: How many it has here.
        selector: Of the agent's loop; the data of each key registered here is a
            function of the descriptor.
        outbox: Where what they say goes.

    Raises:
        OSError: The directory cannot be made, or is somebody else's.
    """

    def __init__(
        self,
        directory: Path,
        epoch: int,
        num_ranks: int,
        selector: selectors.BaseSelector,
        outbox: Outbox,
    ) -> None:
        self._epoch = epoch
        self._max_connections = max_connections(num_ranks)
        self._selector = selector
        self._outbox = outbox
        self._by_fd: dict[int, _Connection] = {}
        self._by_number: dict[int, _Connection] = {}
        self._count = 0
        self._is_reading = True
        if not directory.exists():
            _remove_left_behind()
            directory.mkdir(mode=0o700)
        self.path = directory / f"store.{epoch}"
        self._listener = listen(self.path)
        self._listener.setblocking(False)  # noqa: FBT003  the socket's own method
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def deliver(self, relayed: Relayed) -> None:
        """Pass on what the store says; what is of an older generation is dropped."""
        connection = self._by_number.get(relayed.connection)
        if connection is None or relayed.epoch != self._epoch:
            return
        connection.unsent += relayed.data
        if not relayed.data or len(connection.unsent) > _MAX_UNSENT_BYTES:
            self._close(connection)
        else:
            self._write(connection)

    def pace(self) -> None:
        """Stop or go on reading, as the outbox is full or not."""
        is_reading = not self._outbox.is_store_full
        if is_reading is not self._is_reading:
            self._is_reading = is_reading
            for connection in self._by_fd.values():
                self._watch(connection)

    def close(self) -> None:
        """End all connections: the generation is over."""
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()
            self.path.unlink(missing_ok=True)
        for connection in list(self._by_fd.values()):
            self._close(connection)

    def _accept(self, _fd: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            # It has gone again, or no descriptor is free: then it waits.
            return
        if not is_own(sock) or len(self._by_fd) >= self._max_connections:
            sock.close()
            return
        sock.setblocking(False)  # noqa: FBT003  the socket's own method
        self._count += 1
        connection = _Connection(self._count, sock)
        self._by_fd[sock.fileno()] = self._by_number[self._count] = connection
        self._watch(connection)

    def _serve(self, fd: int) -> None:
        connection = self._by_fd.get(fd)
        if connection is None:
            # It was closed after the selector had seen it ready.
            return
        self._write(connection)
        if connection.number not in self._by_number or not self._is_reading:
            return
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._tell(connection, data)
        else:
            self._close(connection)

    def _write(self, connection: _Connection) -> None:
        try:
            while connection.unsent:
                del connection.unsent[: connection.sock.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)
            return
        self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        """Have the loop look for what this connection needs now."""
        events = selectors.EVENT_READ if self._is_reading else 0
        events |= selectors.EVENT_WRITE if connection.unsent else 0
        if events == connection.events:
            return
        if not connection.events:
            self._selector.register(connection.sock, events, self._serve)
        elif events:
            self._selector.modify(connection.sock, events, self._serve)
        else:
            self._selector.unregister(connection.sock)
        connection.events = events

    def _tell(self, connection: _Connection, data: bytes) -> None:
        self._outbox.relay(Relayed(self._epoch, connection.number, data))

    def _close(self, connection: _Connection) -> None:
        if self._by_number.pop(connection.number, None) is not None:
            if connection.events:
                self._selector.unregister(connection.sock)
            del self._by_fd[connection.sock.fileno()]
            connection.sock.close()
            self._tell(connection, b"")
