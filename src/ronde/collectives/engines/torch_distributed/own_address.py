"""Which of this host's addresses Gloo is to use where the ranks are on several hosts.

Left alone, Gloo looks its own host's name up, which on many a host leads to the
loopback, where no other host reaches it. The way to rank 0 is known to work: the store
is there.
"""

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store

from ronde.addresses import is_loopback, read_interfaces, source_towards
from ronde.collectives.store import JobStore
from ronde.world.environment import select_variables

_INTERFACE = "GLOO_SOCKET_IFNAME"


def find_own_address(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return the address of this host that leads to where the ranks meet.

    Empty where the user has named an interface that does not lead there, or where no
    route does: torch then decides. Collective.

    Args:
        store: Where the ranks meet, empty under the keys used here.
        rank: This process.
        size: Number of processes.
        timeout: How long to wait for what another process tells.

    Raises:
        torch.distributed.DistError: Another process did not tell in time.
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

    All tell how they reach the store's host. There its name may lead to the loopback,
    and only the others know the address.
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
        told = store.get(key).decode()
        if told and source_towards(told) == told:
            return told
    return source


def _find_target(store: Store) -> str:
    """Return the numeric address of the store's host, as this host knows it."""
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
