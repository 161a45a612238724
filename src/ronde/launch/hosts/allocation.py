"""From hosts with slots to ranks with hosts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.launch.hosts.host import SLOTS_OPEN, Host


class HostShare(NamedTuple):
    """The ranks of one host."""

    host: Host
    ranks: range  # at least one, consecutive


def take_each(hosts: Sequence[Host], num_each: int | None) -> tuple[Host, ...]:
    """Have every host that is not kept out take the same number of ranks."""
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
        replace(host, slots=num_each) if host.slots else host for host in hosts
    )


def kept_out(hosts: Sequence[Host]) -> str:
    """Name the hosts that have 0 slots and where that is said; empty without any."""
    named = [_named(host) for host in hosts if not host.slots]
    more = f" and {len(named) - 8} more" if len(named) > 8 else ""
    return ", ".join(named[:8]) + more


def _named(host: Host) -> str:
    return f"{host.name} ({host.said_at})" if host.said_at else host.name


def hosts_to_ask(
    hosts: Sequence[Host], num_ranks: int | None, min_ranks: int | None = None
) -> tuple[Host, ...]:
    """Return the hosts that may get ranks, in their order."""
    usable = [host for host in hosts if host.slots]
    if all(host.slots > 0 for host in usable):
        shares = allocate(hosts, num_ranks, lambda host: host.slots, min_ranks)
        return tuple(share.host for share in shares)
    asked: list[Host] = []
    sure = 0
    for host in usable:
        if num_ranks is not None and sure >= num_ranks:
            break
        asked.append(host)
        sure += max(1, host.slots)
    return tuple(asked)


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
        raise UsageError(_too_many(least, start, shares))
    return tuple(shares)


def _too_many(num_ranks: int, slots: int, shares: Sequence[HostShare]) -> str:
    shown = [f"{share.host.name}:{len(share.ranks)}" for share in shares[:8]]
    more = f" and {len(shares) - 8} more" if len(shares) > 8 else ""
    return (
        f"Requested more processes ({num_ranks}) than there are available slots "
        f"({slots})\nThat is {','.join(shown)}{more}. Give the hosts more slots, as in "
        f"-H {shares[0].host.name}:{num_ranks} or --slots, or start fewer ranks."
    )
