"""Who reaches whom by TCP, how fast, and with what size of packets.

Each host opens ports that answer whoever knows a token. A frame on a TCP connection is
a length and as many bytes; one byte comes back when all are there. A datagram, which
may not be cut on its way, is answered by its size. All is over when the program on the
host ends, or a few seconds pass.
"""

import fcntl
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple, cast

from ronde.addresses import family_of, is_loopback, read_interfaces, source_towards
from ronde.check.facts import Value
from ronde.check.hosts import NodeContext

TOKEN_BYTES = 16
# A message of many packets: what loses large packets loses it.
LARGE_BYTES = 64 << 10
FRAME, ACK = struct.Struct("!I"), struct.Struct("!H")
_SMALL_BYTES = 8
_MAX_FRAME_BYTES = 16 << 20
_CHUNK_BYTES = 64 << 10
_MAX_DATAGRAM_BYTES = 65535
_NUM_PORTS = 2
_MAX_CONNECTIONS = 512
_IDLE_S, _CONNECT_S, _ANSWER_S = 5.0, 1.0, 0.8
_SPEEDS_S, _MAX_SPEED_S, _SLOW_S = 0.8, 0.2, 0.05
_FIRST_BYTES, _NEXT_BYTES = 256 << 10, 1 << 20
_NUM_TRANSFERS = 4
_MB = 1e6

_SIOCGIFMTU = 0x8921
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER = 10, 23
# ``IP_PMTUDISC_PROBE``: as large as the interface allows, whatever was learnt.
_DO_NOT_CUT = 3
_SIZES_A_ROUND = 24
_TRIES = 3
_WAIT_S = 0.06


class Reception:
    """TCP ports and a UDP port on all addresses, served until ``close``.

    Of the ``ports`` that are asked for besides those that the kernel chooses, those in
    use are ``busy``. ``heard`` counts datagrams by the sender's name.
    """

    def __init__(self, token: bytes, ports: Sequence[int]) -> None:
        listeners: list[socket.socket] = []
        self.busy: list[int] = []
        for port in (*[0] * _NUM_PORTS, *ports):
            try:
                listeners.append(_open(socket.SOCK_STREAM, port))
            except OSError:
                self.busy.append(port)
        datagrams = _open(socket.SOCK_DGRAM, 0)
        self.ports = [each.getsockname()[1] for each in listeners]
        self.udp_port: int = datagrams.getsockname()[1]
        self.heard: dict[str, int] = {}
        self._token = token
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
                given = connection, self._token
                threading.Thread(target=_answer, args=given, daemon=True).start()
            else:
                connection.close()
            return
        datagram, sender = ready.recvfrom(_MAX_DATAGRAM_BYTES)
        if datagram[:TOKEN_BYTES] == self._token:
            name = datagram[TOKEN_BYTES:].partition(b"\0")[0].decode(errors="replace")
            self.heard[name] = self.heard.get(name, 0) + 1
            ready.sendto(self._token + ACK.pack(len(datagram)), sender)


def _open(kind: socket.SocketKind, port: int) -> socket.socket:
    """Return a socket on all addresses of both families, as far as there are two."""
    try:
        return _bound(socket.AF_INET6, kind, port)
    except OSError:
        return _bound(socket.AF_INET, kind, port)


def _bound(family: int, kind: socket.SocketKind, port: int) -> socket.socket:
    opened = socket.socket(family, kind)
    try:
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if kind == socket.SOCK_STREAM:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(("", port))
        if kind == socket.SOCK_STREAM:
            opened.listen(_MAX_CONNECTIONS)
    except BaseException:
        opened.close()
        raise
    opened.settimeout(0)
    return opened


def _answer(connection: socket.socket, token: bytes) -> None:
    with connection, suppress(OSError):
        connection.settimeout(_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_exactly(connection, TOKEN_BYTES) != token:
            return
        connection.sendall(token)
        while True:
            (size_bytes,) = FRAME.unpack(receive_exactly(connection, FRAME.size))
            if size_bytes > _MAX_FRAME_BYTES:
                return
            receive_exactly(connection, size_bytes)
            connection.sendall(b"\1")


def receive_exactly(connection: socket.socket, size_bytes: int) -> bytes:
    """Return so many bytes.

    Raises:
        OSError: The connection ends or breaks before, or is too slow.
    """
    chunks: list[bytes] = []
    while size_bytes:
        chunk = connection.recv(min(size_bytes, _CHUNK_BYTES))
        if not chunk:
            raise ConnectionAbortedError("the other end closes the connection")
        chunks.append(chunk)
        size_bytes -= len(chunk)
    return b"".join(chunks)


def listen(context: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Open ports for others, once; return which, and who was heard there since.

    The question has a ``token``, which others have to know, and ``ports`` to try
    besides those that the kernel chooses.
    """
    reception: Reception | None = context.memory.get("reception")
    if reception is None:
        reception = Reception(question["token"].encode(), question["ports"])
        context.memory["reception"] = reception
        context.closing.callback(reception.close)
    return {
        "ports": reception.ports,
        "udp_port": reception.udp_port,
        "busy": reception.busy,
        "heard": dict(reception.heard),
    }


class _Visit(NamedTuple):
    found: dict[str, Value]
    connection: socket.socket | None


def reach(_: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Reach other hosts, all at once, and time what goes there.

    The question has ``name`` (this host's), ``token`` and ``targets``, each with
    ``name``, ``address``, ``ports`` and ``udp_port``. The answer has ``reached``, by
    the target's name:

    - ``error``: why one of its ports cannot be connected to, else empty;
    - ``is_refused``: whether it was the other host that refused;
    - ``lost_bytes``: size of a message that did not arrive though small ones did, or 0;
    - ``mb_per_s``: the fastest of a few transfers to it, in 1e6 bytes a second;
    - ``mtu``: the largest packet in bytes that arrives, or null if none did;
    - ``interface``, ``own_mtu``: what leads there.

    What was not measured is left out. It takes at most about 4 s.
    """
    targets: list[dict[str, Value]] = question["targets"]
    if not targets:
        return {"reached": {}}
    name, token = question["name"], question["token"].encode()
    with ThreadPoolExecutor(len(targets)) as pool:
        visits = list(pool.map(partial(_visit, name, token), targets))
    _time_transfers(visits)
    pairs = zip(targets, visits, strict=True)
    return {"reached": {target["name"]: visit.found for target, visit in pairs}}


def _visit(name: str, token: bytes, target: dict[str, Value]) -> _Visit:
    """Reach one host; its first connection stays open where all went well."""
    address = target["address"]
    interface, own_mtu = own_end(address)
    found: dict[str, Value] = {
        "error": "",
        "is_refused": False,
        "lost_bytes": 0,
        "interface": interface,
        "own_mtu": own_mtu,
    }
    connection = _connect_all(token, target, found)
    if own_mtu:
        # Also where no connection was made: a lost answer is no lost question.
        with suppress(OSError):
            found["mtu"] = measure_mtu(
                address, target["udp_port"], token, name, own_mtu
            )
    if connection is None:
        return _Visit(found, None)
    try:
        if _transfer(connection, _SMALL_BYTES) is None:
            found["error"] = "an open connection breaks: no answer"
        elif _transfer(connection, LARGE_BYTES) is None:
            found["lost_bytes"] = LARGE_BYTES
    except OSError as error:
        found["error"] = f"an open connection breaks: {_reason(error)}"
    if found["error"] or found["lost_bytes"]:
        connection.close()
        return _Visit(found, None)
    return _Visit(found, connection)


def _connect_all(
    token: bytes, target: dict[str, Value], found: dict[str, Value]
) -> socket.socket | None:
    """Connect to each port; return the first connection, or note what failed."""
    connections: list[socket.socket] = []
    port = 0
    try:
        for port in target["ports"]:
            address = target["address"], port
            connection = socket.create_connection(address, _CONNECT_S)
            connections.append(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token)
            receive_exactly(connection, len(token))
    except OSError as error:
        found["error"] = f"port {port}: {_reason(error)}"
        found["is_refused"] = isinstance(error, ConnectionRefusedError)
    first = None if found["error"] else connections[0]
    for each in connections:
        if each is not first:
            each.close()
    return first


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()


def _time_transfers(visits: Sequence[_Visit]) -> None:
    """Time transfers to one host after the other, so that none is in another's way.

    Hosts that are asked with their targets turned round, each beginning with the next
    one, mostly send to different ones at any time.
    """
    num_left = sum(visit.connection is not None for visit in visits)
    due_s = time.perf_counter() + _SPEEDS_S
    for visit in visits:
        if visit.connection is None:
            continue
        with visit.connection as connection:
            left_s = due_s - time.perf_counter()
            share_s = min(_MAX_SPEED_S, left_s / num_left)
            num_left -= 1
            if left_s > 0:
                with suppress(OSError):
                    visit.found["mb_per_s"] = _fastest(connection, share_s)


def _fastest(connection: socket.socket, share_s: float) -> float:
    """Return the fastest of a few transfers, in 1e6 bytes a second.

    A clock of this host alone is read, so that a transfer never looks faster than it
    was. What takes long already with little is not tried with more.
    """
    begun_s = time.perf_counter()
    best = 0.0
    for number in range(_NUM_TRANSFERS):
        size_bytes = _NEXT_BYTES if number else _FIRST_BYTES
        took_s = _transfer(connection, size_bytes)
        if took_s is None:
            # It took longer than that: this is more than there is.
            return max(best, size_bytes / _MB / _ANSWER_S)
        best = max(best, size_bytes / _MB / took_s)
        is_over = time.perf_counter() > begun_s + share_s
        if is_over or (not number and took_s > _SLOW_S):
            break
    return best


def _transfer(connection: socket.socket, size_bytes: int) -> float | None:
    """Return how long it took until all was there; nothing if that took too long."""
    begun_s = time.perf_counter()
    try:
        connection.settimeout(_ANSWER_S)
        connection.sendall(FRAME.pack(size_bytes) + bytes(size_bytes))
        receive_exactly(connection, 1)
    except TimeoutError:
        return None
    return time.perf_counter() - begun_s


def own_end(address: str) -> tuple[str, int]:
    """Return the interface that leads to a numeric address, and its MTU in bytes.

    It is empty where no route leads there.
    """
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
    """Return the largest packet in bytes that arrives, or nothing if none does.

    ``name`` is this host's, which the other one counts; more than ``own_mtu``, that of
    the interface that leads there, is not tried.
    """
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
