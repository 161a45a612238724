"""The head's door: listens until all nodes have joined, and then is closed."""

import re
import select
import signal
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ronde.errors import HostError, LaunchError
from ronde.launch.hosts.host import Host
from ronde.launch.joining.address import is_wildcard, listen, with_port
from ronde.launch.joining.handshake import ProofError, Steps, admit
from ronde.launch.joining.proof import Claim
from ronde.launch.joining.tls import make_head_tls
from ronde.launch.joining.token import Token
from ronde.launch.joining.wire import TlsWire
from ronde.launch.signals import STOPPING, InterruptedStartError, read_signals

MAX_UNPROVEN = 64
"""Connections at a time that have not proven themselves."""

PROOF_S = 10.0
"""What one of them has for it."""

_CROWDED_S = 1.0
"""What it has for it while others cannot get in."""

_BACKLOG = 512
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


@dataclass(frozen=True, slots=True)
class Invitation:
    """Who may join, where, and how long is waited for it.

    Attributes:
        address: Numeric address to listen on.
        port: Its port, 0 for any.
        token: What a node must know.
        head: Name of this node, which no other gets.
        num_nodes: Nodes to wait for, this one not counted.
        timeout_s: How long.
    """

    address: str
    port: int
    token: Token
    head: str
    num_nodes: int
    timeout_s: float


@dataclass(slots=True)
class _Guest:
    """A connection that has proven nothing yet."""

    sock: ssl.SSLSocket
    address: str
    steps: Steps[Claim]
    since_s: float
    wanted: int = select.POLLIN


@dataclass(slots=True)
class _Refusals:
    """Counts those who did not get in, and tells of the first of a kind."""

    notice: Callable[[str], None]
    counts: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, kind: str, address: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.counts[kind] == 1:
            self.notice(f"a connection from {address} {kind}; it was closed")

    def tell(self) -> None:
        for kind, count in self.counts.items():
            if count > 1:
                self.notice(f"in all {count} connections: each {kind}")


def wait_for_nodes(
    invitation: Invitation, signal_fd: int, notice: Callable[[str], None]
) -> list[tuple[Host, TlsWire]]:
    """Return all nodes that have joined, by name; from then on nothing listens.

    Args:
        invitation: Who may join and where.
        signal_fd: From ``signals.caught_signals``.
        notice: Is told who joins and who does not.

    Raises:
        UsageError: It cannot be listened there.
        HostError: Not all have come in time.
        InterruptedStartError: The user has ended the wait.
    """
    with listen(invitation.address, invitation.port, _BACKLOG) as listener:
        door = Door(invitation, listener, notice)
        try:
            door.run(signal_fd)
        except BaseException:
            door.send_away()
            raise
        finally:
            door.close()
        return door.nodes()


class Door:
    """One wait for nodes.

    Args:
        invitation: Who may join.
        listener: Non-blocking, listening.
        notice: Is told who joins and who does not.
    """

    def __init__(
        self,
        invitation: Invitation,
        listener: socket.socket,
        notice: Callable[[str], None],
    ) -> None:
        self._invitation = invitation
        self._listener = listener
        self._notice = notice
        self._tls = make_head_tls()
        self._guests: dict[int, _Guest] = {}
        self._joined: dict[int, tuple[Host, TlsWire]] = {}
        self._refusals = _Refusals(notice)

    def nodes(self) -> list[tuple[Host, TlsWire]]:
        """Return those that have joined, ``node2`` before ``node10``."""
        return sorted(self._joined.values(), key=lambda node: _natural(node[0].name))

    def run(self, signal_fd: int) -> None:
        """Wait until all have joined.

        Raises:
            HostError: Not all have come in time.
            InterruptedStartError: The user has ended the wait.
        """
        address, port = self._listener.getsockname()[:2]
        self._tell_where(address, port)
        ends_at = time.monotonic() + self._invitation.timeout_s
        while len(self._joined) < self._invitation.num_nodes:
            if time.monotonic() >= ends_at:
                raise HostError(self._missing(with_port(address, port)))
            for fd, events in self._poll(signal_fd, ends_at):
                if fd == signal_fd:
                    _look_for_stop(signal_fd)
                elif fd == self._listener.fileno():
                    self._accept()
                elif fd in self._guests:
                    self._go_on(self._guests[fd])
                elif events & _GONE:
                    self._lose(fd)
            self._turn_out_late()

    def close(self) -> None:
        """Close what has not proven itself, and tell how many that were."""
        for guest in self._guests.values():
            guest.sock.close()
        self._guests.clear()
        self._refusals.tell()

    def send_away(self) -> None:
        """Close the connections of those that have joined."""
        for _, wire in self._joined.values():
            wire.kill()

    def _tell_where(self, address: str, port: int) -> None:
        if is_wildcard(address):
            self._notice(
                f"listens on all networks of this machine ({address}), as was asked; "
                "name one address to listen only there"
            )
        host = self._invitation.head if is_wildcard(address) else address
        self._notice(
            f"waits for {_nodes(self._invitation.num_nodes)}; start on each: "
            f"ronde run --agent {with_port(host, port)} --token-file FILE"
        )

    def _missing(self, where: str) -> str:
        here = ", ".join(host.name for host, _ in self.nodes()) or "none"
        return (
            f"nodes that join must be {self._invitation.num_nodes}, got "
            f"{len(self._joined)} within {self._invitation.timeout_s:g} s: {here}. "
            f"Start on each: ronde run --agent {where}, or wait longer: --join-timeout"
        )

    def _poll(self, signal_fd: int, ends_at: float) -> list[tuple[int, int]]:
        poll = select.poll()
        poll.register(signal_fd, select.POLLIN)
        if len(self._guests) < MAX_UNPROVEN:
            poll.register(self._listener, select.POLLIN)
        for fd, guest in self._guests.items():
            poll.register(fd, guest.wanted)
            ends_at = min(ends_at, guest.since_s + self._patience_s)
        for fd in self._joined:
            poll.register(fd, select.POLLRDHUP)
        return poll.poll(max(0.0, ends_at - time.monotonic()) * 1000 + 1)

    @property
    def _patience_s(self) -> float:
        """Who has nothing to prove must not keep out by sheer number who has."""
        return _CROWDED_S if len(self._guests) >= MAX_UNPROVEN else PROOF_S

    def _accept(self) -> None:
        try:
            raw, address = self._listener.accept()
        except OSError:
            # It has gone again.
            return
        raw.settimeout(0)
        try:
            sock = self._tls.context.wrap_socket(
                raw, server_side=True, do_handshake_on_connect=False
            )
        except OSError:
            raw.close()
            return
        steps = admit(sock, self._invitation.token, self._tls.certificate)
        guest = _Guest(sock, address[0], steps, time.monotonic())
        self._guests[sock.fileno()] = guest
        self._go_on(guest)

    def _go_on(self, guest: _Guest) -> None:
        try:
            guest.wanted = next(guest.steps)
        except StopIteration as end:
            self._let_in(guest, end.value)
        except ProofError:
            self._refuse(guest, "does not know the token")
        except LaunchError as error:
            self._refuse(guest, f"knows the token but is no node: {error}")
        except (OSError, EOFError):
            self._refuse(guest, "did not prove that it knows the token")

    def _refuse(self, guest: _Guest, kind: str) -> None:
        del self._guests[guest.sock.fileno()]
        guest.sock.close()
        self._refusals.add(kind, guest.address)

    def _let_in(self, guest: _Guest, claim: Claim) -> None:
        fd = guest.sock.fileno()
        del self._guests[fd]
        name = self._free_name(claim.host)
        self._joined[fd] = (Host(name, claim.slots), TlsWire(guest.sock))
        wanted = self._invitation.num_nodes
        self._notice(f"{name} has joined ({len(self._joined)} of {wanted})")

    def _free_name(self, name: str) -> str:
        """Return a name that no other node has: containers may share one."""
        taken = {host.name for host, _ in self._joined.values()}
        taken.add(self._invitation.head)
        names = [name, *(f"{name}-{i}" for i in range(2, len(taken) + 2))]
        return next(each for each in names if each not in taken)

    def _lose(self, fd: int) -> None:
        host, wire = self._joined.pop(fd)
        wire.kill()
        self._notice(f"{host.name} is gone again before the job began")

    def _turn_out_late(self) -> None:
        due = time.monotonic() - self._patience_s
        for guest in list(self._guests.values()):
            if guest.since_s <= due:
                self._refuse(guest, "did not prove that it knows the token")


def _look_for_stop(signal_fd: int) -> None:
    for number in read_signals(signal_fd):
        if signal.Signals(number) in STOPPING:
            raise InterruptedStartError(number)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts by the numbers in a name."""
    pieces = re.split(r"(\d+)", name, flags=re.ASCII)
    return [(int(p), "") if p.isdigit() else (-1, p) for p in pieces if p]


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
