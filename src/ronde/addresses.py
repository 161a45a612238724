"""The addresses of this host, and the routes to other hosts.

Every agent imports this module at its start, so it imports only fast standard modules.
"""

import ctypes
import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_WANTED = _IFF_UP | _IFF_RUNNING
_SIOCGIFMTU = 0x8921
_ANY_PORT = 9  # looking up a route needs a port; nothing is sent there


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
    """Return the addresses at which other hosts may reach this one, IPv4 first.

    Leaves out loopback, link-local addresses, and interfaces without a carrier.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.freeifaddrs.argtypes = [_Link]
    first = link = _Link()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs")
    found: list[InterfaceAddress] = []
    try:
        while link:
            node = link.contents
            raw, mask = _raw_address(node.address), _raw_address(node.netmask)
            is_wanted = node.flags & (_WANTED | _IFF_LOOPBACK) == _WANTED
            if is_wanted and raw and not _is_link_local(raw):
                family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
                address, name = socket.inet_ntop(family, raw), node.name
                num_bits = int.from_bytes(mask or b"\xff" * len(raw)).bit_count()
                interface = name.decode(errors="surrogateescape")
                found.append(InterfaceAddress(interface, address, num_bits))
            link = node.next
    finally:
        libc.freeifaddrs(first)
    return tuple(sorted(found, key=lambda each: ":" in each.address))


def _raw_address(pointer: int | None) -> bytes:
    """Return the address in a ``struct sockaddr``; empty if it is no IP address."""
    family = ctypes.c_ushort.from_address(pointer).value if pointer else None
    if pointer and family == socket.AF_INET:
        return ctypes.string_at(pointer + 4, 4)
    if pointer and family == socket.AF_INET6:
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
    """Return the index of a host's best address that all other hosts reach, or None.

    An address reached without a router is best, then IPv4, then the fastest interface.

    Args:
        candidates: The addresses of the host.
        sources: For every other host, its local address on the route to each
            candidate; empty if there is no route.
        mbit_per_s: The speeds of interfaces, by name.
    """
    reached = [i for i in range(len(candidates)) if all(each[i] for each in sources)]

    def rate(index: int) -> tuple[bool, bool, int]:
        interface, address, num_bits = candidates[index]
        networks = {
            _network(a, num_bits) for a in (address, *(s[index] for s in sources))
        }
        return len(networks) > 1, ":" in address, -mbit_per_s.get(interface, 0)

    return min(reached, key=rate, default=None)


def _network(address: str, num_bits: int) -> tuple[socket.AddressFamily, int]:
    family = family_of(address)
    raw = socket.inet_pton(family, address)
    return family, int.from_bytes(raw) >> max(0, 8 * len(raw) - num_bits)


def is_loopback(address: str) -> bool:
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def source_towards(address: str) -> str:
    """Return the local address on the route to an address; empty without a route."""
    family = family_of(address)
    try:
        socket.inet_pton(family, address)  # resolving a name could block
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((address, _ANY_PORT))
            return asking.getsockname()[0].partition("%")[0]
    except OSError:
        return ""


def interface_towards(address: str) -> str:
    """Return the interface on the route to an address; empty without a route."""
    source = source_towards(address)
    named = (each.interface for each in read_interfaces() if each.address == source)
    return "lo" if is_loopback(source) else next(named, "")


def own_mtu_towards(address: str) -> int:
    """Return the MTU of the interface on the route to an address; 0 without a route."""
    name = interface_towards(address)
    if not name:
        return 0
    # Not from sysfs, which may show another network namespace.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("16s24x", name.encode()[:15])
        answer = fcntl.ioctl(asking, _SIOCGIFMTU, request)
    return struct.unpack_from("i", answer, 16)[0]
