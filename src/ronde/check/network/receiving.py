"""The side that is reached: ports that answer whoever knows a token.

A frame on a TCP connection is a kind, a length and as many bytes; an ``ECHO`` comes
back as it is, of a ``SINK`` one byte says that it is there. A datagram is answered by
its size. All is over when the program on the host ends, or a few seconds pass.
"""

import os
import selectors
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

TOKEN_BYTES = 16
ECHO, SINK = 1, 2
FRAME = struct.Struct("!BI")
ACK = struct.Struct("!H")
_MAX_FRAME_BYTES = 16 << 20
_CHUNK_BYTES = 64 << 10
_MAX_DATAGRAM_BYTES = 65535
_IDLE_S = 5.0
_MAX_CONNECTIONS = 512


@dataclass(frozen=True, slots=True)
class Reception:
    """Sockets that are being served.

    Attributes:
        token: What others have to begin with.
        ports: The TCP ports.
        udp_port: The UDP port.
        busy: Ports that were asked for and are in use.
        heard: How many datagrams came, by the sender's name.
        listeners: The TCP sockets, and then the UDP socket.
        bell: Rung to end it.
        ended: Set when all are closed.
    """

    token: bytes
    ports: tuple[int, ...]
    udp_port: int
    busy: tuple[int, ...]
    heard: dict[str, int]
    listeners: tuple[socket.socket, ...]
    bell: tuple[int, int]
    ended: threading.Event

    def close(self) -> None:
        """Let nobody in any more."""
        os.close(self.bell[1])
        self.ended.wait(_IDLE_S)


def receive(token: bytes, num_ports: int, ports: Sequence[int]) -> Reception:
    """Open ports on all addresses and serve them, until ``close``.

    Args:
        token: What others have to begin with; ``TOKEN_BYTES`` long.
        num_ports: How many that the kernel chooses.
        ports: Which besides; those in use are left alone.
    """
    listeners: list[socket.socket] = []
    busy: list[int] = []
    for port in (*[0] * num_ports, *ports):
        try:
            listeners.append(_open(socket.SOCK_STREAM, port))
        except OSError:
            busy.append(port)
    datagrams = _open(socket.SOCK_DGRAM, 0)
    reception = Reception(
        token=token,
        ports=tuple(each.getsockname()[1] for each in listeners),
        udp_port=datagrams.getsockname()[1],
        busy=tuple(busy),
        heard={},
        listeners=(*listeners, datagrams),
        bell=os.pipe(),
        ended=threading.Event(),
    )
    threading.Thread(target=_serve, args=(reception,), daemon=True).start()
    return reception


def _open(kind: socket.SocketKind, port: int) -> socket.socket:
    """Return a socket on all addresses of both families, as far as there are two."""
    try:
        return _bound(socket.AF_INET6, kind, port)
    except OSError:
        return _bound(socket.AF_INET, kind, port)


def _bound(family: int, kind: socket.SocketKind, port: int) -> socket.socket:
    opened = socket.socket(family, kind)
    try:
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if kind == socket.SOCK_STREAM:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(("", port))
        if kind == socket.SOCK_STREAM:
            opened.listen(_MAX_CONNECTIONS)
    except BaseException:
        opened.close()
        raise
    opened.settimeout(0)
    return opened


def _serve(reception: Reception) -> None:
    bell = reception.bell[0]
    with selectors.DefaultSelector() as selector:
        for each in (*reception.listeners, bell):
            selector.register(each, selectors.EVENT_READ)
        is_open = True
        while is_open:
            for key, _ in selector.select():
                if key.fileobj == bell:
                    is_open = False
                else:
                    _take(reception, cast("socket.socket", key.fileobj))
    for each in reception.listeners:
        each.close()
    os.close(bell)
    reception.ended.set()


def _take(reception: Reception, ready: socket.socket) -> None:
    """Take a connection or a datagram; what went away meanwhile is let go."""
    try:
        if ready.type == socket.SOCK_DGRAM:
            _acknowledge(reception, ready)
        elif threading.active_count() < _MAX_CONNECTIONS:
            connection, _ = ready.accept()
            given = connection, reception.token
            threading.Thread(target=_answer, args=given, daemon=True).start()
        else:
            ready.accept()[0].close()
    except OSError:
        return


def _acknowledge(reception: Reception, ready: socket.socket) -> None:
    datagram, sender = ready.recvfrom(_MAX_DATAGRAM_BYTES)
    if datagram[:TOKEN_BYTES] == reception.token:
        name = datagram[TOKEN_BYTES:].partition(b"\0")[0].decode(errors="replace")
        reception.heard[name] = reception.heard.get(name, 0) + 1
        ready.sendto(reception.token + ACK.pack(len(datagram)), sender)


def _answer(connection: socket.socket, token: bytes) -> None:
    with connection:
        try:
            connection.settimeout(_IDLE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if receive_exactly(connection, TOKEN_BYTES) != token:
                return
            connection.sendall(token)
            while True:
                _answer_frame(connection)
        except OSError:
            return


def _answer_frame(connection: socket.socket) -> None:
    kind, left = FRAME.unpack(receive_exactly(connection, FRAME.size))
    if left > _MAX_FRAME_BYTES:
        raise ConnectionAbortedError
    while left:
        chunk = _receive(connection, left)
        left -= len(chunk)
        if kind == ECHO:
            connection.sendall(chunk)
    if kind == SINK:
        connection.sendall(b"\1")


def receive_exactly(connection: socket.socket, size_bytes: int) -> bytes:
    """Return so many bytes.

    Raises:
        OSError: The connection ends or breaks before, or is too slow.
    """
    chunks: list[bytes] = []
    while size_bytes:
        chunks.append(_receive(connection, size_bytes))
        size_bytes -= len(chunks[-1])
    return b"".join(chunks)


def _receive(connection: socket.socket, most_bytes: int) -> bytes:
    chunk = connection.recv(min(most_bytes, _CHUNK_BYTES))
    if not chunk:
        raise ConnectionAbortedError("the other end closes the connection")
    return chunk
