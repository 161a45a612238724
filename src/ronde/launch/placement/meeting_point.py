"""Where the ranks of several hosts meet, and by which interface each host takes part.

Nothing is asked of anybody here: the controller brings what the agents said.
"""

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ronde.addresses import InterfaceAddress, choose_address, family_of
from ronde.errors import HostError, UsageError

_NUM_NAMED = 8


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """A host's network as its own agent and the user see it.

    Attributes:
        name: As it is shown.
        interfaces: All addresses that other hosts might reach it by.
        address: The one that the user named for it, or empty.
        mbit_per_s: Rates of its interfaces, by name, as far as they are known.
    """

    name: str
    interfaces: tuple[InterfaceAddress, ...]
    address: str = ""
    mbit_per_s: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where the ranks meet.

    Attributes:
        address: An address of rank 0's host.
        interfaces: By which interface each host takes part, in the order of the hosts.
    """

    address: str
    interfaces: tuple[str, ...]

    def environment(self, host: int, user: Mapping[str, str]) -> dict[str, str]:
        """Return what tells the ranks of a host which interface is theirs.

        Args:
            host: Its index.
            user: What the ranks have anyway: what is said there stays.
        """
        if len(self.interfaces) == 1:
            return {}
        interface = self.interfaces[host]
        # NCCL takes a name for the beginning of one, unless "=" is put before it.
        told = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        return {name: value for name, value in told.items() if name not in user}


def find_candidates(
    hosts: Sequence[HostNetwork], interfaces: Sequence[str] = ()
) -> tuple[InterfaceAddress, ...]:
    """Return the addresses of the first host that the others might meet it at.

    An address that another host has as well, as of a bridge that containers use, leads
    everybody to themselves and is left out.

    Args:
        hosts: All hosts of the job, rank 0's first; at least two.
        interfaces: Names that the user allows, or none for any.

    Raises:
        UsageError: There is no such address, or it is not the host's.
    """
    head = hosts[0]
    _require_own_addresses(hosts)
    if head.address:
        named = _plain(head.address)
        return tuple(each for each in head.interfaces if each.address == named)
    if interfaces:
        _require_interfaces(hosts, interfaces)
    owners = Counter(
        address for host in hosts for address in {i.address for i in host.interfaces}
    )
    found = tuple(
        each
        for each in head.interfaces
        if owners[each.address] == 1
        and (not interfaces or each.interface in interfaces)
    )
    if not found:
        raise UsageError(
            f"{head.name} must have a network address of its own that other hosts can "
            f"reach, got {_listed(head.interfaces)}. Name one with addr= in the host "
            "file, or let another host come first."
        )
    return found


def choose_meeting_point(
    hosts: Sequence[HostNetwork],
    candidates: Sequence[InterfaceAddress],
    sources: Sequence[Sequence[str]],
    interfaces: Sequence[str] = (),
) -> MeetingPoint:
    """Return the candidate that all hosts reach best: see ``choose_address``.

    Args:
        hosts: As for ``find_candidates``.
        candidates: What that returned.
        sources: For every host but the first, its own address towards each candidate,
            empty where it has no route there.
        interfaces: As for ``find_candidates``.

    Raises:
        HostError: There is none that all hosts reach.
    """
    best = choose_address(candidates, sources, hosts[0].mbit_per_s)
    if best is None:
        raise _no_route(hosts, candidates, sources)
    others = (
        _interface_of(host, own[best], interfaces)
        for host, own in zip(hosts[1:], sources, strict=True)
    )
    chosen = candidates[best]
    return MeetingPoint(chosen.address, (chosen.interface, *others))


def require_answers(
    hosts: Sequence[HostNetwork],
    point: MeetingPoint,
    port: int,
    sources: Sequence[str],
) -> None:
    """Refuse a meeting point that does not answer everybody.

    Args:
        hosts: As for ``find_candidates``.
        point: Where they are to meet.
        port: The port that is held there.
        sources: Of every host but the first, what ``locate`` found with that port.

    Raises:
        HostError: There are hosts that got no answer.
    """
    silent = [h.name for h, own in zip(hosts[1:], sources, strict=True) if not own]
    if silent:
        where = f"{point.address} port {port}"
        raise HostError(
            f"{hosts[0].name} must answer all hosts at {where}, but does not answer "
            f"{_named(silent)}. A firewall may be between them: open it, or choose a "
            "port with --master-port or a network with --interface.",
        )


def _require_own_addresses(hosts: Sequence[HostNetwork]) -> None:
    for host in hosts:
        own = {i.address for i in host.interfaces}
        if host.address and _plain(host.address) not in own:
            raise UsageError(
                f"addr= of {host.name} must be an address of that host, got "
                f"{host.address!r}. It has {_listed(host.interfaces)}."
            )


def _require_interfaces(
    hosts: Sequence[HostNetwork], interfaces: Sequence[str]
) -> None:
    lacking = [
        host
        for host in hosts
        if not host.address
        and not {i.interface for i in host.interfaces} & {*interfaces}
    ]
    if lacking:
        first = lacking[0]
        raise UsageError(
            "--interface must name one that is up and has an address on every host, "
            f"got {','.join(interfaces)}, which {_named([h.name for h in lacking])} "
            f"lacks. {first.name} has {_listed(first.interfaces)}."
        )


def _no_route(
    hosts: Sequence[HostNetwork],
    candidates: Sequence[InterfaceAddress],
    sources: Sequence[Sequence[str]],
) -> HostError:
    lost = [
        [h.name for h, own in zip(hosts[1:], sources, strict=True) if not own[index]]
        for index in range(len(candidates))
    ]
    index = min(range(len(candidates)), key=lambda i: len(lost[i]))
    head, tried = hosts[0].name, _listed(candidates)
    return HostError(
        f"all hosts must have a route to {head}, but {_named(lost[index])} has none to "
        f"{candidates[index].address}. Tried: {tried}. Name an address of {head} that "
        "all reach with addr= in the host file, or let another host come first.",
    )


def _interface_of(host: HostNetwork, source: str, interfaces: Sequence[str]) -> str:
    """Return the name of a host's interface: the user's word, else its route's."""
    by_address = {each.address: each.interface for each in host.interfaces}
    if host.address:
        return by_address[_plain(host.address)]
    named = [n for n in interfaces if n in by_address.values()]
    return named[0] if named else by_address.get(source, "")


def _plain(address: str) -> str:
    """Return a numeric address as the kernel writes it; what is none stays."""
    family = family_of(address)
    try:
        return socket.inet_ntop(family, socket.inet_pton(family, address))
    except OSError:
        return address


def _listed(interfaces: Sequence[InterfaceAddress]) -> str:
    return ", ".join(f"{i.address} ({i.interface})" for i in interfaces) or "none"


def _named(names: Sequence[str]) -> str:
    more = len(names) - _NUM_NAMED
    named = ", ".join(names[:_NUM_NAMED])
    return f"{named} and {more} more" if more > 0 else named
