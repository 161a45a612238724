"""Hosts of a job, and the assignment of ranks to them."""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from math import inf
from threading import Thread
from types import MappingProxyType
from typing import NamedTuple

from ronde.addresses import is_loopback, source_towards
from ronde.errors import UsageError
from ronde.topology.machine import RankResources
from ronde.units import list_first

SLOTS_OPEN = -1  # one per GPU; without GPUs one per core of a single host, else 1
SLOTS_GPUS = -2  # one per GPU; the host must have one
SLOTS_CORES = -3  # one per core
MAX_SLOTS = 1 << 16
_LOOK_UP_S = 6.0  # for all names; the resolver repeats a lost query after 5 s
_MAX_LOOKING_UP = 64
LOOK_S = 0.05  # between two checks of a look-up


class Host(NamedTuple):
    """A host that ranks may run on."""

    name: str  # host name or numeric address, for ssh and for messages
    slots: int = SLOTS_OPEN  # 0 for a host that must not be used
    user: str = ""  # for the login, or empty
    port: int = 0  # of its ssh server; 0 for ssh's default
    address: str = ""  # numeric address for the ranks, or empty
    gpus: tuple[str, ...] = ()  # as in ``CUDA_VISIBLE_DEVICES``; empty for all
    named_at: str = ""  # for messages: ``hosts.txt line 3``


def is_here(host: Host, addresses: Sequence[str] | None = None) -> bool:
    if host.port or (host.user and host.user != _own_name()):
        return False
    if host.name in ("localhost", "127.0.0.1", "::1", os.uname().nodename):
        return True
    if addresses is None:
        with suppress(OSError):
            addresses = resolve(host.name)
    return any(is_loopback(a) or source_towards(a) == a for a in addresses or ())


def _own_name() -> str:
    import pwd

    with suppress(KeyError):
        return pwd.getpwuid(os.geteuid()).pw_name
    return ""


class LookUp:
    """Resolves host names in parallel threads."""

    def __init__(self, names: Sequence[str]) -> None:
        # an empty answer for an unknown name; none without a name server
        self.answers: dict[str, tuple[str, ...]] = {}
        self._names = iter(names)
        self._ends_at_s = time.monotonic() + _LOOK_UP_S
        num_threads = min(_MAX_LOOKING_UP, len(names))
        # The resolver cannot be cancelled: never join these.
        self._threads = [
            Thread(target=self._work, daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        for name in self._names:
            with suppress(OSError):
                self.answers[name] = resolve(name)

    def is_over(self, wait_s: float = 0.0) -> bool:
        alive = [thread for thread in self._threads if thread.is_alive()]
        if alive and time.monotonic() < self._ends_at_s:
            alive[0].join(wait_s)
            return False
        return True


def resolve(name: str) -> tuple[str, ...]:
    """Return the addresses of a host name; an empty tuple if the name is unknown.

    Raises OSError if no name server answers.
    """
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except UnicodeError:
        return ()
    except socket.gaierror as error:
        if error.errno not in (socket.EAI_NONAME, socket.EAI_NODATA):
            raise
        return ()
    return tuple(str(each[4][0]) for each in found)


class HostShare(NamedTuple):
    """The ranks that one host runs, and their resources."""

    host: Host
    ranks: range  # at least one, consecutive
    resources: tuple[RankResources, ...] = ()  # of each rank, once known
    env: Mapping[str, str] = MappingProxyType({})  # for all of them


def limit_slots(hosts: Sequence[Host], num_each: int | None) -> tuple[Host, ...]:
    if num_each is None:
        return tuple(hosts)
    for host in hosts:
        if 0 < host.slots < num_each:
            raise UsageError(
                f"--nproc-per-node must be at most the slots of every host, got "
                f"{num_each}, but {_named(host)} has {host.slots}. Start fewer, or "
                "give it more slots."
            )
    return tuple(
        host._replace(slots=num_each) if host.slots else host for host in hosts
    )


def unused_names(hosts: Sequence[Host]) -> str:
    left = [_named(host) for host in hosts if not host.slots]
    return list_first(left) if left else ""


def _named(host: Host) -> str:
    return f"{host.name} ({host.named_at})" if host.named_at else host.name


def hosts_to_ask(
    hosts: Sequence[Host], num_ranks: int | None, min_ranks: int | None = None
) -> tuple[Host, ...]:
    usable = [host for host in hosts if host.slots]
    if all(host.slots > 0 for host in usable):
        shares = allocate(hosts, num_ranks, lambda host: host.slots, min_ranks)
        return tuple(share.host for share in shares)
    sure = accumulate((max(1, host.slots) for host in usable), initial=0)
    return tuple(
        h for h, n in zip(usable, sure, strict=False) if n < (num_ranks or inf)
    )


def allocate(
    hosts: Sequence[Host],
    num_ranks: int | None,
    count_slots: Callable[[Host], int],
    min_ranks: int | None = None,
) -> tuple[HostShare, ...]:
    usable = [host for host in hosts if host.slots]
    if not usable:
        raise UsageError(
            f"all hosts have 0 slots: {unused_names(hosts)}. Give one of them slots."
        )
    if num_ranks is not None and len(usable) == 1 and usable[0].slots == SLOTS_OPEN:
        return (HostShare(usable[0], range(num_ranks)),)
    shares: list[HostShare] = []
    start = 0
    for host in usable:
        if start == num_ranks:
            break
        slots = host.slots if host.slots > 0 else count_slots(host)
        stop = start + slots if num_ranks is None else min(start + slots, num_ranks)
        shares.append(HostShare(host, range(start, stop)))
        start = stop
    least = num_ranks if min_ranks is None else min_ranks
    if least is not None and start < least:
        there = [f"{share.host.name}:{len(share.ranks)}" for share in shares]
        raise UsageError(
            f"Requested more processes ({least}) than there are available slots "
            f"({start})\nThe slots are {list_first(there, sign=',')}. Give the hosts "
            f"more slots, as in -H {shares[0].host.name}:{least} or --slots, or start "
            "fewer ranks."
        )
    return tuple(shares)
