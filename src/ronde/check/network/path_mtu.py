"""How large a packet arrives whole at another host: datagrams that may not be cut."""

import fcntl
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from ronde.addresses import family_of, is_loopback, read_interfaces, source_towards
from ronde.check.network.receiving import ACK, TOKEN_BYTES

_SIOCGIFMTU = 0x8921
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER = 10, 23
_DO_NOT_CUT = 3
"""``IP_PMTUDISC_PROBE``: as large as the interface allows, whatever was learnt."""
_MAX_PACKET_BYTES = 65535
_SIZES_A_ROUND = 24
_TRIES = 3
_WAIT_S = 0.06


class _Receiver(NamedTuple):
    asking: socket.socket
    address: tuple[str, int]
    token: bytes
    begin: bytes


class OwnEnd(NamedTuple):
    """By what a packet to another host leaves.

    Attributes:
        interface: Its name; empty where no route leads there.
        mtu: Its largest packet in bytes; 0 where that is unknown.
    """

    interface: str
    mtu: int


def own_end(address: str) -> OwnEnd:
    """Return the interface that leads to a numeric address."""
    source = source_towards(address)
    name = "lo" if is_loopback(source) else ""
    for each in read_interfaces():
        if each.address == source:
            name = each.interface
    if not name:
        return OwnEnd("", 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("16s24x", name.encode()[:15])
        answer = fcntl.ioctl(asking, _SIOCGIFMTU, request)
    return OwnEnd(name, struct.unpack_from("i", answer, 16)[0])


def measure_mtu(
    address: str, port: int, token: bytes, name: str, own_mtu: int
) -> int | None:
    """Return the largest packet in bytes that arrives, or nothing if none does.

    Args:
        address: Of a host that receives: see ``receiving``.
        port: Its UDP port.
        token: What it wants to see.
        name: Who asks; it takes that down.
        own_mtu: Of the interface that leads there: more is not tried.
    """
    is_ipv6 = family_of(address) == socket.AF_INET6
    headers, least = (48, 1280) if is_ipv6 else (28, 576)
    begin = token + name.encode() + b"\0"
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as asking:
        if is_ipv6:
            asking.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _DO_NOT_CUT)
        else:
            asking.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _DO_NOT_CUT)
        to = _Receiver(asking, (address, port), token, begin)
        most = min(own_mtu, _MAX_PACKET_BYTES)
        sizes = [most]
        passed, lost = 0, most + 1
        while sizes:
            arrived = _try(to, [size - headers for size in sizes])
            passed = max([passed, *(size + headers for size in arrived)])
            lost = min([lost, *(size for size in sizes if size > passed)])
            sizes = _between(max(passed, least - 1), lost)
            if not arrived and lost <= least:
                return None
    # The largest packet of IP is a little less than the loopback interface allows.
    return own_mtu if passed == most else passed or None


def _between(passed: int, lost: int) -> list[int]:
    """Return sizes that part what lies between two into equal steps."""
    inside = lost - passed - 1
    num = min(inside, _SIZES_A_ROUND)
    return [passed + 1 + inside * i // num for i in range(num)]


def _try(to: _Receiver, sizes: Iterable[int]) -> set[int]:
    """Return which sizes of datagrams arrive."""
    wanted, arrived = set(sizes), set[int]()
    for _ in range(_TRIES):
        for size in sorted(wanted - arrived, reverse=True):
            # One that is too large for this host itself is lost like another.
            with suppress(OSError):
                to.asking.sendto(to.begin.ljust(size, b"\0"), to.address)
        due_s = time.monotonic() + _WAIT_S
        while arrived < wanted and (left_s := due_s - time.monotonic()) > 0:
            to.asking.settimeout(left_s)
            # A host of several addresses may answer by another: the token counts.
            with suppress(OSError):
                answer = to.asking.recv(TOKEN_BYTES + ACK.size)
                if answer.startswith(to.token) and len(answer) > TOKEN_BYTES + 1:
                    arrived |= wanted & {*ACK.unpack_from(answer, TOKEN_BYTES)}
        if arrived == wanted:
            break
    return arrived
