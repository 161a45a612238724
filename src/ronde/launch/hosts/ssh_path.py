"""Diagnosis of an ssh that hangs because large packets are lost on the path.

TCP connects and the server's first line arrives, in small packets. The key exchange
has packets of full size, so it hangs. To find the largest size that arrives, TCP
segments are sent to the server, whose kernel acknowledges those that arrive.
"""

import fcntl
import os
import signal
import socket
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from ronde.addresses import interface_towards, own_mtu_towards
from ronde.errors import Failure
from ronde.launch.host import Host

LEAST_BYTES = 576  # of a packet that every path carries
_ASK_S, _CONNECT_S = 2.0, 2.0
_BANNER_S, _ACKNOWLEDGED_S, _POLL_S = 3.0, 0.8, 0.002
_STEPS_BYTES = (64, 8, 1)
_HAS_TIMESTAMPS, _OPTIONS_AT = 1, 5  # of TCP_INFO
# SSH_MSG_IGNORE with 1,000 bytes (RFC 4253, 6 and 11.2): a server reads on.
_IGNORED = struct.pack("!IBBI", 1012, 6, 2, 1000) + bytes(1006)
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}


def explain_silence(host: Host, client: Sequence[str]) -> Failure | None:
    with suppress(OSError, subprocess.SubprocessError):
        if (server := _find_server(host, client)) is not None:
            return _explain(*server)
    return None


def _find_server(host: Host, client: Sequence[str]) -> tuple[str, int] | None:
    with subprocess.Popen(
        [*client, "-G", "--", host.name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as ssh:
        try:
            printed, _ = ssh.communicate(timeout=_ASK_S)
        except subprocess.TimeoutExpired:
            os.killpg(ssh.pid, signal.SIGKILL)  # the configuration may run commands
            raise
    lines = (line.partition(" ") for line in printed.splitlines())
    settings = {name: value for name, _, value in lines}
    proxies = (settings.get(f"proxy{way}", "none") for way in ("command", "jump"))
    if not settings.keys() >= {"hostname", "port"} or {*proxies} != {"none"}:
        return None
    name, port = settings["hostname"], int(settings["port"])
    family = _FAMILIES.get(settings.get("addressfamily", ""), socket.AF_UNSPEC)
    found = socket.getaddrinfo(name, port, family, socket.SOCK_STREAM)
    for *_, address in found:
        server = str(address[0]), port
        with suppress(OSError), socket.create_connection(server, _CONNECT_S):
            return server
    return None


def _explain(address: str, port: int) -> Failure | None:
    sizes = measure_ssh_path(address, port)
    if sizes is None:
        return None
    name, mtu = interface_towards(address), own_mtu_towards(address)
    stands = "ssh connects, but the key exchange hangs"
    if sizes.lost == 0:
        cause = f"packets of {sizes.arrived} bytes arrive there, those back may be lost"
        most = LEAST_BYTES
    else:
        cause = f"packets above {sizes.arrived} bytes to it are lost"
        most = sizes.arrived
    return Failure(
        f"{stands}: {cause}, and the MTU of {name} is {mtu}",
        f"ip link set dev {name} mtu {max(1280, most)}  # as root on this machine; or "
        f"give switches and tunnels between them {mtu}, and let ICMP 'too big' through",
    )


class PathSizes(NamedTuple):
    """Sizes in bytes of IP packets that arrived or were lost on the way to a host."""

    arrived: int  # the largest that arrived
    lost: int  # the smallest that was lost; 0 for none


def measure_ssh_path(address: str, port: int) -> PathSizes | None:
    """Measure the largest packet that reaches a server; None if it is no ssh server."""
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
    due_s = time.monotonic() + _ACKNOWLEDGED_S
    while any(fcntl.ioctl(line, termios.TIOCOUTQ, bytes(4))):
        if time.monotonic() > due_s:
            return False
        time.sleep(_POLL_S)
    return True
