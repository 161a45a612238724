"""Hosts as the user names them, whether one is this machine, and their ranks."""

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

SLOTS_OPEN = -1
"""Nobody said how many: the host's GPUs, else its cores where it is alone, else 1."""
SLOTS_GPUS = -2  # as many as the host has GPUs, and it must have one
SLOTS_CORES = -3  # as many as the host has cores
MAX_SLOTS = 1 << 16
LOOK_UP_S = 6.0
"""How long all names may take: a question that is lost is asked again after 5 s."""
_MAX_LOOKING_UP = 64
LOOK_S = 0.05  # between two looks at whether they are looked up


class Host(NamedTuple):
    """A host that ranks may run on."""

    name: str  # host name or numeric address, as ssh is given it and as it is shown
    # ranks that it takes; 0 for a host that is kept out, ``SLOTS_OPEN`` where nobody
    # said, or another of the negative ones above
    slots: int = SLOTS_OPEN
    user: str = ""  # whom to log in as, or empty
    port: int = 0  # of its ssh, 0 for ssh's own choice
    address: str = ""  # numeric address that the ranks are to use, or empty
    # GPUs that its ranks may use, as ``CUDA_VISIBLE_DEVICES`` has them; empty for all
    gpus: tuple[str, ...] = ()
    named_at: str = ""  # where it is named, for messages: ``hosts.txt line 3``


def is_here(host: Host, addresses: Sequence[str] | None = None) -> bool:
    """Return whether a host is this machine, and its user the one here."""
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
    """Names that are looked up by threads, side by side."""

    def __init__(self, names: Sequence[str]) -> None:
        # none for an unknown name; nothing for one that nobody answers
        self.answers: dict[str, tuple[str, ...]] = {}
        self._asked = iter(names)
        self._ends_at_s = time.monotonic() + LOOK_UP_S
        num_threads = min(_MAX_LOOKING_UP, len(names))
        # The system's resolver cannot be called off, so that nobody waits for these.
        self._threads = [
            Thread(target=self._work, daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        for name in self._asked:
            # Anything but the answer that there is no such name is no answer.
            with suppress(OSError):
                self.answers[name] = resolve(name)

    def is_over(self, wait_s: float = 0.0) -> bool:
        """Wait for a moment; say whether all names are answered or time is up."""
        alive = [thread for thread in self._threads if thread.is_alive()]
        if alive and time.monotonic() < self._ends_at_s:
            alive[0].join(wait_s)
            return False
        return True


def resolve(name: str) -> tuple[str, ...]:
    """Return a name's addresses; ``OSError`` if no name server answers."""
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
    """The ranks of one host."""

    host: Host
    ranks: range  # at least one, consecutive
    places: tuple[RankResources, ...] = ()  # of each rank, once they are known
    env: Mapping[str, str] = MappingProxyType({})  # variables of all of them


def take_each(hosts: Sequence[Host], num_each: int | None) -> tuple[Host, ...]:
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


def kept_out(hosts: Sequence[Host]) -> str:
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
    """Give every host its ranks: block by block, in the order of the hosts."""
    usable = [host for host in hosts if host.slots]
    if not usable:
        raise UsageError(
            f"hosts must have a slot, got 0 slots for {kept_out(hosts)}. Give one of "
            "them slots."
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
            f"({start})\nThat is {list_first(there, sign=',')}. Give the hosts more "
            f"slots, as in -H {shares[0].host.name}:{least} or --slots, or start fewer "
            "ranks."
        )
    return tuple(shares)
