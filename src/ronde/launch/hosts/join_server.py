"""The head node's server, which listens until all nodes have joined."""

import errno
import re
import select
import socket
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ronde.addresses import family_of
from ronde.errors import Failure, HostError, LaunchError, StoreError, UsageError
from ronde.launch.host import Host
from ronde.launch.hosts.node import AgentNode, AgentStarter
from ronde.launch.limits import Timeouts
from ronde.launch.signals import Watched, raise_if_stopped, serve_ready
from ronde.launch.wire.tls import (
    NodeInfo,
    Steps,
    TlsChannel,
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
_NOT_PROVEN = "did not prove that it knows the token"
JoinedNodes = list[tuple[Host, TlsChannel]]


class JoinConfig(NamedTuple):
    """Options of a head node that waits for other nodes to join."""

    address: str  # numeric address to listen on
    port: int  # its port, 0 for any
    token: SharedKey
    head: str  # name of this node, which no other gets
    num_nodes: int  # without this one
    timeout_s: float
    authenticate_s: float = 10.0  # for each connection
    clock: Callable[[], float] = time.monotonic
    on_listening: Callable[[str], None] | None = None  # starts the nodes, as HEAD:PORT
    watched: Watched = ()  # served while the head waits


@dataclass(slots=True)
class _PendingConnection:
    sock: ssl.SSLSocket
    address: str
    steps: Steps[NodeInfo]
    since_s: float
    wanted: int = select.POLLIN


def wait_for_nodes(
    config: JoinConfig, signal_fd: int, notice: Callable[[str], None]
) -> JoinedNodes:
    where = config.address, config.port
    try:
        listener = socket.create_server(
            where, family=family_of(config.address), backlog=_BACKLOG
        )
    except OSError as error:
        raise UsageError(
            f"cannot listen on {with_port(*where)}: {error.strerror or error}. Give "
            "--listen another address or port of this machine."
        ) from None
    listener.settimeout(0)
    server = _JoinServer(config, listener, notice)
    try:
        server.run(signal_fd)
    except BaseException:
        for _, channel in server.nodes():
            channel.kill()
        raise
    finally:
        server.close()
    return server.nodes()


class _JoinServer:
    def __init__(
        self, config: JoinConfig, listener: socket.socket, notice: Callable[[str], None]
    ) -> None:
        self._config = config
        self._listener = listener
        self._notice = notice
        self._tls = make_head_tls()
        self._pending: dict[int, _PendingConnection] = {}
        self._joined: dict[int, tuple[Host, TlsChannel]] = {}
        self._refused: Counter[str] = Counter()

    def nodes(self) -> JoinedNodes:
        return sorted(self._joined.values(), key=lambda node: _natural(node[0].name))

    def run(self, signal_fd: int) -> None:
        config, (address, port) = self._config, self._listener.getsockname()[:2]
        host = address
        if address in ("0.0.0.0", "::"):  # noqa: S104 - to be warned of
            host = config.head
            self._notice(
                f"listening on all networks of this machine ({address}); "
                "name one address to listen only there"
            )
        nodes, command = counted(config.num_nodes, "node"), "ronde run --agent"
        where = with_port(host, port)
        by_hand = f"run on each: {command} {where} --token-file FILE"
        start = config.on_listening
        start(where) if start else self._notice(f"waiting for {nodes}; {by_hand}")
        ends_at = config.clock() + config.timeout_s
        while len(self._joined) < config.num_nodes:
            if config.clock() >= ends_at:
                here = ", ".join(host.name for host, _ in self.nodes()) or "none"
                raise HostError(
                    f"only {len(self._joined)} of {config.num_nodes} nodes joined "
                    f"within {config.timeout_s:g} s: {here}. Run on each of the "
                    f"others: {command} {where} --token-file FILE. Or wait longer: "
                    "--join-timeout"
                )
            self._serve(signal_fd, ends_at)

    def close(self) -> None:
        self._listener.close()
        for pending in self._pending.values():
            pending.sock.close()
        for kind, count in self._refused.items():
            if count > 1:
                self._notice(f"{count} connections in total: each {kind}")

    def _serve(self, signal_fd: int, ends_at: float) -> None:
        is_crowded = len(self._pending) >= MAX_PENDING
        patience_s = _CROWDED_S if is_crowded else self._config.authenticate_s
        dues = [each.since_s + patience_s for each in self._pending.values()]
        wait_s = min([ends_at, *dues]) - self._config.clock()
        watched = self._watched(signal_fd, is_crowded=is_crowded)
        serve_ready(watched, max(0.0, wait_s) + 0.001)
        due_s = self._config.clock() - patience_s
        for pending in list(self._pending.values()):
            if pending.since_s <= due_s:
                self._refuse(pending, _NOT_PROVEN)

    def _watched(self, signal_fd: int, *, is_crowded: bool) -> Watched:
        yield signal_fd, select.POLLIN, partial(raise_if_stopped, signal_fd)
        yield from self._config.watched
        for fd in self._joined:
            yield fd, select.POLLRDHUP, partial(self._on_leaving, fd)
        for fd, pending in self._pending.items():
            yield fd, pending.wanted, partial(self._go_on, pending)
        if not is_crowded:
            yield self._listener.fileno(), select.POLLIN, self._accept

    def _on_leaving(self, fd: int) -> None:
        host, channel = self._joined.pop(fd)
        channel.kill()
        self._notice(f"{host.name} left before the job began")

    def _accept(self) -> None:
        try:
            raw, address = self._listener.accept()
            raw.settimeout(0)
            sock = self._tls.context.wrap_socket(
                raw, server_side=True, do_handshake_on_connect=False
            )
        except OSError:
            return  # the peer closed again
        steps = authenticate_node(sock, self._config.token, self._tls.certificate)
        pending = _PendingConnection(sock, address[0], steps, self._config.clock())
        self._pending[sock.fileno()] = pending
        self._go_on(pending)

    def _go_on(self, pending: _PendingConnection) -> None:
        try:
            pending.wanted = next(pending.steps)
        except StopIteration as end:
            self._add_node(pending, end.value)
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
            self._notice(f"a connection from {pending.address} {kind}; it was closed")

    def _add_node(self, pending: _PendingConnection, node_info: NodeInfo) -> None:
        fd = pending.sock.fileno()
        del self._pending[fd]
        # Containers may share a name.
        taken = {host.name for host, _ in self._joined.values()} | {self._config.head}
        host = node_info.host
        names = [host, *(f"{host}-{i}" for i in range(2, len(taken) + 2))]
        name = next(each for each in names if each not in taken)
        channel = TlsChannel(pending.sock)
        # Unlike a head, a node cannot be suspended.
        channel.require_answers(_UNANSWERED_NODE_S)
        self._joined[fd] = (Host(name, node_info.slots), channel)
        wanted = self._config.num_nodes
        self._notice(f"{name} has joined ({len(self._joined)} of {wanted})")


def _natural(name: str) -> list[tuple[int, str]]:
    pieces = re.split(r"(\d+)", name, flags=re.ASCII)
    return [(int(p), "") if p.isdigit() else (-1, p) for p in pieces if p]


class JoinedAgents(AgentStarter):
    """An ``AgentStarter`` that uses the agents of nodes that have joined."""

    def __init__(
        self,
        local: "subprocess.Popen[bytes]",
        nodes: Sequence[tuple[Host, TlsChannel]],
        timeouts: Timeouts,
    ) -> None:
        super().__init__(local, timeouts=timeouts)
        self._joined: dict[str, TlsChannel | None] = {h.name: c for h, c in nodes}

    def start(self, host: Host) -> AgentNode:
        if host.name not in self._joined:
            return super().start(host)
        channel, self._joined[host.name] = self._joined[host.name], None
        if channel is None:
            raise OSError(
                errno.ENOTCONN,
                "its connection was lost, and a node that joined cannot be restarted",
            )
        return AgentNode(host, channel, is_here=False, timeouts=self.timeouts)

    def explain(self, node: AgentNode, exit_code: int, errors: str) -> Failure:
        if node.is_here:
            return super().explain(node, exit_code, errors)
        return Failure(
            "its connection ended after it had joined",
            "read the output of ronde run --agent there",
        )
