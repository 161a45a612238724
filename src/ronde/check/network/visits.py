"""Who reaches whom by TCP, with what size of packets; streams between two hosts.

Each host opens ports that answer whoever knows its token. A frame on a TCP connection
is a length and as many bytes; one byte comes back when all are there. A datagram, which
may not be cut on its way, is answered by its size. All is over when the program on the
host ends, or a few seconds pass.
"""

import fcntl
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import cast

from ronde.addresses import family_of, is_loopback, read_interfaces, source_towards
from ronde.check.check import Value
from ronde.check.hosts import NodeContext

TOKEN_BYTES = 16
LARGE_BYTES = 64 << 10  # a message of many packets: what loses large packets loses it
FRAME, ACK = struct.Struct("!I"), struct.Struct("!H")
_SMALL_BYTES = 8
_MAX_FRAME_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20
_MAX_DATAGRAM_BYTES = 65535
_NUM_PORTS = 2
_MAX_CONNECTIONS = 512
_IDLE_S, _CONNECT_S, _ANSWER_S = 5.0, 1.0, 0.8
NUM_STREAMS = 4  # clouds let one stream alone have only a part of a link
# How long a stream runs before it counts; frames that are quicker are made longer.
_WARM_S, _QUICK_S = 0.1, 0.02

_SIOCGIFMTU = 0x8921
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER = 10, 23
# ``IP_PMTUDISC_PROBE``: as large as the interface allows, whatever was learnt.
_DO_NOT_CUT = 3
_SIZES_A_ROUND = 24
_TRIES = 3
_WAIT_S = 0.06


class Reception:
    """TCP ports and a UDP port; ``heard`` counts datagrams by the sender's name."""

    def __init__(self) -> None:
        listeners = [_open(socket.SOCK_STREAM) for _ in range(_NUM_PORTS)]
        datagrams = _open(socket.SOCK_DGRAM)
        self.ports = [each.getsockname()[1] for each in listeners]
        self.udp_port: int = datagrams.getsockname()[1]
        self.token = secrets.token_hex(TOKEN_BYTES // 2)
        self.heard: dict[str, int] = {}
        self._sockets = (*listeners, datagrams)
        self._stop_fd, self._stopping_fd = os.pipe()
        self._ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        os.close(self._stopping_fd)
        self._ended.wait(_IDLE_S)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for each in (*self._sockets, self._stop_fd):
                selector.register(each, selectors.EVENT_READ)
            is_open = True
            while is_open:
                for key, _ in selector.select():
                    if key.fileobj == self._stop_fd:
                        is_open = False
                        continue
                    # What went away meanwhile is let go.
                    with suppress(OSError):
                        self._take(cast("socket.socket", key.fileobj))
        for each in self._sockets:
            each.close()
        os.close(self._stop_fd)
        self._ended.set()

    def _take(self, ready: socket.socket) -> None:
        if ready.type == socket.SOCK_STREAM:
            connection, _ = ready.accept()
            if threading.active_count() < _MAX_CONNECTIONS:
                given = connection, self.token.encode()
                threading.Thread(target=_answer, args=given, daemon=True).start()
            else:
                connection.close()
            return
        datagram, sender = ready.recvfrom(_MAX_DATAGRAM_BYTES)
        token = self.token.encode()
        if hmac.compare_digest(datagram[:TOKEN_BYTES], token):
            name = datagram[TOKEN_BYTES:].partition(b"\0")[0].decode(errors="replace")
            self.heard[name] = self.heard.get(name, 0) + 1
            ready.sendto(token + ACK.pack(len(datagram)), sender)


def _open(kind: socket.SocketKind) -> socket.socket:
    """Return a socket on all addresses of both families, as far as there are two."""
    is_dual = socket.has_dualstack_ipv6()
    opened = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET, kind)
    if is_dual:
        opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    opened.bind(("", 0))
    if kind == socket.SOCK_STREAM:
        opened.listen(_MAX_CONNECTIONS)
    opened.settimeout(0)
    return opened


def _answer(connection: socket.socket, token: bytes) -> None:
    with connection, suppress(OSError):
        connection.settimeout(_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not hmac.compare_digest(receive_exactly(connection, TOKEN_BYTES), token):
            return
        connection.sendall(token)
        buffer = bytearray(_CHUNK_BYTES)
        while True:
            (size_bytes,) = FRAME.unpack(receive_exactly(connection, FRAME.size))
            if size_bytes > _MAX_FRAME_BYTES:
                return
            while size_bytes:
                num_read = connection.recv_into(buffer, min(size_bytes, _CHUNK_BYTES))
                if not num_read:
                    return
                size_bytes -= num_read
            connection.sendall(b"\1")


def receive_exactly(connection: socket.socket, size_bytes: int) -> bytes:
    """Return so many bytes, or raise ``OSError``."""
    data = b""
    while len(data) < size_bytes:
        chunk = connection.recv(size_bytes - len(data))
        if not chunk:
            raise ConnectionAbortedError("the other end closes the connection")
        data += chunk
    return data


def _connect(address: str, port: int, token: bytes) -> socket.socket:
    connection = socket.create_connection((address, port), _CONNECT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token)
        receive_exactly(connection, len(token))
    except BaseException:
        connection.close()
        raise
    return connection


def listen(context: NodeContext, _: dict[str, Value]) -> dict[str, Value]:
    """Open ports for others, once; return which, their token, and who was heard."""
    reception: Reception | None = context.memory.get("reception")
    if reception is None:
        context.memory["reception"] = reception = Reception()
        context.closing.callback(reception.close)
    return {
        "ports": reception.ports,
        "udp_port": reception.udp_port,
        "token": reception.token,
        "heard": dict(reception.heard),
    }


def stream(_: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Send to another host that listens, in several streams, for ``seconds``.

    The question has ``address``, ``port`` and ``token`` of the other. The answer has
    ``gb_per_s``: what has arrived there, in gigabytes (1e9) per second.
    """
    place = question["address"], question["port"], question["token"].encode()
    with ExitStack() as closing:
        lines = [closing.enter_context(_connect(*place)) for _ in range(NUM_STREAMS)]
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            rates = list(pool.map(partial(_pump, seconds=question["seconds"]), lines))
    return {"gb_per_s": sum(rates) / 1e9}


def _pump(line: socket.socket, seconds: float) -> float:
    """Send frames, two of them under way; return what arrives in bytes per second."""
    limit_s = _WARM_S + seconds + _ANSWER_S
    line.settimeout(limit_s)
    # What is under way when the time is up must not be in the next pair's way.
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    data, size_bytes = memoryview(bytes(_CHUNK_BYTES)), LARGE_BYTES
    under_way: deque[int] = deque()
    num_bytes, counted_from_s, now_s = 0, 0.0, time.monotonic()
    warm_s, due_s = now_s + _WARM_S, now_s + _WARM_S + seconds
    while not num_bytes or now_s < due_s:
        try:
            while len(under_way) < 2:
                line.sendall(FRAME.pack(size_bytes))
                line.sendall(data[:size_bytes])
                under_way.append(size_bytes)
            receive_exactly(line, 1)
        except TimeoutError:
            # It took longer than that: this is more than there is.
            return LARGE_BYTES / limit_s
        before_s, now_s = now_s, time.monotonic()
        arrived = under_way.popleft()
        if counted_from_s:
            num_bytes += arrived
        elif now_s >= warm_s:
            counted_from_s = now_s
        if now_s - before_s < _QUICK_S:
            size_bytes = min(2 * size_bytes, _CHUNK_BYTES)
    return num_bytes / max(now_s - counted_from_s, 1e-9)


def reach(_: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Reach other hosts, all at once; at most about 3 s.

    The question has ``name`` (this host's) and ``targets``, each with ``name``,
    ``address``, ``ports``, ``udp_port`` and ``token``. The answer has ``reached``, by
    the target's name:

    - ``error``: why one of its ports cannot be connected to, else empty;
    - ``is_refused``: whether it was the other host that refused;
    - ``lost_bytes``: size of a message that did not arrive though small ones did, or 0;
    - ``mtu``: the largest packet in bytes that arrives, or null if none did;
    - ``interface``, ``own_mtu``: what leads there.
    """
    targets: list[dict[str, Value]] = question["targets"]
    with ThreadPoolExecutor(len(targets) or 1) as pool:
        found = pool.map(partial(_visit, question["name"]), targets)
        return {"reached": {t["name"]: f for t, f in zip(targets, found, strict=True)}}


def _visit(name: str, target: dict[str, Value]) -> dict[str, Value]:
    """Reach one host."""
    address, token = target["address"], target["token"].encode()
    interface, own_mtu = own_end(address)
    found: dict[str, Value] = {
        "error": "",
        "is_refused": False,
        "lost_bytes": 0,
        "interface": interface,
        "own_mtu": own_mtu,
    }
    with ExitStack() as closing:
        connections: list[socket.socket] = []
        port = 0
        try:
            for port in target["ports"]:
                opened = closing.enter_context(_connect(address, port, token))
                connections.append(opened)
        except OSError as error:
            found["error"] = f"port {port}: {_reason(error)}"
            found["is_refused"] = isinstance(error, ConnectionRefusedError)
        if own_mtu:
            # Also where no connection was made: a lost answer is no lost question.
            with suppress(OSError):
                to = (address, target["udp_port"])
                found["mtu"] = measure_mtu(*to, token, name, own_mtu)
        if not found["error"]:
            try:
                if not _arrives(connections[0], _SMALL_BYTES):
                    found["error"] = "an open connection breaks: no answer"
                elif not _arrives(connections[0], LARGE_BYTES):
                    found["lost_bytes"] = LARGE_BYTES
            except OSError as error:
                found["error"] = f"an open connection breaks: {_reason(error)}"
    return found


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()


def _arrives(connection: socket.socket, size_bytes: int) -> bool:
    """Send a frame; return whether the answer comes in time."""
    try:
        connection.settimeout(_ANSWER_S)
        connection.sendall(FRAME.pack(size_bytes) + bytes(size_bytes))
        receive_exactly(connection, 1)
    except TimeoutError:
        return False
    return True


def own_end(address: str) -> tuple[str, int]:
    """Return the interface that leads to an address, if any, and its MTU."""
    source = source_towards(address)
    name = "lo" if is_loopback(source) else ""
    for each in read_interfaces():
        if each.address == source:
            name = each.interface
    if not name:
        return "", 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("16s24x", name.encode()[:15])
        answer = fcntl.ioctl(asking, _SIOCGIFMTU, request)
    return name, struct.unpack_from("i", answer, 16)[0]


def measure_mtu(
    address: str, port: int, token: bytes, name: str, own_mtu: int
) -> int | None:
    """Return the largest packet in bytes, up to ``own_mtu``, that arrives."""
    family = family_of(address)
    headers, least = (28, 576) if family == socket.AF_INET else (48, 1280)
    with socket.socket(family, socket.SOCK_DGRAM) as sending:
        if family == socket.AF_INET:
            sending.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _DO_NOT_CUT)
        else:
            sending.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _DO_NOT_CUT)

        def arrive(sizes: Iterable[int]) -> set[int]:
            wanted = {size - headers for size in sizes}
            begin = token + name.encode() + b"\0"
            arrived = _send_sizes(sending, (address, port), begin, wanted)
            return {size + headers for size in arrived}

        most = min(own_mtu, _MAX_DATAGRAM_BYTES)
        passed, lost, sizes = 0, most + 1, [most]
        while sizes:
            arrived = arrive(sizes)
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


def _send_sizes(
    sending: socket.socket, to: tuple[str, int], begin: bytes, wanted: set[int]
) -> set[int]:
    """Send datagrams of some sizes; return which are answered."""
    arrived, token = set[int](), begin[:TOKEN_BYTES]
    for _ in range(_TRIES):
        for size in sorted(wanted - arrived, reverse=True):
            # One that is too large for this host itself is lost like another.
            with suppress(OSError):
                sending.sendto(begin.ljust(size, b"\0"), to)
        due_s = time.monotonic() + _WAIT_S
        while arrived < wanted and (left_s := due_s - time.monotonic()) > 0:
            sending.settimeout(left_s)
            # A host of several addresses may answer by another: the token counts.
            with suppress(OSError):
                answer = sending.recv(TOKEN_BYTES + ACK.size)
                if answer.startswith(token) and len(answer) > TOKEN_BYTES + 1:
                    arrived |= wanted & {*ACK.unpack_from(answer, TOKEN_BYTES)}
        if arrived == wanted:
            break
    return arrived
