"""A node that joins a job: connect to the head node, and run an agent here."""

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

from ronde.addresses import family_of
from ronde.errors import HostError, LaunchError, StoreError
from ronde.launch.agent.agent import run_agent, run_reaped
from ronde.launch.agent.relay import name_directory
from ronde.launch.host import LOOK_S, LookUp
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
        "it closed the connection: its token differs, or it takes no node now",
    ),
    (
        (socket.gaierror,),
        "its name is not known; a pod's needs a Service named as its subdomain",
    ),
    ((ConnectionRefusedError,), "nothing listens there"),
    ((TimeoutError,), "it does not answer"),
    ((ssl.SSLError,), "it does not speak TLS 1.3, or a service mesh is in between"),
)
_UNANSWERED_S = 10.0
_FAILURES = (OSError, EOFError, LaunchError, StoreError)


class JoinRequest(NamedTuple):
    """Options of a node that joins a job."""

    host: str  # name or numeric address of the head
    port: int
    token: SharedKey
    node_info: NodeInfo
    timeout_s: float
    last_attempt_s: float = 1.0  # least time of the last attempt, to find a reason


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
            if isinstance(error, (EOFError, LaunchError)):
                pause_s = _LONGEST_PAUSE_S  # it has answered
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            raise HostError(
                f"could not join the head node at {where} within "
                f"{request.timeout_s:g} s: {reason}."
            )
        if reason != reported:
            notice(f"waiting for the head node at {where}: {reason}")
            reported = reason
        # At random times: many nodes are started together.
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
    failure: Exception = TimeoutError()
    for address in _look_up(request.host, signal_fd):
        sock = make_node_context().wrap_socket(
            socket.socket(family_of(address)), do_handshake_on_connect=False
        )
        try:
            for wanted in _connect(sock, (address, request.port), request):
                _wait(signal_fd, sock.fileno(), wanted, ends_at)
            return TlsChannel(sock)
        except BaseException as error:
            sock.close()
            if not isinstance(error, _FAILURES):
                raise
            failure = error
    raise failure


def _look_up(name: str, signal_fd: int) -> tuple[str, ...]:
    """Resolve a name in a thread, so that a signal is answered meanwhile."""
    look_up = LookUp([name])
    while not look_up.is_over(LOOK_S):
        raise_if_stopped(signal_fd)
    found = look_up.answers.get(name)
    if found is None:
        raise LaunchError("no name server answers.")
    if not found:
        raise socket.gaierror(socket.EAI_NONAME, f"{name} is not known")
    return found


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
    """Wait until ``fd`` is ready; if ``fd`` is negative, wait until ``ends_at``."""
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
    """Run the agent of a node that has joined; exit with the job's exit code.

    If the head node sends no exit code, call ``on_lost`` and exit with
    ``EXIT_UNREACHABLE``. A first signal asks the head node to end the job, a second one
    ends this node at once. ``local`` is an agent that is no longer needed; it is ended.
    """
    local.communicate()
    directory, reaper = name_directory(), os.getpid()
    # Signals from here on are passed on to the agent.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    raise_if_stopped(signal_fd)

    def work() -> int:
        # Keep the terminal's signals from the agent and its programs.
        os.setsid()
        os.close(0)
        os.open(os.devnull, os.O_RDONLY)
        code = 1
        try:
            code = run_agent(channel, directory)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # From here on no lease of the agent notices the loss of the head.
            channel.require_answers(_UNANSWERED_S)
            if os.getppid() != reaper:
                os._exit(code)  # the node was killed
            channel.send_result(code)
        if code > 128:
            return code  # of a signal before there was a job
        channel.wait(math.inf)
        if channel.result is None:
            on_lost()
            return EXIT_UNREACHABLE
        return channel.result

    run_reaped(work, directory, channel.kill, is_foreground=True)
