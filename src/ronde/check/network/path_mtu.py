"""Measure the largest packet that arrives at another host.

Datagrams with "don't fragment" go to ``reach.ReachServer`` on that host, which replies
to each datagram with its size.
"""

import socket
import struct
import time
from contextlib import suppress

from ronde.addresses import family_of

TOKEN_BYTES = 16
ACK = struct.Struct("!H")
MAX_DATAGRAM_BYTES = 65535
ANSWER_S = 0.06
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER = 10, 23
_PMTUDISC_PROBE = 3  # don't fragment, and ignore the cached path MTU
_SIZES_A_ROUND = 24
_TRIES = 3


def measure_mtu(
    address: str,
    port: int,
    token: bytes,
    name: str,
    own_mtu: int,
    wait_s: float = ANSWER_S,
) -> int | None:
    """Return the size of the largest packet that arrives, or None if none arrives."""
    family = family_of(address)
    headers, least = (28, 576) if family == socket.AF_INET else (48, 1280)
    with socket.socket(family, socket.SOCK_DGRAM) as sending:
        if family == socket.AF_INET:
            sending.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE)
        else:
            sending.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE)
        to, head = (address, port), token + name.encode() + b"\0"
        most = min(own_mtu, MAX_DATAGRAM_BYTES)
        passed, lost, sizes = 0, most + 1, [most]
        while sizes:
            wanted = {size - headers for size in sizes}
            answered = _send_datagrams(sending, to, head, wanted, wait_s)
            arrived = {size + headers for size in answered}
            passed = max([passed, *arrived])
            lost = min([lost, *(size for size in sizes if size > passed)])
            # Next try sizes at equal steps between ``passed`` and ``lost``.
            begin = max(passed, least - 1) + 1
            num = min(lost - begin, _SIZES_A_ROUND)
            sizes = [begin + (lost - begin) * i // num for i in range(num)]
            if not arrived and lost <= least:
                return None
    # On loopback the MTU is a little more than the largest IP packet.
    return own_mtu if passed == most else passed or None


def _send_datagrams(
    sending: socket.socket,
    to: tuple[str, int],
    begin: bytes,
    wanted: set[int],
    wait_s: float,
) -> set[int]:
    arrived, token = set[int](), begin[:TOKEN_BYTES]
    for _ in range(_TRIES):
        for size in sorted(wanted - arrived, reverse=True):
            # A datagram too large for this host's interface counts as lost.
            with suppress(OSError):
                sending.sendto(begin.ljust(size, b"\0"), to)
        due_s = time.monotonic() + wait_s
        while arrived < wanted and (left_s := due_s - time.monotonic()) > 0:
            sending.settimeout(left_s)
            # The answer may come from another address; the token identifies it.
            with suppress(OSError):
                answer = sending.recv(TOKEN_BYTES + ACK.size)
                if answer.startswith(token) and len(answer) > TOKEN_BYTES + 1:
                    arrived |= wanted & {*ACK.unpack_from(answer, TOKEN_BYTES)}
    return arrived
