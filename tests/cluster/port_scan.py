"""Finds the TCP ports of some addresses that take a connection: all ports are tried.

``python -m tests.cluster.port_scan ADDRESS...`` writes a line for each: the address and
the port. It sends nothing there.
"""

import errno
import os
import select
import socket
import sys
from collections.abc import Iterator

PORTS = range(1, 1 << 16)
NUM_AT_ONCE = 256
LIMIT_S = 8.0
"""For an answer; the kernel sends again what was lost after a second and after three.
A port that does not answer by then is not open."""


def open_ports(address: str) -> Iterator[int]:
    """Yield the ports of a numeric address that take a connection."""
    for index in range(0, len(PORTS), NUM_AT_ONCE):
        yield from _open_among(PORTS[index : index + NUM_AT_ONCE], address)


def _open_among(ports: range, address: str) -> Iterator[int]:
    """Try some ports, all at once."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    trying: dict[int, tuple[socket.socket, int]] = {}
    with select.epoll() as epoll:
        for port in ports:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            code = sock.connect_ex((address, port))
            if code == errno.EINPROGRESS:
                trying[sock.fileno()] = sock, port
                epoll.register(sock, select.EPOLLOUT)
            elif _is_taken(sock, code):
                yield port
        while trying:
            answered = epoll.poll(LIMIT_S)
            if not answered:
                for sock, _ in trying.values():
                    sock.close()
                return
            for fd, _ in answered:
                sock, port = trying.pop(fd)
                if _is_taken(sock, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                    yield port


def _is_taken(sock: socket.socket, code: int) -> bool:
    """Return whether somebody took the connection, which is closed.

    Raises:
        OSError: It was neither taken nor refused.
    """
    with sock:
        if code == errno.ECONNREFUSED:
            return False
        if code:
            raise OSError(code, os.strerror(code))
        # On the loopback the kernel may choose the very port that is tried as this end
        # of the connection, which then leads to itself: nobody listens there.
        return sock.getsockname() != sock.getpeername()


def main() -> None:
    """Scan the addresses that the arguments name."""
    for address in sys.argv[1:]:
        for port in open_ports(address):
            print(address, port)  # noqa: T201 - whoever started it reads it


if __name__ == "__main__":
    main()
