"""Who reaches whom by TCP, how quickly, how fast, and with what size of packets."""

import socket
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from ronde.check.facts import Value
from ronde.check.hosts import NodeContext
from ronde.check.network.path_mtu import measure_mtu, own_end
from ronde.check.network.receiving import (
    ECHO,
    FRAME,
    SINK,
    Reception,
    receive,
    receive_exactly,
)

LARGE_BYTES = 64 << 10
"""A message of many packets: what loses large packets loses it."""

_NUM_PORTS = 2
_CONNECT_S = 1.0
_ANSWER_S = 0.8
_NUM_PINGS = 100
_MIN_PINGS = 20
_PINGS_S = 0.3
_SPEEDS_S = 0.8
_MAX_SPEED_S = 0.2
_FIRST_BYTES, _NEXT_BYTES = 256 << 10, 1 << 20
_NUM_TRANSFERS = 4
_SLOW_S = 0.05
_MB = 1e6


class Target(NamedTuple):
    """A host that is to be reached.

    Attributes:
        name: Its name.
        address: Numeric.
        ports: TCP ports that it has opened.
        udp_port: The UDP port.
    """

    name: str
    address: str
    ports: tuple[int, ...]
    udp_port: int


class _Asking(NamedTuple):
    name: str
    token: bytes


class _Visit(NamedTuple):
    told: dict[str, Value]
    connection: socket.socket | None


def listen(context: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Open ports for others, once; tell which, and who was heard there since.

    The question has a ``token``, which others have to know, and ``ports`` to try
    besides those that the kernel chooses. The answer has ``ports``, ``udp_port``,
    ``busy`` (ports that were in use) and ``heard``: datagrams, by the sender's name.
    """
    reception: Reception | None = context.memory.get("reception")
    if reception is None:
        token = question["token"].encode()
        reception = receive(token, _NUM_PORTS, question["ports"])
        context.memory["reception"] = reception
        context.closing.callback(reception.close)
    return {
        "ports": reception.ports,
        "udp_port": reception.udp_port,
        "busy": reception.busy,
        "heard": dict(reception.heard),
    }


def reach(context: NodeContext, question: dict[str, Value]) -> dict[str, Value]:  # noqa: ARG001
    """Reach other hosts, all at once, and time what goes there.

    The question has ``name`` (this host's), ``token`` and ``targets``, each with what
    ``Target`` has. The answer has ``reached``, by the target's name:

    - ``error``: why one of its ports cannot be connected to, else empty;
    - ``is_refused``: whether it was the other host that said so;
    - ``lost_bytes``: size of a message that did not arrive though small ones did, or 0;
    - ``rtt_s``, ``p99_s``: the median and 99th percentile round trip of 8 bytes;
    - ``mb_per_s``: the fastest of a few transfers to it, in 1e6 bytes a second;
    - ``mtu``: the largest packet in bytes that arrives, or null if none did;
    - ``interface``, ``own_mtu``: what leads there.

    What was not measured is left out. It takes at most about 4 s.
    """
    asking = _Asking(question["name"], question["token"].encode())
    targets: list[Target] = [
        Target(each["name"], each["address"], tuple(each["ports"]), each["udp_port"])
        for each in question["targets"]
    ]
    if not targets:
        return {"reached": {}}
    with ThreadPoolExecutor(len(targets)) as pool:
        visits = list(pool.map(_visit, [asking] * len(targets), targets))
    _time_transfers(visits)
    return {
        "reached": {
            target.name: visit.told
            for target, visit in zip(targets, visits, strict=True)
        }
    }


def _visit(asking: _Asking, target: Target) -> _Visit:
    """Reach one host; its first connection stays open where all went well."""
    end = own_end(target.address)
    told: dict[str, Value] = {
        "error": "",
        "is_refused": False,
        "lost_bytes": 0,
        "interface": end.interface,
        "own_mtu": end.mtu,
    }
    connection = _connect_all(asking, target, told)
    if end.mtu:
        # Also where no connection was made: a lost answer is no lost question.
        with suppress(OSError):
            told["mtu"] = measure_mtu(
                target.address, target.udp_port, asking.token, asking.name, end.mtu
            )
    if connection is None:
        return _Visit(told, None)
    try:
        told |= _time_pings(connection)
        if _transfer(connection, LARGE_BYTES) is None:
            told["lost_bytes"] = LARGE_BYTES
    except OSError as error:
        told["error"] = f"an open connection breaks: {_reason(error)}"
    if told["error"] or told["lost_bytes"]:
        connection.close()
        return _Visit(told, None)
    return _Visit(told, connection)


def _connect_all(
    asking: _Asking, target: Target, told: dict[str, Value]
) -> socket.socket | None:
    """Connect to each port; return the first connection, or tell what failed."""
    connections: list[socket.socket] = []
    port = 0
    try:
        for port in target.ports:
            connections.append(_connect(asking, target.address, port))
    except OSError as error:
        told["error"] = f"port {port}: {_reason(error)}"
        told["is_refused"] = isinstance(error, ConnectionRefusedError)
        for each in connections:
            each.close()
        return None
    for each in connections[1:]:
        each.close()
    return connections[0]


def _connect(asking: _Asking, address: str, port: int) -> socket.socket:
    connection = socket.create_connection((address, port), _CONNECT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(asking.token)
        receive_exactly(connection, len(asking.token))
    except BaseException:
        connection.close()
        raise
    return connection


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()


def _time_pings(connection: socket.socket) -> dict[str, Value]:
    connection.settimeout(_ANSWER_S)
    ping = FRAME.pack(ECHO, 8) + bytes(8)
    took_s: list[float] = []
    begun_s = time.perf_counter()
    while len(took_s) < _NUM_PINGS:
        sent_s = time.perf_counter()
        if len(took_s) >= _MIN_PINGS and sent_s > begun_s + _PINGS_S:
            break
        connection.sendall(ping)
        receive_exactly(connection, 8)
        took_s.append(time.perf_counter() - sent_s)
    return {"rtt_s": statistics.median(took_s), "p99_s": nearest_rank(took_s, 0.99)}


def nearest_rank(values: Sequence[float], share: float) -> float:
    """Return the smallest value that so large a share of them does not exceed.

    Source: the nearest-rank percentile, index ``ceil(share * n)`` from one.
    """
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


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
                    visit.told["mb_per_s"] = _fastest(connection, share_s)


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
            # It took longer than that: what is told is more than there is.
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
        connection.sendall(FRAME.pack(SINK, size_bytes) + bytes(size_bytes))
        receive_exactly(connection, 1)
    except TimeoutError:
        return None
    return time.perf_counter() - begun_s
