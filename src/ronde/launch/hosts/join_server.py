"""The head node's server: nodes join it before the job starts, or while it runs."""

import errno
import re
import select
import socket
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple

from ronde.addresses import family_of
from ronde.errors import Failure, HostError, LaunchError, StoreError, UsageError
from ronde.launch.host import Host
from ronde.launch.hosts.node import AgentNode, AgentStarter
from ronde.launch.limits import EXIT_UNREACHABLE, Timeouts
from ronde.launch.signals import Watched, raise_if_stopped, serve_ready
from ronde.launch.wire.tls import (
    NodeInfo,
    Steps,
    TlsChannel,
    answer_node,
    authenticate_node,
    make_head_tls,
    with_port,
)
from ronde.store.authentication import SharedKey
from ronde.units import counted

MAX_PENDING = 64  # connections that have not authenticated themselves
_CROWDED_S = 1.0  # for authentication while others wait
_BACKLOG = 512
_UNANSWERED_NODE_S = 20.0  # longer than the head gives a silent node
_SETTLE_S = 5.0  # for further nodes to join before the start
_AGAIN_S = 1.0  # between two connections of an address while the job runs
_SILENT_S = 2.0  # after which another node may take the place of one
_SPARE_S = 1.0  # a node that the job has not taken by then is reported
_NOT_PROVEN = "did not prove that it knows the token"


class JoinConfig(NamedTuple):
    """Options of a head node that waits for other nodes to join."""

    address: str  # numeric address to listen on
    port: int  # its port, 0 for any
    token: SharedKey
    head: str  # name of this node, which no other gets
    num_nodes: int  # without this one
    timeout_s: float
    most: int = 0  # nodes that may join before the start, if more than ``num_nodes``
    num_each: int = 0  # ranks of each node, if given
    stays_open: bool = False  # until the job ends
    cure: str = ""  # if nodes do not join, in place of a command to type there
    authenticate_s: float = 10.0  # for each connection
    clock: Callable[[], float] = time.monotonic
    on_listening: Callable[[str], None] | None = None  # starts the nodes, as HEAD:PORT
    watched: Watched = ()  # served while the head waits


@dataclass(slots=True, eq=False)
class _JoinedNode:
    number: int  # -1 if unknown
    host: Host
    channel: TlsChannel
    since_s: float  # infinite once it is reported as a spare
    is_taken: bool = False  # by the job

    @property
    def order(self) -> tuple[bool, int, list[tuple[int, str]]]:
        return self.number < 0, self.number, _natural(self.host.name)


@dataclass(slots=True)
class _PendingConnection:
    sock: ssl.SSLSocket
    address: str
    steps: Steps[NodeInfo]
    since_s: float
    wanted: int = select.POLLIN


def wait_for_nodes(
    config: JoinConfig, signal_fd: int, notice: Callable[[str], None]
) -> "JoinServer":
    """Return the server once enough nodes have joined."""
    server = JoinServer(config, notice)
    stop = signal_fd, select.POLLIN, partial(raise_if_stopped, signal_fd)
    try:
        while not server.has_enough():
            wait_s = server.due_s - config.clock()
            watched = stop, *config.watched, *server.watched()
            serve_ready(watched, max(0.0, wait_s) + 0.001)
            server.advance()
    except BaseException:
        server.close()
        for channel in server.channels:
            channel.kill()
        raise
    if not config.stays_open:
        server.close()
    return server


class JoinServer:
    """Listens for nodes, and keeps them until the job takes them.

    A node is refused while another has its number, unless that one's host is silent:
    then its connection ends, and the node can join when it tries again. Call
    ``advance``, which never blocks, at ``due_s``.
    """

    def __init__(self, config: JoinConfig, notice: Callable[[str], None]) -> None:
        self.config, self.notice = config, notice
        self.version = 0  # of the list of nodes
        where = config.address, config.port
        try:
            self._listener = socket.create_server(
                where, family=family_of(config.address), backlog=_BACKLOG
            )
        except OSError as error:
            raise UsageError(
                f"cannot listen on {with_port(*where)}: {error.strerror or error}. "
                "Give --listen another address or port of this machine."
            ) from None
        self._listener.settimeout(0)
        self._has_begun = False
        self._tls = make_head_tls()
        self._pending: dict[int, _PendingConnection] = {}
        self._nodes: dict[str, _JoinedNode] = {}
        self._left: list[TlsChannel] = []  # closed by the job
        self._refused: Counter[str] = Counter()
        self._tried_s: dict[str, float] = {}  # by address, in the last second
        self._end_s = config.clock() + config.timeout_s
        self._start_s = config.clock() + _SETTLE_S
        address, port = self._listener.getsockname()[:2]
        host = address
        if address in ("0.0.0.0", "::"):  # noqa: S104 - to be warned of
            host = config.head
            self.notice(
                f"listening on all networks of this machine ({address}); "
                "name one address to listen only there"
            )
        head, nodes = with_port(host, port), counted(config.num_nodes, "node")
        command = f"ronde run --agent {head} --token-file FILE"
        self.cure = config.cure or f"Run on each of the others: {command}."
        if config.on_listening is not None:
            config.on_listening(head)
        elif config.cure:
            self.notice(f"waiting for {nodes} to join {head}")
        else:
            self.notice(f"waiting for {nodes}; run on each: {command}")

    @property
    def hosts(self) -> list[Host]:
        ordered = sorted(self._nodes.values(), key=lambda node: node.order)
        return [node.host for node in ordered if not node.channel.is_closed]

    def choose(self, num: int) -> list[Host]:
        """Return the nodes that the job has taken, and others up to ``num``."""
        hosts = self.hosts
        taken = [host for host in hosts if self._nodes[host.name].is_taken]
        chosen = (taken + [host for host in hosts if host not in taken])[:num]
        return [host for host in hosts if host in taken or host in chosen]

    @property
    def channels(self) -> list[TlsChannel]:
        return [*self._left, *(node.channel for node in self._nodes.values())]

    def take(self, name: str) -> TlsChannel:
        """Return the connection of a node that waits."""
        node = self._nodes.get(name)
        if node is None or node.is_taken:
            raise OSError(errno.ENOTCONN, "its connection was lost")
        node.is_taken = True
        return node.channel

    def has_enough(self) -> bool:
        """Return True once the job can start; raise HostError if it is too late."""
        config, now_s = self.config, self.config.clock()
        num, least = len(self._nodes), config.num_nodes
        is_settling = now_s < self._start_s
        self._has_begun = num >= max(least, config.most if is_settling else 0)
        if self._has_begun or now_s < self._end_s:
            return self._has_begun
        here = ", ".join(host.name for host in self.hosts) or "none"
        raise HostError(
            f"only {num} of {least} nodes joined within {config.timeout_s:g} s: "
            f"{here}. {self.cure} Or wait longer: --join-timeout"
        )

    def close(self) -> None:
        """Listen no longer; nodes that have joined stay connected."""
        self._listener.close()
        for pending in self._pending.values():
            pending.sock.close()
        self._pending.clear()
        for kind, count in self._refused.items():
            if count > 1:
                self.notice(f"{count} connections in total: each {kind}")
        self._refused.clear()

    @property
    def due_s(self) -> float:
        dues = [p.since_s + self._patience_s for p in self._pending.values()]
        if not self._has_begun:
            is_settling = len(self._nodes) >= self.config.num_nodes
            dues.append(self._start_s if is_settling else self._end_s)
        return min(dues, default=inf)

    @property
    def _patience_s(self) -> float:
        return _CROWDED_S if self._is_crowded else self.config.authenticate_s

    @property
    def _is_crowded(self) -> bool:
        return len(self._pending) >= MAX_PENDING

    def advance(self) -> None:
        now_s = self.config.clock()
        for name, node in list(self._nodes.items()):
            is_spare = self._has_begun and not node.is_taken
            if node.channel.is_closed:
                self._forget(node)
            elif is_spare and now_s >= node.since_s + _SPARE_S:
                node.since_s = inf
                self.notice(f"{name} waits as a spare")
        late_s = now_s - self._patience_s
        for pending in [p for p in self._pending.values() if p.since_s <= late_s]:
            self._refuse(pending, _NOT_PROVEN)

    def watched(self) -> Watched:
        for node in self._nodes.values():
            if not node.is_taken:
                leave = partial(self._on_leaving, node)
                yield node.channel.read_fd, select.POLLRDHUP, leave
        for fd, pending in self._pending.items():
            yield fd, pending.wanted, partial(self._go_on, pending)
        if self._listener.fileno() >= 0 and not self._is_crowded:
            yield self._listener.fileno(), select.POLLIN, self._accept

    def _on_leaving(self, node: _JoinedNode) -> None:
        node.channel.kill()
        self._forget(node)
        when = "used it" if self._has_begun else "began"
        self.notice(f"{node.host.name} left before the job {when}")

    def _forget(self, node: _JoinedNode) -> None:
        del self._nodes[node.host.name]
        self.version += 1
        if node.channel.wait(0.0) is None:
            node.channel.send_result(EXIT_UNREACHABLE)
            self._left.append(node.channel)
        else:
            node.channel.kill()

    def _accept(self) -> None:
        now_s = self.config.clock()
        try:
            raw, (address, *_) = self._listener.accept()
            if self._has_begun:
                recent = self._tried_s.items()
                self._tried_s = {a: s for a, s in recent if now_s < s + _AGAIN_S}
                if address in self._tried_s:
                    raw.close()
                    return
                self._tried_s[address] = now_s
            raw.settimeout(0)
            sock = self._tls.context.wrap_socket(
                raw, server_side=True, do_handshake_on_connect=False
            )
        except OSError:
            return  # the peer closed again
        steps = authenticate_node(sock, self.config.token, self._tls.certificate)
        pending = _PendingConnection(sock, address, steps, now_s)
        self._pending[sock.fileno()] = pending
        self._go_on(pending)

    def _go_on(self, pending: _PendingConnection) -> None:
        try:
            pending.wanted = next(pending.steps)
        except StopIteration as end:
            self._on_proven(pending, end.value)
        except StoreError:
            self._refuse(pending, "does not know the token")
        except LaunchError as error:
            self._refuse(pending, f"knows the token but is no node: {error}")
        except (OSError, EOFError):
            self._refuse(pending, _NOT_PROVEN)

    def _refuse(self, pending: _PendingConnection, kind: str) -> None:
        del self._pending[pending.sock.fileno()]
        pending.sock.close()
        self._refused[kind] += 1
        if self._refused[kind] == 1:
            self.notice(f"a connection from {pending.address} {kind}; it was closed")

    def _on_proven(self, pending: _PendingConnection, info: NodeInfo) -> None:
        number, name = info.number, self.config.head if info.number == 0 else ""
        for node in self._nodes.values():
            if node.number == number >= 0:
                name = node.host.name
                if node.channel.silence_s > _SILENT_S:
                    node.channel.sever()
        if name:
            answer_node(pending.sock, f"{name} is connected as number {number}.")
            self._refuse(pending, f"is a second pod {number}, beside {name}")
        else:
            self._add_node(pending, info)

    def _add_node(self, pending: _PendingConnection, info: NodeInfo) -> None:
        answer_node(pending.sock)
        del self._pending[pending.sock.fileno()]
        # Containers may share a name.
        host, taken = info.host, self._nodes.keys() | {self.config.head}
        names = [host, *(f"{host}-{i}" for i in range(2, len(taken) + 2))]
        name = next(each for each in names if each not in taken)
        channel = TlsChannel(pending.sock)
        # Unlike a head, a node cannot be suspended.
        channel.require_answers(_UNANSWERED_NODE_S)
        now_s = self.config.clock()
        is_smaller = 0 < info.slots < self.config.num_each
        slots = info.slots if is_smaller else self.config.num_each or info.slots
        node = _JoinedNode(info.number, Host(name, slots), channel, now_s)
        self._nodes[name] = node
        self.version += 1
        if self._has_begun:
            self.notice(f"{name} has joined")
            return
        self._start_s = now_s + _SETTLE_S
        num, wanted = len(self._nodes), self.config.most or self.config.num_nodes
        self.notice(f"{name} has joined ({num} of {wanted})")


def _natural(name: str) -> list[tuple[int, str]]:
    pieces = re.split(r"(\d+)", name, flags=re.ASCII)
    return [(int(p), "") if p.isdigit() else (-1, p) for p in pieces if p]


class JoinedAgents(AgentStarter):
    """An ``AgentStarter`` that uses the agents of nodes that have joined."""

    def __init__(
        self, local: "subprocess.Popen[bytes]", server: JoinServer, timeouts: Timeouts
    ) -> None:
        super().__init__(local, timeouts=timeouts)
        self._server = server

    def start(self, host: Host) -> AgentNode:
        if host.name == self._server.config.head:
            return super().start(host)
        channel = self._server.take(host.name)
        return AgentNode(host, channel, is_here=False, timeouts=self.timeouts)

    def explain(self, node: AgentNode, exit_code: int, errors: str) -> Failure:
        if node.is_here:
            return super().explain(node, exit_code, errors)
        return Failure(
            "its connection ended after it had joined",
            "read the output of ronde run --agent there",
        )
