"""TCP sockets of this process, found by descriptor.

Used for sockets that a library does not expose: see Note [Gloo's sockets] in
``engines/torch_distributed.py``.
"""

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator, Set as AbstractSet
from contextlib import suppress
from typing import Any

_ATTACH_FILTER = getattr(socket, "SO_ATTACH_FILTER", 26)
# The kernel's struct sock_filter: BPF_RET 0 drops every packet. And its struct
# sock_fprog of this one instruction.
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0), 8)
_DROP_ALL = struct.pack("HP", 1, ctypes.addressof(_DROP))


def find_listening(address: str) -> dict[int, int]:
    """Return the inodes of this process's listening sockets, by descriptor."""
    return {
        descriptor: os.fstat(sock.fileno()).st_ino
        for descriptor, sock in _own_sockets()
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        and sock.getsockname()[0] == address
    }


def shut_down(addresses: AbstractSet[bytes]) -> None:
    for _, sock in _own_sockets() if addresses else ():
        with suppress(OSError):
            ends = _encode(sock.getsockname()), _encode(sock.getpeername())
            if not addresses.isdisjoint(ends):
                sock.shutdown(socket.SHUT_RDWR)


def block_connections(listening: dict[int, int]) -> None:
    """Make the kernel drop all packets to these sockets: see Note [Gloo's sockets]."""
    for sock in _open(listening):
        # A sandbox may not support filters. Then the port stays open.
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, _DROP_ALL)


def address_of(listening: dict[int, int]) -> bytes:
    """Return the first socket's address as text; empty if all sockets are closed."""
    return next((_encode(sock.getsockname()) for sock in _open(listening)), b"")


def _open(inodes: dict[int, int]) -> Iterator[socket.socket]:
    """Yield duplicates of sockets that still have their inode, closed one by one."""
    for fd, inode in inodes.items():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            if os.fstat(sock.fileno()).st_ino == inode:
                yield sock


def _own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield descriptors and duplicates of TCP sockets; close each before the next."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  numbers, not paths
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    yield int(name), sock


def _encode(address: tuple[Any, ...]) -> bytes:
    host, port = address[:2]
    return f"{host} {port}".encode()
