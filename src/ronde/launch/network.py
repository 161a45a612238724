"""Address, port and interfaces for the rendezvous of ranks on several hosts."""

import errno
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ronde.addresses import (
    InterfaceAddress,
    choose_address,
    family_of,
    is_loopback,
    source_towards,
)
from ronde.errors import HostError, LaunchError, UsageError
from ronde.launch.signals import wait_for
from ronde.units import list_first

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_FIRST_EPHEMERAL = 32768
_NUM_BELOW = 16384
_NUM_TRIES = 64
DEADLINE_S = 2.0
_ANSWER_S = 1.5
_ASK_AGAIN_S = 0.25
_SSH_PORT = 22  # any port will do: the kernel answers for a closed one


def hold_port(address: str, port: int = 0) -> socket.socket:
    """Reserve a TCP port (0 for any): bind it without listening.

    With ``SO_REUSEADDR`` rank 0 can still bind it. A port chosen here lies below the
    kernel's ephemeral range, out of the way of outgoing connections.
    """
    if not address or source_towards(address) != address:
        raise UsageError(
            "address of the rendezvous must be a numeric address of this host, got "
            f"{address!r}. Name one with addr= in the host file, or its network with "
            "--interface."
        )
    if port:
        held, code = None, errno.EADDRINUSE
        try:
            # Connections of an earlier job may be in TIME_WAIT.
            held = _bind(address, port) or _bind(address, port, is_shared=True)
        except OSError as error:
            code = error.errno or 0
        if held is None:
            raise UsageError(
                f"--master-port {port} is not free on {address}: "
                f"{os.strerror(code).lower()}. Choose another, or leave the option out."
            )
        return held
    first_ephemeral = _DEFAULT_FIRST_EPHEMERAL
    with suppress(OSError, ValueError, IndexError):
        first_ephemeral = int(_RANGE_FILE.read_text(encoding="ascii").split()[0])
    lowest = max(1024, first_ephemeral - _NUM_BELOW)
    for _ in range(_NUM_TRIES):
        held = None
        if lowest < first_ephemeral:
            offset = int.from_bytes(os.urandom(4), "big") % (first_ephemeral - lowest)
            held = _bind(address, lowest + offset)
        if held := held or _bind(address, 0):
            return held
    raise LaunchError(
        f"no free TCP port was found on {address} in {_NUM_TRIES} tries. Name one "
        "with --master-port."
    )


def _bind(address: str, port: int, *, is_shared: bool = False) -> socket.socket | None:
    with ExitStack() as undo:
        held = undo.enter_context(socket.socket(family_of(address)))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(is_shared))
        try:
            held.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return None
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        undo.pop_all()
        return held


def locate(
    addresses: Sequence[str], port: int, deadline_s: float = DEADLINE_S
) -> tuple[str, ...]:
    """Return this host's source address for the route to each numeric address.

    It is empty if there is no route, if the address is this host's own, or if ``port``
    is not 0 and does not answer within the deadline. A refusal counts as an answer.
    """
    pairs = [(address, source_towards(address)) for address in addresses]
    pairs = [(a, "" if a == own or is_loopback(own) else own) for a, own in pairs]
    if not port:
        return tuple(source for _, source in pairs)
    reached = _reached({a for a, source in pairs if source}, port, deadline_s)
    return tuple(source if address in reached else "" for address, source in pairs)


def find_answering(hosts: Mapping[str, Sequence[str]]) -> frozenset[str]:
    ends_at = time.monotonic() + _ANSWER_S
    found: set[str] = set()
    hosts = {name: own for name, own in hosts.items() if own}
    while time.monotonic() < ends_at and len(found) < len(hosts):
        until_s = time.monotonic() + _ASK_AGAIN_S
        asked = [a for name, own in hosts.items() if name not in found for a in own]
        answers = zip(asked, locate(asked, _SSH_PORT, _ASK_AGAIN_S), strict=True)
        reached = {address for address, source in answers if source}
        found |= {name for name, own in hosts.items() if reached & {*own}}
        if len(found) < len(hosts):
            time.sleep(max(0.0, until_s - time.monotonic()))
    return frozenset(found)


def _reached(addresses: Iterable[str], port: int, deadline_s: float) -> set[str]:
    ends_at = time.monotonic() + deadline_s
    answers = (0, errno.ECONNREFUSED)
    reached: set[str] = set()
    with ExitStack() as sockets:
        trying: dict[int, tuple[socket.socket, str]] = {}
        for address in addresses:
            sock = sockets.enter_context(socket.socket(family_of(address)))
            sock.setblocking(False)  # noqa: FBT003  the socket's own method
            error = sock.connect_ex((address, port))
            if error == errno.EINPROGRESS:
                trying[sock.fileno()] = sock, address
            elif error in answers:
                reached.add(address)
        while trying and (left_s := ends_at - time.monotonic()) > 0:
            for fd in wait_for([], list(trying), left_s):
                sock, address = trying.pop(fd)
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in answers:
                    reached.add(address)
    return reached


class HostNetwork(NamedTuple):
    """A host's network as reported by its agent and the user."""

    name: str
    interfaces: tuple[InterfaceAddress, ...]
    address: str = ""  # of the user's choice, or empty
    mbit_per_s: Mapping[str, int] = MappingProxyType({})  # of interfaces, if known

    @property
    def chosen(self) -> InterfaceAddress | None:
        plain = self.address
        with suppress(OSError):
            family = family_of(plain)
            plain = socket.inet_ntop(family, socket.inet_pton(family, plain))
        return next((each for each in self.interfaces if each.address == plain), None)


class Rendezvous(NamedTuple):
    """An address of rank 0's host, and the interface of each host towards it."""

    address: str
    interfaces: tuple[str, ...]

    def environment(self, host: int, user: Mapping[str, str]) -> dict[str, str]:
        if len(self.interfaces) == 1:
            return {}
        return interface_environment(self.interfaces[host], user)


def interface_environment(interface: str, user: Mapping[str, str]) -> dict[str, str]:
    # With "=" NCCL takes the whole name, else a prefix.
    names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {name: value for name, value in names.items() if name not in user}


def find_candidates(
    hosts: Sequence[HostNetwork], interfaces: Sequence[str] = ()
) -> tuple[InterfaceAddress, ...]:
    head, lacking = hosts[0], list[HostNetwork]()
    for host in hosts:
        if host.address and not host.chosen:
            raise UsageError(
                f"addr= of {host.name} must be an address of that host, got "
                f"{host.address!r}. It has {_listed(host.interfaces)}."
            )
        if not host.address and not any(
            each.interface in interfaces for each in host.interfaces
        ):
            lacking.append(host)
    if head.chosen:
        return (head.chosen,)
    if interfaces and lacking:
        raise UsageError(
            "--interface must name an interface that is up and has an address on every "
            f"host, got {','.join(interfaces)}, which "
            f"{list_first([host.name for host in lacking])} lacks. {lacking[0].name} "
            f"has {_listed(lacking[0].interfaces)}."
        )
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
            f"{head.name} has no address that other hosts can reach. Its addresses: "
            f"{_listed(head.interfaces)}. Name one with addr= in the host file, or "
            "list another host first."
        )
    return found


def choose_rendezvous(
    hosts: Sequence[HostNetwork],
    candidates: Sequence[InterfaceAddress],
    sources: Sequence[Sequence[str]],
    interfaces: Sequence[str] = (),
) -> Rendezvous:
    head, *others = hosts
    best = choose_address(candidates, sources, head.mbit_per_s)
    if best is None:
        num_lost = [sum(not own[i] for own in sources) for i in range(len(candidates))]
        nearest = num_lost.index(min(num_lost))
        lost = _name_silent(others, [own[nearest] for own in sources])
        raise HostError(
            f"no route to {head.name} at {candidates[nearest].address} from {lost}. "
            f"Tried: {_listed(candidates)}. Name an address of {head.name} that all "
            "hosts can reach with addr= in the host file, or list another host first."
        )
    chosen = [candidates[best].interface]
    for host, own in zip(others, sources, strict=True):
        chosen.append(choose_interface(host, own[best], interfaces))
    return Rendezvous(candidates[best].address, tuple(chosen))


def choose_interface(
    host: HostNetwork, source: str, interfaces: Sequence[str] = ()
) -> str:
    by_address = {each.address: each.interface for each in host.interfaces}
    named = [name for name in interfaces if name in by_address.values()]
    by_route = by_address.get(source, "")
    return host.chosen.interface if host.chosen else (*named, by_route)[0]


def require_answers(
    hosts: Sequence[HostNetwork], point: Rendezvous, port: int, sources: Sequence[str]
) -> None:
    if silent := _name_silent(hosts[1:], sources):
        raise HostError(
            f"{hosts[0].name} does not answer {silent} at {point.address} port {port}. "
            "A firewall may be between them: open it, or choose a port with "
            "--master-port or a network with --interface."
        )


def _name_silent(hosts: Sequence[HostNetwork], sources: Sequence[str]) -> str:
    return list_first([h.name for h, s in zip(hosts, sources, strict=True) if not s])


def _listed(interfaces: Sequence[InterfaceAddress]) -> str:
    return ", ".join(f"{i.address} ({i.interface})" for i in interfaces) or "none"
