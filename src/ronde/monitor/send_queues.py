"""The send queues of ranks' TCP connections, which show the slow link of a cluster.

If a link is slow, the data for it waits in the send queues of the connections over it,
and those of other connections are empty. If the receiver is late, its own queue fills.
"""

import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ronde.processes import read_text

_EVERY_S = 0.01
_ESTABLISHED = "01"
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_MOST = 64  # in an answer
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address as one of IPv6


class SendQueue(NamedTuple):
    """One TCP connection of a rank to another host; its end here is ``local``."""

    local: str
    remote: str
    sending: float  # share of the time in which data waited to be sent or acknowledged
    unread: float  # share of the time in which received data waited for this rank


def sample_queues(pids: Iterable[int], ends_s: float) -> tuple[SendQueue, ...]:
    """Sample the connections of processes until a time of the monotonic clock."""
    pids = list(pids)
    if not pids:
        return ()
    inodes = {inode for pid in pids for inode in _inodes(pid)}
    sending, unread, num_samples = Counter[_Ends](), Counter[_Ends](), 0
    while True:
        num_samples += 1
        for ends, sent, received in _read_connections(pids[0], inodes):
            sending[ends] += sent > 0
            unread[ends] += received > 0
        if (left_s := ends_s - time.monotonic()) <= 0.0:
            break
        time.sleep(min(_EVERY_S, left_s))
    return tuple(
        SendQueue(*ends, count / num_samples, unread[ends] / num_samples)
        for ends, count in sending.most_common(_MOST)
    )


_Ends = tuple[str, str]
"""The addresses of both ends of a connection, this host's first."""


def _inodes(pid: int) -> list[str]:
    found: list[str] = []
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                match = _SOCKET.fullmatch(str(link.readlink()))
                found += [match[1]] if match else []
    return found


def _read_connections(pid: int, inodes: set[str]) -> Iterable[tuple[_Ends, int, int]]:
    """Yield the ends of connections, and the bytes in their queues.

    They are of the network namespace of a process.
    """
    for table in ("tcp", "tcp6"):
        for line in read_text(f"/proc/{pid}/net/{table}").splitlines()[1:]:
            fields = line.split()
            if fields[3] != _ESTABLISHED or fields[9] not in inodes:
                continue
            local, remote = map(_address, fields[1:3])
            if local.rpartition(":")[0] != remote.rpartition(":")[0]:
                sent, received = fields[4].split(":")
                yield (local, remote), int(sent, 16), int(received, 16)


def _address(text: str) -> str:
    """Return ``10.0.0.1:80`` for the kernel's words in hexadecimal digits."""
    words, _, port = text.partition(":")
    raw = bytes.fromhex(words)
    if sys.byteorder == "little":
        raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    raw = raw.removeprefix(_MAPPED)
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return f"{socket.inet_ntop(family, raw)}:{int(port, 16)}"
