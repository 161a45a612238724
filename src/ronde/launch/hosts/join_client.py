"""A node: finds the head, and is its agent here."""

import errno
import math
import os
import random
import select
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from ronde.errors import HostError, LaunchError, StoreError
from ronde.launch.agent.agent import run_agent, run_reaped
from ronde.launch.agent.relay import name_directory
from ronde.launch.hosts.node import EXIT_UNREACHABLE
from ronde.launch.signals import STOPPING, raise_if_stopped, wait_for
from ronde.launch.wire.tls import (
    NodeInfo,
    Steps,
    TlsChannel,
    authenticate_head,
    make_node_context,
    with_port,
)
from ronde.store.authentication import SharedKey

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
    ((ssl.SSLError,), "it does not speak TLS 1.3"),
)
_UNANSWERED_S = 10.0
_FAILURES = (OSError, EOFError, LaunchError, StoreError)


class JoinRequest(NamedTuple):
    """A node's options for joining its head."""

    host: str  # name or numeric address of the head
    port: int
    token: SharedKey  # what both sides must know
    node_info: NodeInfo  # what the node says of itself
    timeout_s: float  # how long it looks
    last_attempt_s: float = 1.0  # the last one has this at least, to find a reason


def join_head(
    request: JoinRequest, signal_fd: int, notice: Callable[[str], None]
) -> TlsChannel:
    where = with_port(request.host, request.port)
    ends_at = time.monotonic() + request.timeout_s
    pause_s = _FIRST_PAUSE_S
    reported = ""
    while True:
        try:
            now_s = time.monotonic()
            least_s = now_s + request.last_attempt_s
            due_s = max(min(now_s + _ATTEMPT_S, ends_at), least_s)
            return _try_all(request, signal_fd, due_s)
        except _FAILURES as error:
            reason = _explain(error)
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            raise HostError(
                f"head at {where} must let this node in within {request.timeout_s:g} "
                f"s, but {reason}."
            )
        if reason != reported:
            notice(f"waits for the head at {where}: {reason}")
            reported = reason
        # Not all at once again: many nodes are started together.
        wait_s = min(left_s, pause_s * (0.5 + random.random()))  # noqa: S311
        _wait(signal_fd, -1, 0, time.monotonic() + wait_s)
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)


def _explain(error: Exception) -> str:
    for kinds, reason in _REASONS:
        if isinstance(error, kinds):
            return reason
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error)).rstrip(".")


def _try_all(request: JoinRequest, signal_fd: int, ends_at: float) -> TlsChannel:
    found = socket.getaddrinfo(request.host, request.port, type=socket.SOCK_STREAM)
    failure: Exception = TimeoutError()
    for family, _, _, _, address in found:
        sock = make_node_context().wrap_socket(
            socket.socket(family), do_handshake_on_connect=False
        )
        try:
            for wanted in _connect(sock, address, request):
                _wait(signal_fd, sock.fileno(), wanted, ends_at)
            return TlsChannel(sock)
        except BaseException as error:
            sock.close()
            if not isinstance(error, _FAILURES):
                raise
            failure = error
    raise failure


def _connect(
    sock: ssl.SSLSocket, address: tuple[object, ...], request: JoinRequest
) -> Steps[None]:
    sock.settimeout(0)
    code = sock.connect_ex(address)
    if code == errno.EINPROGRESS:
        yield select.POLLOUT
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
    yield from authenticate_head(sock, request.token, request.node_info)


def _wait(signal_fd: int, fd: int, wanted: int, ends_at: float) -> None:
    """Wait for one event; without a descriptor for the time."""
    readable = [signal_fd, *([fd] if wanted == select.POLLIN else [])]
    writable = [fd] if wanted == select.POLLOUT else []
    while (left_s := ends_at - time.monotonic()) > 0:
        if fd in wait_for(readable, writable, left_s + 0.001):
            return
        raise_if_stopped(signal_fd)
    if fd >= 0:
        raise TimeoutError("no answer")


def follow_head(
    channel: TlsChannel,
    local: "subprocess.Popen[bytes]",
    signal_fd: int,
    on_lost: Callable[[], object],
) -> NoReturn:
    """Be the agent of a node that has joined; end with the job's exit code.

    With ``EXIT_UNREACHABLE``, after ``on_lost``, if the head did not send it. A first
    signal asks the head to end the job, a second one ends this node at once. ``local``
    is the agent that was started before this process knew its part.
    """
    local.communicate()
    directory, reaper = name_directory(), os.getpid()
    # What comes from here on is passed on to the agent.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    raise_if_stopped(signal_fd)

    def work() -> int:
        # Nothing typed at this terminal reaches the agent or its programs.
        os.setsid()
        os.close(0)
        os.open(os.devnull, os.O_RDONLY)  # takes its number
        code = 1
        try:
            code = run_agent(channel, directory)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # While the agent was here its lease found out if the head was gone.
            channel.require_answers(_UNANSWERED_S)
            if os.getppid() != reaper:
                # The node was killed, which is no end of its agent's own.
                os._exit(code)
            channel.send_result(code)
        channel.wait(math.inf)
        if channel.result is None:
            on_lost()
            return EXIT_UNREACHABLE
        return channel.result

    run_reaped(work, directory, channel.kill, is_foreground=True)
