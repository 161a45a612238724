"""Gloo's sockets: on which address they listen, and until when.

Left alone, Gloo looks its own host's name up, which on many a host leads to the
loopback, where no other host reaches it. The way to rank 0 is known to work: the store
is there.

Gloo goes on to listen for as long as its group lives, though nobody is to come any
more, and keeps every connection that comes: some hundred of a stranger's use up the
rank's descriptors, and Gloo ends the process (``accept: Too many open files``). The
socket cannot be closed under Gloo's hands. But a socket filter can have the kernel drop
every packet to it: connections that are there already are sockets of their own.
"""

import ctypes
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store

from ronde.addresses import is_loopback, read_interfaces, source_towards
from ronde.collectives.store import JobStore
from ronde.world.environment import select_variables

T = TypeVar("T")

_ATTACH_FILTER = getattr(socket, "SO_ATTACH_FILTER", 26)
_LAZY = "TORCH_GLOO_LAZY_INIT"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_making = threading.Lock()


# The kernel's struct sock_filter, BPF_RET with 0: no byte of a packet is taken; and the
# struct sock_fprog of this one instruction.
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0), 8)
_DROP_ALL = struct.pack("HP", 1, ctypes.addressof(_DROP))


def make_listening(make: Callable[[], T], address: str) -> tuple[T, dict[int, int]]:
    """Return what is made, and the sockets that listen at an address because of it.

    One thread at a time does this: another's sockets are still waiting for its ranks.
    """
    with _making:
        before = _listening(address)
        made = make()
        after = _listening(address)
    return made, {fd: i for fd, i in after.items() if before.get(fd) != i}


def let_nobody_in(listening: dict[int, int]) -> None:
    """Have the kernel keep all from these sockets; those who are in stay."""
    if select_variables([_LAZY]).get(_LAZY, "0").lower() in ("1", "true", "yes", "y"):
        return  # torch then connects two ranks when they first need it
    for fd, inode in listening.items():
        # A sandbox may have no filters: the port stays open there, and the job goes on.
        with suppress(OSError):
            if os.fstat(fd).st_ino == inode:
                with socket.socket(fileno=os.dup(fd)) as sock:
                    sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, _DROP_ALL)


def _listening(address: str) -> dict[int, int]:
    """Return the inodes of this process's sockets that listen there, by descriptor."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  numbers, not paths
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode) and _listens(int(name), address):
                found[int(name)] = status.st_ino
    return found


def _listens(fd: int, address: str) -> bool:
    with socket.socket(fileno=os.dup(fd)) as sock:
        is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
        return (
            is_tcp
            and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0
            and sock.getsockname()[0] == address
        )


def find_own_address(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return the address of this host that leads to where the ranks meet.

    Empty where the user has named an interface that does not lead there, or where no
    route does: torch then decides. Collective.

    Raises:
        torch.distributed.DistError: Another process did not answer in time.
    """
    own = _own_address(store, rank, size, timeout)
    named = select_variables([_INTERFACE]).get(_INTERFACE)
    if named and not any(
        i.address == own for i in read_interfaces() if i.interface == named
    ):
        return ""
    return own


def _own_address(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return the source of the way to the store, and on its own host what others use.

    All publish how they reach the store's host. There its name may lead to the
    loopback, and only the others know the address.
    """
    target = _find_target(store)
    source = source_towards(target) if target else ""
    is_near = not source or is_loopback(source)
    store.set(f"target/{rank}", "" if is_near else target)
    if not is_near:
        return source
    # The last rank is the likeliest to be on another host.
    for other in reversed([r for r in range(size) if r != rank]):
        key = f"target/{other}"
        # The store's own time-out is not the caller's.
        store.wait([key], timeout)
        address = store.get(key).decode()
        if address and source_towards(address) == address:
            return address
    return source


def _find_target(store: Store) -> str:
    base: Any = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    host = base.address if isinstance(base, JobStore) else getattr(base, "host", "")
    if not host:
        return ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    # In one order on all hosts: Gloo connects no IPv4 to IPv6.
    addresses = sorted((str(entry[4][0]) for entry in found), key=lambda a: ":" in a)
    return next((a for a in addresses if source_towards(a)), "")
