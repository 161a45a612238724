"""A node's way to the head: looked for until it is there, and proven."""

import errno
import os
import random
import select
import signal
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

from ronde.errors import HostError, LaunchError
from ronde.launch.joining.address import with_port
from ronde.launch.joining.channel import Channel
from ronde.launch.joining.handshake import introduce
from ronde.launch.joining.proof import Claim
from ronde.launch.joining.tls import make_node_context
from ronde.launch.joining.token import Token
from ronde.launch.signals import STOPPING, InterruptedStartError, read_signals

LAST_ATTEMPT_S = 1.0
"""What the last attempt has at least, to find out what is wrong."""

_ATTEMPT_S = 10.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_REASONS = (
    (
        (EOFError, ConnectionResetError, BrokenPipeError),
        "it ended the connection: its token is another, or it waits for nobody more",
    ),
    ((socket.gaierror,), "its name is not known"),
    ((ConnectionRefusedError,), "nothing listens there"),
    ((TimeoutError,), "it does not answer"),
    ((ssl.SSLError,), "what answers there does not speak TLS 1.3"),
)


@dataclass(frozen=True, slots=True)
class Knock:
    """How a node looks for its head.

    Attributes:
        host: Name or numeric address of the head.
        port: Where it listens.
        token: What both sides must know.
        claim: What the node says of itself.
        timeout_s: How long it looks.
    """

    host: str
    port: int
    token: Token
    claim: Claim
    timeout_s: float


def join_head(knock: Knock, signal_fd: int, notice: Callable[[str], None]) -> Channel:
    """Return the connection to the head, once both sides have proven themselves.

    The head may start later, and its name be unknown until then.

    Args:
        knock: Where to look, and what to prove.
        signal_fd: From ``signals.caught_signals``.
        notice: Is told why it takes long.

    Raises:
        HostError: The head was not there, or did not let this node in, in time.
        InterruptedStartError: The user has ended the wait.
    """
    where = with_port(knock.host, knock.port)
    ends_at = time.monotonic() + knock.timeout_s
    pause_s = _FIRST_PAUSE_S
    told = ""
    while True:
        try:
            due_s = max(min(_soon(_ATTEMPT_S), ends_at), _soon(LAST_ATTEMPT_S))
            return _try_all(knock, signal_fd, due_s)
        except (OSError, EOFError, LaunchError) as error:
            reason = _explain(error)
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            raise HostError(
                f"head at {where} must let this node in within {knock.timeout_s:g} s, "
                f"but {reason}."
            )
        if reason != told:
            notice(f"waits for the head at {where}: {reason}")
            told = reason
        # Not all at once again: many nodes are started together.
        wait_s = min(left_s, pause_s * (0.5 + random.random()))  # noqa: S311
        _wait(signal_fd, -1, 0, _soon(wait_s))
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)


def _soon(after_s: float) -> float:
    return time.monotonic() + after_s


def _explain(error: Exception) -> str:
    """Say in half a sentence why there is no connection."""
    for kinds, reason in _REASONS:
        if isinstance(error, kinds):
            return reason
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error)).rstrip(".")


def _try_all(knock: Knock, signal_fd: int, ends_at: float) -> Channel:
    """Try each address of the head's name; raise the last failure."""
    found = socket.getaddrinfo(knock.host, knock.port, type=socket.SOCK_STREAM)
    failure: Exception = TimeoutError()
    for family, _, _, _, address in found:
        try:
            return _try_one(knock, (family, address), signal_fd, ends_at)
        except (OSError, EOFError, LaunchError) as error:
            failure = error
    raise failure


def _try_one(
    knock: Knock,
    where: tuple[socket.AddressFamily, tuple[object, ...]],
    signal_fd: int,
    ends_at: float,
) -> Channel:
    family, address = where
    raw = socket.socket(family, socket.SOCK_STREAM)
    raw.settimeout(0)
    sock = None
    try:
        _connect(raw, address, signal_fd, ends_at)
        sock = make_node_context().wrap_socket(raw, do_handshake_on_connect=False)
        for wanted in introduce(sock, knock.token, knock.claim):
            _wait(signal_fd, sock.fileno(), wanted, ends_at, is_needed=True)
    except BaseException:
        (sock or raw).close()
        raise
    return Channel(sock)


def _connect(
    raw: socket.socket, address: tuple[object, ...], signal_fd: int, ends_at: float
) -> None:
    code = raw.connect_ex(address)
    if code == errno.EINPROGRESS:
        _wait(signal_fd, raw.fileno(), select.POLLOUT, ends_at, is_needed=True)
        code = raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _wait(
    signal_fd: int, fd: int, wanted: int, ends_at: float, *, is_needed: bool = False
) -> None:
    """Wait for a descriptor, or for the time where there is none.

    Raises:
        TimeoutError: The time came first, and ``is_needed``.
        InterruptedStartError: The user's signal came first.
    """
    poll = select.poll()
    poll.register(signal_fd, select.POLLIN)
    if fd >= 0:
        poll.register(fd, wanted)
    while True:
        left_s = ends_at - time.monotonic()
        ready = poll.poll(left_s * 1000 + 1) if left_s > 0 else []
        if not ready and is_needed:
            raise TimeoutError("no answer")
        if not ready or any(each == fd for each, _ in ready):
            return
        for number in read_signals(signal_fd):
            if signal.Signals(number) in STOPPING:
                raise InterruptedStartError(number)
