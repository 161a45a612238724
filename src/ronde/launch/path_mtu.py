"""The largest packet that arrives at another host.

Datagrams that may not be cut go to a program of ronde's there, which answers each by
its size; to any ssh server go segments of TCP, which its kernel acknowledges.
"""

import fcntl
import socket
import struct
import termios
import time
from contextlib import suppress
from typing import NamedTuple

from ronde.addresses import family_of

TOKEN_BYTES = 16
ACK = struct.Struct("!H")
MAX_DATAGRAM_BYTES = 65535
ANSWER_S = 0.06  # for the answers to some datagrams
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER = 10, 23
# ``IP_PMTUDISC_PROBE``: as large as the interface allows, whatever was learnt.
_DO_NOT_CUT = 3
_SIZES_A_ROUND = 24
_TRIES = 3

LEAST_BYTES = 576  # of a packet that every path carries
_CONNECT_S, _BANNER_S, _ACKNOWLEDGED_S, _POLL_S = 2.0, 3.0, 0.8, 0.002
_STEPS_BYTES = (64, 8, 1)
_HAS_TIMESTAMPS, _OPTIONS_AT = 1, 5  # of TCP_INFO
# SSH_MSG_IGNORE with 1,000 bytes (RFC 4253, 6 and 11.2): a server reads on.
_IGNORED = struct.pack("!IBBI", 1012, 6, 2, 1000) + bytes(1006)


def measure_mtu(
    address: str,
    port: int,
    token: bytes,
    name: str,
    own_mtu: int,
    wait_s: float = ANSWER_S,
) -> int | None:
    """Return the largest packet in bytes, up to ``own_mtu``, that arrives."""
    family = family_of(address)
    headers, least = (28, 576) if family == socket.AF_INET else (48, 1280)
    with socket.socket(family, socket.SOCK_DGRAM) as sending:
        if family == socket.AF_INET:
            sending.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _DO_NOT_CUT)
        else:
            sending.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _DO_NOT_CUT)
        to, head = (address, port), token + name.encode() + b"\0"
        most = min(own_mtu, MAX_DATAGRAM_BYTES)
        passed, lost, sizes = 0, most + 1, [most]
        while sizes:
            wanted = {size - headers for size in sizes}
            answered = _send_datagrams(sending, to, head, wanted, wait_s)
            arrived = {size + headers for size in answered}
            passed = max([passed, *arrived])
            lost = min([lost, *(size for size in sizes if size > passed)])
            # Sizes that part what lies between the two into equal steps.
            begin = max(passed, least - 1) + 1
            num = min(lost - begin, _SIZES_A_ROUND)
            sizes = [begin + (lost - begin) * i // num for i in range(num)]
            if not arrived and lost <= least:
                return None
    # The largest packet of IP is a little less than the loopback interface allows.
    return own_mtu if passed == most else passed or None


def _send_datagrams(
    sending: socket.socket,
    to: tuple[str, int],
    begin: bytes,
    wanted: set[int],
    wait_s: float,
) -> set[int]:
    """Send datagrams of some sizes; return which are answered."""
    arrived, token = set[int](), begin[:TOKEN_BYTES]
    for _ in range(_TRIES):
        for size in sorted(wanted - arrived, reverse=True):
            # One that is too large for this host itself is lost like another.
            with suppress(OSError):
                sending.sendto(begin.ljust(size, b"\0"), to)
        due_s = time.monotonic() + wait_s
        while arrived < wanted and (left_s := due_s - time.monotonic()) > 0:
            sending.settimeout(left_s)
            # A host of several addresses may answer by another: the token counts.
            with suppress(OSError):
                answer = sending.recv(TOKEN_BYTES + ACK.size)
                if answer.startswith(token) and len(answer) > TOKEN_BYTES + 1:
                    arrived |= wanted & {*ACK.unpack_from(answer, TOKEN_BYTES)}
    return arrived


class PathSizes(NamedTuple):
    """IP packets to a host, in bytes."""

    arrived: int  # the largest one that arrived
    lost: int  # the smallest one that was lost; 0 for none


def measure_ssh_path(address: str, port: int) -> PathSizes | None:
    """Find the largest packet that an ssh server's kernel acknowledges, to the byte."""
    arrived, lost = LEAST_BYTES, 0
    for step in _STEPS_BYTES:
        with socket.create_connection((address, port), _CONNECT_S) as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.settimeout(_BANNER_S)
            if not line.recv(4).startswith(b"SSH-"):
                return None
            line.sendall(b"SSH-2.0-ronde\r\n")
            arrived, lost = _send_segments(line, arrived, lost, step)
        if not lost:
            break
    return PathSizes(arrived, lost)


def _send_segments(
    line: socket.socket, arrived: int, lost: int, step: int
) -> tuple[int, int]:
    """Send larger and larger packets; return the last that arrives and the next one."""
    tcp_info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
    headers = 40 if line.family == socket.AF_INET else 60
    headers += 12 if tcp_info[_OPTIONS_AT] & _HAS_TIMESTAMPS else 0
    full = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) + headers
    num_sent = 0
    for size in (*range(arrived + step, lost or full, step), lost or full):
        num_bytes = size - headers
        begin = num_sent % len(_IGNORED)
        stream = _IGNORED * (num_bytes // len(_IGNORED) + 2)
        line.sendall(stream[begin : begin + num_bytes])
        num_sent += num_bytes
        if not _is_acknowledged(line):
            return arrived, size
        arrived = size
    return arrived, lost


def _is_acknowledged(line: socket.socket) -> bool:
    """Wait until the other end's kernel has all; TCP sends again after 0.2 s."""
    due_s = time.monotonic() + _ACKNOWLEDGED_S
    while any(fcntl.ioctl(line, termios.TIOCOUTQ, bytes(4))):
        if time.monotonic() > due_s:
            return False
        time.sleep(_POLL_S)
    return True
