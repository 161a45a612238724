"""Test connections and packets between all hosts, and measure TCP streams.

Every host listens, and then connects to the others. If several pairs fail, the host
that they have in common is reported.

A client first sends the token of the other host. A frame on a TCP connection is a
length and that many bytes; the reply is one byte. Datagrams are sent with "don't
fragment"; the reply to each is its size. The sockets close when the program on the host
ends. Idle connections close after a few seconds.
"""

import hmac
import os
import random
import secrets
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from ronde.addresses import own_mtu_towards
from ronde.check.check import FAIL, WARN, Problem, Problems, check
from ronde.check.fleet import Fleet, HostPair, Value
from ronde.check.hosts import HostSet, NodeContext, ProbeStep, Reply
from ronde.check.majority import differing, usual_value
from ronde.check.network.interfaces import ADDRESS, INTERFACES, find_name
from ronde.check.network.path_mtu import (
    ACK,
    ANSWER_S,
    MAX_DATAGRAM_BYTES,
    TOKEN_BYTES,
    measure_mtu,
)
from ronde.units import format_size, list_first

# The fact ``REACH``, keyed by host and target; pairs have the same order.
Reached = Mapping[str, Mapping[str, Mapping[str, Any]]]
# Fact: the result of ``reach``, keyed by target. After a failed connection it has
# ``is_heard``: True if datagrams arrived at the target.
REACH = "network.reach"
# Fact: MTU in bytes of the interface that routes to most other hosts.
MTU = "network.peer_mtu"
# With more hosts, each connects to its neighbours in a ring and to some random hosts.
_MAX_ALL_PAIRS = 32
_NUM_SHIFTS = 4
_LISTEN_S, _REACH_S = 4.0, 12.0

LARGE_BYTES = 64 << 10  # a message of many full packets
FRAME = struct.Struct("!I")
_SMALL_BYTES = 8
_MAX_FRAME_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20
_NUM_PORTS = 2
_MAX_CONNECTIONS = 512
_IDLE_S, _CONNECT_S, _ANSWER_S = 5.0, 1.0, 0.8
NUM_STREAMS = 4  # clouds limit a single stream to a fraction of the link
_QUICK_S = 0.02  # frames that take less time are made longer


class ReachServer:
    """A server on TCP ports and a UDP port; ``heard`` counts datagrams by sender."""

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
        with ExitStack() as closing:
            closing.callback(self._ended.set)
            for each in self._sockets:
                closing.enter_context(each)
            closing.callback(os.close, self._stop_fd)
            ready: list[Any] = []
            while self._stop_fd not in ready:
                for each in ready:
                    # The client may have disconnected meanwhile.
                    with suppress(OSError):
                        self._on_ready(each)
                ready, _, _ = select.select([*self._sockets, self._stop_fd], [], [])

    def _on_ready(self, ready: socket.socket) -> None:
        if ready.type == socket.SOCK_STREAM:
            connection, _ = ready.accept()
            if threading.active_count() >= _MAX_CONNECTIONS:
                connection.close()
                return
            given = connection, self.token.encode()
            threading.Thread(target=_answer, args=given, daemon=True).start()
            return
        datagram, sender = ready.recvfrom(MAX_DATAGRAM_BYTES)
        token = self.token.encode()
        if hmac.compare_digest(datagram[:TOKEN_BYTES], token):
            name = datagram[TOKEN_BYTES:].partition(b"\0")[0].decode(errors="replace")
            self.heard[name] = self.heard.get(name, 0) + 1
            ready.sendto(token + ACK.pack(len(datagram)), sender)


def _open(kind: socket.SocketKind) -> socket.socket:
    """Return a non-blocking socket on all addresses, for IPv6 and IPv4 if possible."""
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
    """Return exactly ``size_bytes``, or raise ``OSError``."""
    data = b""
    while len(data) < size_bytes:
        chunk = connection.recv(size_bytes - len(data))
        if not chunk:
            raise ConnectionAbortedError("the other host closed the connection")
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
    """Start the server on the first call; return its ports, its token and ``heard``."""
    reception: ReachServer | None = context.memory.get("reception")
    if reception is None:
        context.memory["reception"] = reception = ReachServer()
        context.closing.callback(reception.close)
    return {
        "ports": reception.ports,
        "udp_port": reception.udp_port,
        "token": reception.token,
        "heard": dict(reception.heard),
    }


def stream(_: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Send to another host over several TCP streams for ``seconds``.

    The question has the other host's ``address``, ``port`` and ``token``. The answer
    has ``gb_per_s`` (1e9 bytes), the rate at which the other host received.
    """
    target = question["address"], question["port"], question["token"].encode()
    with ExitStack() as closing:
        lines = [closing.enter_context(_connect(*target)) for _ in range(NUM_STREAMS)]
        begun_s = time.monotonic()
        pump = partial(_pump, begun_s=begun_s, due_s=begun_s + question["seconds"])
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            rates = list(pool.map(pump, lines))
    return {"gb_per_s": sum(rates) / 1e9}


def _pump(line: socket.socket, begun_s: float, due_s: float) -> float:
    """Send frames, keeping two in flight; return the bytes received per second.

    The time starts with the first byte of any stream, so that a thread that starts late
    does not make the link seem faster.
    """
    limit_s = due_s - begun_s + _ANSWER_S
    line.settimeout(limit_s)
    # Discard the data in flight at the end, which would slow the next pair.
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    data, size_bytes = memoryview(bytes(_CHUNK_BYTES)), LARGE_BYTES
    in_flight: deque[int] = deque()
    num_bytes, now_s = 0, begun_s
    while now_s < due_s or not num_bytes:
        try:
            while len(in_flight) < 2:
                line.sendall(FRAME.pack(size_bytes))
                line.sendall(data[:size_bytes])
                in_flight.append(size_bytes)
            receive_exactly(line, 1)
        except TimeoutError:
            return LARGE_BYTES / limit_s  # an upper bound
        before_s, now_s = now_s, time.monotonic()
        num_bytes += in_flight.popleft()
        if now_s - before_s < _QUICK_S:
            size_bytes = min(2 * size_bytes, _CHUNK_BYTES)
    return num_bytes / (now_s - begun_s)


def reach(
    _: NodeContext, question: dict[str, Value], wait_s: float = ANSWER_S
) -> dict[str, Value]:
    """Connect to all targets concurrently, within about 3 s.

    The question has ``name`` (this host's) and ``targets``, each with ``name``,
    ``address``, ``ports``, ``udp_port`` and ``token``. The answer has ``reached``, by
    target:

    - ``error``: the error of a connection to one of the ports, else empty;
    - ``is_refused``: True if the target refused the connection;
    - ``lost_bytes``: size of a large message that is lost if small ones arrive, else 0;
    - ``mtu``: the largest packet in bytes that arrives; null if none arrives;
    - ``own_mtu``: MTU in bytes of the interface to the target; 0 without a route.
    """
    targets: list[dict[str, Value]] = question["targets"]
    with ThreadPoolExecutor(len(targets) or 1) as pool:
        found = pool.map(partial(_reach_one, question["name"], wait_s), targets)
        return {"reached": {t["name"]: f for t, f in zip(targets, found, strict=True)}}


def _reach_one(name: str, wait_s: float, target: dict[str, Value]) -> dict[str, Value]:
    address, token = target["address"], target["token"].encode()
    own_mtu = own_mtu_towards(address)
    found: dict[str, Value] = {"error": "", "is_refused": False, "lost_bytes": 0}
    found["own_mtu"] = own_mtu
    with ExitStack() as closing:
        line, message = None, ""
        try:
            for port in target["ports"]:
                message = f"port {port}"
                line = closing.enter_context(_connect(address, port, token))
        except OSError as error:
            found["error"] = f"{message}: {_reason(error)}"
            found["is_refused"] = isinstance(error, ConnectionRefusedError)
        if own_mtu:
            # Even without a connection: packets may be lost in one direction only.
            with suppress(OSError):
                to = (address, target["udp_port"])
                found["mtu"] = measure_mtu(*to, token, name, own_mtu, wait_s)
        if line and not found["error"]:
            try:
                _echo(line, _SMALL_BYTES)
                with suppress(TimeoutError):
                    found["lost_bytes"] = LARGE_BYTES
                    _echo(line, LARGE_BYTES)
                    found["lost_bytes"] = 0
            except OSError as error:
                message = f"an open connection breaks: {_reason(error)}"
                found |= {"error": message, "lost_bytes": 0}
    return found


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()


def _echo(connection: socket.socket, size_bytes: int) -> None:
    connection.settimeout(_ANSWER_S)
    connection.sendall(FRAME.pack(size_bytes) + bytes(size_bytes))
    receive_exactly(connection, 1)


def run(hosts: HostSet) -> None:
    """Make the hosts connect to each other, and retry failed pairs once."""
    if len(hosts.names) < 2:
        return
    listening = hosts.ask_all({"do": "listen"}, _LISTEN_S)
    for host, reply in listening.items():
        hosts.note(host, ADDRESS, hosts.addresses[host])
        if reply.failure:
            hosts.note_unread(host, REACH, reply.failure)
    plan = plan_partners([n for n in hosts.names if not listening[n].failure])
    reached = _ask_to_reach(hosts, listening, plan)
    doubtful = {*failing_pairs(reached), *lossy_pairs(reached)}
    again = {
        host: [other for other in others if (host, other) in doubtful]
        for host, others in plan.items()
    }
    for (host, other), found in _each(_ask_to_reach(hosts, listening, again)):
        reached[host][other] = better(reached[host][other], dict(found))
    if failing := failing_pairs(reached):
        heard = hosts.ask_all({"do": "listen"}, _LISTEN_S)
        for host, other in failing:
            if other in heard and not heard[other].failure:
                is_heard = host in heard[other].values["heard"]
                reached[host][other]["is_heard"] = is_heard
    for host, others in reached.items():
        hosts.note(host, REACH, others)
        if mtu := own_mtu(others):
            hosts.note(host, MTU, mtu)


def plan_partners(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the hosts that each host connects to: all others, or a sample.

    All samples have the same size.
    """
    num = len(names)
    shifts = list(range(1, num))
    if num > _MAX_ALL_PAIRS:
        chosen = random.Random(num).sample(range(2, (num + 1) // 2), _NUM_SHIFTS)  # noqa: S311
        shifts = sorted({s % num for each in (1, *chosen) for s in (each, -each)})
    return {
        name: [names[(index + shift) % num] for shift in shifts]
        for index, name in enumerate(names)
    }


def better(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the better of two results for the same target."""
    if second["error"] or (second["lost_bytes"] and not first["error"]):
        return first if not first["error"] else second
    mtu = max(first.get("mtu") or 0, second.get("mtu") or 0)
    return first | second | ({"mtu": mtu} if mtu else {})


def _ask_to_reach(
    hosts: HostSet, listening: Mapping[str, Reply], plan: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Any]]:
    questions: dict[str, dict[str, Value]] = {}
    for host, others in plan.items():
        targets = [
            {"name": o, "address": hosts.addresses[o], **listening[o].values}
            for o in others
            if hosts.addresses[o]
        ]
        if targets:
            questions[host] = {"do": "reach", "name": host, "targets": targets}
    reached: dict[str, dict[str, Any]] = {}
    for host, reply in hosts.ask(questions, _REACH_S).items():
        if reply.failure:
            hosts.note_unread(host, REACH, reply.failure)
        else:
            reached[host] = reply.values["reached"]
    return reached


STEP = ProbeStep("reaching", run, (ADDRESS, MTU, REACH))


def _each(reached: Reached) -> Iterator[tuple[HostPair, Mapping[str, Any]]]:
    return (((h, o), found) for h in reached for o, found in reached[h].items())


def failing_pairs(reached: Reached) -> list[HostPair]:
    return [pair for pair, found in _each(reached) if found["error"]]


def lost_pairs(reached: Reached) -> list[HostPair]:
    """Return the failed pairs, without directions in which packets arrive.

    A connection needs both directions. If two hosts cannot connect to each other, but
    datagrams arrive in one direction, the fault is in the opposite direction.
    """
    failing = dict.fromkeys(failing_pairs(reached))
    arriving = {(a, b) for a, b in failing if reached[a][b].get("is_heard")}
    innocent = {p for p in arriving if p[::-1] in failing and p[::-1] not in arriving}
    return [pair for pair in failing if pair not in innocent]


def lossy_pairs(reached: Reached) -> list[HostPair]:
    """Return the connected pairs that lose large messages or full-size packets."""
    mtus = {host: own_mtu(others) for host, others in reached.items()}

    def is_lossy(other: str, found: Mapping[str, Any]) -> bool:
        least = min(found["own_mtu"], mtus.get(other, 0))
        is_small = bool(found.get("mtu")) and found["mtu"] < least
        return not found["error"] and bool(found["lost_bytes"] or is_small)

    return [pair for pair, found in _each(reached) if is_lossy(pair[1], found)]


def own_mtu(others: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the MTU of the interface that routes to most other hosts, 0 if unknown."""
    counts = Counter(each["own_mtu"] for each in others.values() if each["own_mtu"])
    return counts.most_common(1)[0][0] if counts else 0


def blame(
    pairs: Collection[HostPair], at_receiver: Collection[HostPair] = ()
) -> dict[str, list[HostPair]]:
    """Return the hosts that explain the faulty pairs, with the pairs of each host.

    The host with the most faulty pairs is chosen first, then the one with the most of
    the remaining pairs. Hosts with equally many are chosen together. Of a pair that
    shares no host with other pairs, the sender is chosen, or the receiver if the pair
    is in ``at_receiver``.
    """
    left = list(dict.fromkeys(pairs))
    blamed: dict[str, list[HostPair]] = {}
    while left:
        links = {frozenset(pair) for pair in left}
        counts = Counter(host for link in links for host in link)
        most = max(counts.values())
        if most == 1:
            for pair in left:
                host = pair[1] if pair in at_receiver else pair[0]
                blamed.setdefault(host, []).append(pair)
            break
        worst = {host for host, count in counts.items() if count == most}
        for host in worst:
            blamed[host] = [pair for pair in left if host in pair]
        left = [pair for pair in left if not worst.intersection(pair)]
    return blamed


def _name_ways(
    host: str, pairs: Sequence[HostPair], outwards: str, inwards: str
) -> str:
    """Return a text that lists the other hosts of faulty pairs, by direction."""
    to = [other for sender, other in pairs if sender == host]
    by = [sender for sender, other in pairs if other == host]
    ways = ((outwards, to), (inwards, by))
    return " and ".join(p.format(list_first([*names], 4)) for p, names in ways if names)


@check(FAIL, REACH)
def reachable(fleet: Fleet) -> Problems:
    """Hosts can connect to each other at ports that the kernel chooses.

    reads: TCP and datagrams between all pairs; with more than 32 hosts, only between
        neighbours in a ring and with eight further hosts each
    threshold: each connection succeeds within a second, in one of two attempts
    source: NCCL 2.30.7's manual, IP ports: ranks listen at ports that the kernel
        chooses, and so does Gloo; ronde's choice: a second, as TCP's first retry (RFC
        6298)
    fix: Let TCP through: nft list ruleset, or iptables -S; then look at routes and the
        cloud's firewall rules.
    pod: Let all ports through between the job's pods: kubectl get networkpolicy; then
        look at the network plugin, and at a service mesh in the pods
    needs: several hosts
    why: The start of a job hangs until its timeout, and the error names no host.
    """
    reached = fleet.known(REACH)
    failing, pairs = failing_pairs(reached), lost_pairs(reached)
    refused = [(a, b) for a, b in pairs if reached[a][b]["is_refused"]]
    for host, own in blame(pairs, refused).items():
        sender, receiver = own[0]
        first = reached[sender][receiver]
        ways = ("it cannot connect to {}", "{} cannot connect to it")
        message = _name_ways(host, own, *ways)
        if not any((b, a) in own for a, b in own):
            is_half = set(own).isdisjoint((b, a) for a, b in failing)
            message += f"; the other way {'it works' if is_half else 'packets arrive'}"
        message += f"; {first['error']}"
        message += "; datagrams arrive" if first.get("is_heard") else ""
        fix = (
            f"Let TCP through from {sender} to {receiver}, all ports: nft list "
            f"ruleset, or iptables -S, on {receiver} and {sender}; then routes (ip "
            "route get) and cloud rules."
        )
        yield Problem(message, fix=fix, host=host)


@check(WARN, MTU, optional=(ADDRESS, INTERFACES))
def mtu(fleet: Fleet) -> Problems:
    """The interfaces between hosts have the same MTU.

    reads: the MTU of the interface that routes to the other hosts
    threshold: the MTU of most hosts
    source: RFC 4861, 4.6.4: all nodes of a link use one MTU; TCP uses the smaller of
        two (RFC 9293, 3.7.1) and hides the difference
    fix: ip link set dev INTERFACE mtu BYTES, and the same in the network configuration.
    needs: several hosts
    why: Small packets take more CPU; RDMA over Ethernet may lose large ones.
    """
    sizes = fleet.known(MTU)
    for problem in differing(fleet, MTU, "MTU"):
        host, wanted = problem.host, usual_value(problem.usual)
        if not wanted:
            # Of equally frequent sizes, choose the smaller one, which always passes.
            host, wanted = max(sizes, key=sizes.__getitem__), min(sizes.values())
        fix = _set_mtu(fleet, host, wanted)
        fix = fix if host == problem.host else fix.replace("there", f"on {host}")
        yield problem._replace(fix=fix)


def _set_mtu(fleet: Fleet, host: str, size_bytes: Value) -> str:
    name = next(find_name(f.values) for f in fleet.hosts if f.host == host)
    if not name:
        return ""
    return f"ip link set dev {name} mtu {size_bytes}  # as root there, and for good"


@check(FAIL, REACH, optional=(ADDRESS, INTERFACES))
def path_mtu(fleet: Fleet) -> Problems:
    """Packets as large as the MTU of both hosts arrive.

    reads: datagrams of several sizes with "don't fragment"; 64KiB over TCP
    threshold: the smaller MTU of the two hosts
    source: path MTU discovery (RFC 1191, RFC 8899)
    fix: Set one MTU on the hosts and on all switches and tunnels between them: ip link
        set dev INTERFACE mtu BYTES; and let ICMP 'too big' through.
    needs: several hosts
    why: Small messages pass; large ones hang, or are very slow.
    """
    reached = fleet.known(REACH)
    for host, own in blame(lossy_pairs(reached)).items():
        ways = _name_ways(host, own, "to {}", "from {}")
        least = min(int(reached[a][b].get("mtu") or 0) for a, b in own)
        here = own_mtu(reached[host]) if host in reached else 0
        fix = (
            f"give switches and tunnels between them {here or 'the MTU of both'}, and "
        )
        fix += "let ICMP 'too big' through"
        if least and least < here:
            message = (
                f"{ways}: no packets above {least} bytes arrive, its MTU is {here}"
            )
            fix = f"{_set_mtu(fleet, host, least) or 'lower its MTU'}; or {fix}"
        else:
            size = format_size(max(reached[a][b]["lost_bytes"] for a, b in own))
            message = f"{ways}: messages of {size} are lost, those of 8 bytes arrive"
        yield Problem(message, fix=fix, host=host)
