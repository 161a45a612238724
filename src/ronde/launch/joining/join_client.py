"""A node: finds the head, and carries its agent's bytes there and back."""

import errno
import os
import random
import select
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ronde.errors import HostError, LaunchError
from ronde.launch.joining.channel import TlsChannel, make_node_context, with_port
from ronde.launch.joining.mutual_auth import NodeInfo, Token, authenticate_head
from ronde.launch.node import ProcessTransport
from ronde.launch.process_tree import children, sweep
from ronde.launch.signals import STOPPING, raise_if_stopped, read_signals, wait_for

LAST_ATTEMPT_S = 1.0  # what the last attempt has at least, to find out what is wrong
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
_AGENT_END_S = 10.0
_UNANSWERED_S = 10.0
_COMPLAINT_BYTES = 64 << 10


class JoinRequest(NamedTuple):
    """How a node looks for its head."""

    host: str  # name or numeric address of the head
    port: int
    token: Token  # what both sides must know
    node_info: NodeInfo  # what the node says of itself
    timeout_s: float  # how long it looks


def join_head(
    request: JoinRequest, signal_fd: int, notice: Callable[[str], None]
) -> TlsChannel:
    """Return the connection to the head, once both sides have proven themselves."""
    where = with_port(request.host, request.port)
    ends_at = time.monotonic() + request.timeout_s
    pause_s = _FIRST_PAUSE_S
    reported = ""
    while True:
        try:
            now_s = time.monotonic()
            due_s = max(min(now_s + _ATTEMPT_S, ends_at), now_s + LAST_ATTEMPT_S)
            return _try_all(request, signal_fd, due_s)
        except (OSError, EOFError, LaunchError) as error:
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
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            _connect(sock, address, signal_fd, ends_at)
            context = make_node_context()
            sock = secured = context.wrap_socket(sock, do_handshake_on_connect=False)
            for wanted in authenticate_head(secured, request.token, request.node_info):
                _wait(signal_fd, sock.fileno(), wanted, ends_at)
            return TlsChannel(secured)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError | EOFError | LaunchError):
                raise
            failure = error
    raise failure


def _connect(
    sock: socket.socket, address: tuple[object, ...], signal_fd: int, ends_at: float
) -> None:
    sock.settimeout(0)
    code = sock.connect_ex(address)
    if code == errno.EINPROGRESS:
        _wait(signal_fd, sock.fileno(), select.POLLOUT, ends_at)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _wait(signal_fd: int, fd: int, wanted: int, ends_at: float) -> None:
    """Wait for one event; without a descriptor for the time."""
    poll = select.poll()
    poll.register(signal_fd, select.POLLIN)
    if fd >= 0:
        poll.register(fd, wanted)
    while True:
        left_s = ends_at - time.monotonic()
        ready = poll.poll(left_s * 1000 + 1) if left_s > 0 else []
        if not ready and fd >= 0:
            raise TimeoutError("no answer")
        if not ready or any(each == fd for each, _ in ready):
            return
        raise_if_stopped(signal_fd)


class RelayEnd(NamedTuple):
    """Why a node has nothing more to do."""

    result: int | None  # the job's exit code; None if the head did not send it
    interrupted_by: int  # the signal that ended this node, 0 for none


def relay(
    channel: TlsChannel,
    agent: "subprocess.Popen[bytes]",
    signal_fd: int,
    complain: Callable[[bytes], object],
) -> RelayEnd:
    """Carry bytes between head and agent until the head sends how the job ended.

    When it returns, no process is left that the agent has started, given that this
    process adopts orphans (``process_tree.adopt_orphans``).
    """
    others = children() - {agent.pid}
    transport = ProcessTransport(agent)
    try:
        return _Relay(channel, transport, signal_fd, complain).run()
    finally:
        transport.close()
        if transport.wait(_AGENT_END_S) is None:
            transport.kill()
            transport.wait(_AGENT_END_S)
        sweep(spared=others)
        # Last: who sees the connection end may believe that nothing is left here.
        channel.kill()


class _Relay:
    """One relay: at most one piece of data in hand for each direction."""

    def __init__(
        self,
        channel: TlsChannel,
        transport: ProcessTransport,
        signal_fd: int,
        complain: Callable[[bytes], object],
    ) -> None:
        self._channel = channel
        self._transport = transport
        self._signal_fd = signal_fd
        self._complain = complain
        self._to_agent = self._to_head = memoryview(b"")
        self._is_head_here = self._is_agent_here = self._has_errors = True
        self._is_hurried = self._is_asked = False
        self._interrupted_by = 0

    def run(self) -> RelayEnd:
        while self._is_head_here and not self._interrupted_by:
            ready = self._poll()
            if self._signal_fd in ready:
                self._take_signals()
            self._serve_head(ready)
            if self._is_agent_here:
                self._serve_agent(ready)
            if self._is_agent_here and self._channel.is_ended:
                self._end_agent()
        return RelayEnd(self._channel.result, self._interrupted_by)

    def _poll(self) -> dict[int, int]:
        # Nothing more is read for a side that has not taken what there is.
        head_fd, transport = self._channel.read_fd, self._transport
        wanted = {self._signal_fd: select.POLLIN}
        wanted[head_fd] = 0 if self._to_agent else select.POLLIN
        if self._to_head:
            wanted[head_fd] |= select.POLLOUT
        if self._is_agent_here:
            if not self._to_head:
                wanted[transport.read_fd] = select.POLLIN
            elif not self._is_hurried:
                wanted[transport.read_fd] = 0
            if self._to_agent:
                wanted[transport.write_fd] = select.POLLOUT
            if self._has_errors:
                wanted[transport.error_fd] = select.POLLIN
        poll = select.poll()
        for fd, events in wanted.items():
            poll.register(fd, events)
        return dict(poll.poll())

    def _serve_head(self, ready: Mapping[int, int]) -> None:
        if self._to_head:
            self._write_head()
        if self._to_agent:
            gone = select.POLLHUP | select.POLLERR
            if ready.get(self._channel.read_fd, 0) & gone:
                self._is_head_here = False
            return
        data = self._channel.read()
        if data == b"":
            self._is_head_here = False
        elif data and self._is_agent_here:
            self._to_agent = memoryview(data)

    def _serve_agent(self, ready: Mapping[int, int]) -> None:
        transport = self._transport
        if self._has_errors:
            self._pass_on_complaints()
        if self._to_agent:
            try:
                taken = transport.write(self._to_agent)
            except BrokenPipeError:
                # Its last words may still be on their way.
                taken = len(self._to_agent)
            self._to_agent = self._to_agent[taken:]
        if self._to_head:
            if transport.read_fd in ready:
                # The agent has ended while the head takes nothing.
                self._hurry()
            return
        data = transport.read()
        if data == b"":
            self._end_agent()
        elif data:
            self._to_head = memoryview(data)
            self._write_head()

    def _hurry(self) -> None:
        # While the agent is here its lease finds out that the head is gone for good.
        self._is_hurried = True
        self._channel.require_answers(_UNANSWERED_S)

    def _take_signals(self) -> None:
        for number in read_signals(self._signal_fd):
            if number not in STOPPING:
                continue
            if self._is_asked or not self._is_agent_here:
                self._interrupted_by = number
            else:
                # The agent asks the head to end all ranks, here in their grace.
                self._is_asked = True
                os.kill(self._transport.pid, signal.SIGTERM)

    def _write_head(self) -> None:
        try:
            while self._to_head and (taken := self._channel.write(self._to_head)):
                self._to_head = self._to_head[taken:]
        except BrokenPipeError:
            self._is_head_here = False

    def _pass_on_complaints(self) -> None:
        try:
            data = os.read(self._transport.error_fd, _COMPLAINT_BYTES)
        except BlockingIOError:
            return
        self._has_errors = bool(data)
        if data:
            self._complain(data)

    def _end_agent(self) -> None:
        """Send the head the agent's exit code; the job's is still to come."""
        while self._has_errors and wait_for([self._transport.error_fd], [], 0):
            self._pass_on_complaints()
        self._hurry()
        self._is_agent_here = False
        self._to_agent = memoryview(b"")
        self._transport.close()
        code = self._transport.wait(_AGENT_END_S)
        code = -signal.SIGKILL if code is None else code
        if self._is_head_here:
            self._channel.send_result(code if code >= 0 else 128 - code)
