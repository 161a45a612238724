"""This host's own addresses, and which of them a packet to another host leaves by.

Every agent imports this at its start: it takes the standard library's light part only.
"""

import ctypes
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_NEEDED = _IFF_UP | _IFF_RUNNING
_ANY_PORT = 9  # nothing is sent there, but a route is asked for with a port


class InterfaceAddress(NamedTuple):
    """One numeric address of one interface."""

    interface: str
    address: str  # IPv4 or IPv6, without a scope; never loopback
    prefix_length: int  # bits of its network


class _Node(ctypes.Structure):
    """The C library's ``struct ifaddrs``."""


_Link = ctypes.POINTER(_Node)
_Node._fields_ = [
    ("next", _Link),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
]


def read_interfaces() -> tuple[InterfaceAddress, ...]:
    """Return the addresses that other hosts may reach this one by, IPv4 first.

    None are of loopback, of interfaces without a carrier, or link-local.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.freeifaddrs.argtypes = [_Link]
    first = _Link()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs")
    try:
        found = list(_addresses(first))
    finally:
        libc.freeifaddrs(first)
    return tuple(sorted(found, key=lambda each: ":" in each.address))


def _addresses(link: Any) -> Iterator[InterfaceAddress]:  # noqa: ANN401  ctypes' own
    while link:
        node = link.contents
        is_of_use = node.flags & _NEEDED == _NEEDED and not node.flags & _IFF_LOOPBACK
        raw = _raw_address(node.address) if is_of_use else b""
        if raw and not _is_link_local(raw):
            family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
            netmask = _raw_address(node.netmask) or b"\xff" * len(raw)
            yield InterfaceAddress(
                interface=node.name.decode(errors="surrogateescape"),
                address=socket.inet_ntop(family, raw),
                prefix_length=int.from_bytes(netmask, "big").bit_count(),
            )
        link = node.next


def _raw_address(pointer: int | None) -> bytes:
    """Return the address in a ``struct sockaddr``; empty where it is no IP address."""
    if not pointer:
        return b""
    family = ctypes.c_ushort.from_address(pointer).value
    if family == socket.AF_INET:
        return ctypes.string_at(pointer + 4, 4)
    if family == socket.AF_INET6:
        return ctypes.string_at(pointer + 8, 16)
    return b""


def _is_link_local(raw: bytes) -> bool:
    if len(raw) == 4:
        return raw[:2] == b"\xa9\xfe"
    return raw[0] == 0xFE and raw[1] & 0xC0 == 0x80


def choose_address(
    candidates: Sequence[InterfaceAddress],
    sources: Sequence[Sequence[str]],
    mbit_per_s: Mapping[str, int],
) -> int | None:
    """Return the index of the address of one host that all others reach best, or None.

    Best is one without a router between, then IPv4, then the fastest interface.
    ``sources`` has, for every other host, its own address towards each candidate, empty
    where it has no route there.
    """
    reached = [i for i in range(len(candidates)) if all(each[i] for each in sources)]

    def rate(index: int) -> tuple[bool, bool, int]:
        candidate = candidates[index]
        is_near = all(_is_neighbour(candidate, each[index]) for each in sources)
        speed = mbit_per_s.get(candidate.interface, 0)
        return not is_near, ":" in candidate.address, -speed

    return min(reached, key=rate, default=None)


def _is_neighbour(candidate: InterfaceAddress, source: str) -> bool:
    family = family_of(candidate.address)
    if family != family_of(source):
        return False
    raw = [socket.inet_pton(family, a) for a in (candidate.address, source)]
    here, there = (int.from_bytes(each, "big") for each in raw)
    return (here ^ there) >> (8 * len(raw[0]) - candidate.prefix_length) == 0


def is_loopback(address: str) -> bool:
    """Return whether a numeric address never leaves its host."""
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def source_towards(address: str) -> str:
    """Return the own address towards a numeric one; empty without a route there."""
    family = family_of(address)
    try:
        socket.inet_pton(family, address)  # a name would be looked up, which may take
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((address, _ANY_PORT))
            return asking.getsockname()[0].partition("%")[0]
    except OSError:
        return ""
