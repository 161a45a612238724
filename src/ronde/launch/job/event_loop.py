"""The event loop of the controller: agents, signals and the output process."""

import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from ronde.errors import LaunchError, StoreError
from ronde.launch.hosts.node import EXIT_UNREACHABLE, AgentNode, HostLoss
from ronde.launch.job.output import NoOutput, OutputProcess
from ronde.launch.limits import Timeouts
from ronde.launch.signals import (
    ASKING,
    STOPPING,
    SUSPENDING,
    TIMED_OUT,
    InterruptedStartError,
    Watched,
    read_signals,
    serve_ready,
    suspend_self,
    wait_for,
)
from ronde.launch.wire.messages import (
    Forward,
    FromAgent,
    Notice,
    Observed,
    Output,
    Pong,
    Relayed,
)
from ronde.store.protocol import Splitter, StoreState
from ronde.units import format_duration, list_first

if TYPE_CHECKING:
    from ronde.launch.hosts.join_server import JoinServer
    from ronde.launch.job.status import StatusService

SLOW_S = 10.0  # a longer step of the start is reported once
_VERBOSE_SLOW_S = _LONG_S = 2.0
_MAX_NAMES = 4
_MAX_UNSENT_BYTES = 256 << 20
_MAX_BACKLOG_BYTES = 256 << 10
_LAST_S = 1.0
_MUCH_MEMORY, _ALL_MEMORY = 0.8, 0.95  # of the limit of a container


class StartProgress:
    """Reports slow steps of a job's start."""

    def __init__(
        self, notice: Callable[[str], None], *, is_verbose: bool = False
    ) -> None:
        self._notice = notice
        self._is_verbose = is_verbose
        self._step = ""
        self._awaited: Callable[[], Sequence[str]] = tuple
        self._begun_s = 0.0
        self.due_s = float("inf")  # of the next ``report``, monotonic

    def begin(self, step: str, awaited: Callable[[], Sequence[str]]) -> None:
        self._step, self._awaited = step, awaited
        self._begun_s = time.monotonic()
        self.due_s = self._begun_s + (_VERBOSE_SLOW_S if self._is_verbose else SLOW_S)

    def report_late(self) -> None:
        if time.monotonic() >= self.due_s:
            self.report()
            self.due_s += SLOW_S if self._is_verbose else float("inf")

    def report(self) -> None:
        if self._step and (names := self._awaited()):
            shown = list_first(names, _MAX_NAMES)
            took_s = time.monotonic() - self._begun_s
            self._notice(f"waiting for {shown} {self._step}, {took_s:.0f} s so far")

    def took(self, done: str, took_s: float) -> None:
        if took_s >= _LONG_S:
            self._notice(f"{done} in {format_duration(took_s)}")

    def end(self, done: str) -> None:
        self._step, self.due_s = "", float("inf")
        if self._is_verbose:
            took_s = time.monotonic() - self._begun_s
            self._notice(f"{done} in {format_duration(took_s)}")


_Client = tuple[AgentNode, int]
"""A node, and the number of a connection there."""


class StoreService:
    """The key-value store of one generation; its ranks reach it through the agents.

    Every frame has the ``epoch`` of its generation, so that ranks of another generation
    get no answer. The default -1 matches no generation.
    """

    def __init__(self, epoch: int = -1) -> None:
        self._epoch = epoch
        self._state: StoreState[_Client] = StoreState()
        self._received: dict[_Client, Splitter] = {}

    def on_relayed(self, node: AgentNode, relayed: Relayed) -> None:
        if relayed.epoch != self._epoch:
            return
        client = node, relayed.connection
        if not relayed.data:
            self._forget(client)
            return
        received = self._received.setdefault(client, Splitter())
        try:
            for body in received.feed(relayed.data):
                self._send_all(self._state.handle(client, body))
        except StoreError:
            # It is no request: close the connection.
            self._send(client, b"")

    def clear(self) -> None:
        """Drop all keys and refuse waiting requests, because a new view begins."""
        self._send_all(self._state.clear())

    def forget(self, node: AgentNode) -> None:
        for client in [each for each in self._received if each[0] is node]:
            self._forget(client)

    def _send_all(self, replies: Sequence[tuple[_Client, bytes]]) -> None:
        for client, reply in replies:
            is_stuck = client[0].relayed_bytes > _MAX_UNSENT_BYTES
            self._send(client, b"" if is_stuck else reply)

    def _send(self, client: _Client, data: bytes) -> None:
        node, number = client
        node.relay(Relayed(self._epoch, number, data))
        if not data:
            self._forget(client)

    def _forget(self, client: _Client) -> None:
        self._received.pop(client, None)
        self._state.forget(client)


class Handler:
    """Callbacks of the event loop; the defaults are for a job without ranks."""

    def __init__(self, loop: "EventLoop") -> None:
        self._loop = loop

    def on_message(self, node: AgentNode, message: FromAgent) -> None:
        """Handle an agent's message; by default, refuse it."""
        kind = type(message).__name__
        raise LaunchError(f"agent on {node.name} sent an unexpected {kind}.")

    def on_output(self, output: Output) -> None:
        raise LaunchError(f"rank {output.worker} wrote output before it was started.")

    def on_loss(self, node: AgentNode, loss: HostLoss) -> None:
        raise NotImplementedError

    def on_fault(self, node: AgentNode, error: LaunchError) -> None:  # noqa: ARG002
        raise error

    def on_signal(self, number: int) -> None:
        if number in (ASKING, TIMED_OUT):
            self._loop.progress.report()
        if number in STOPPING:
            raise InterruptedStartError(number)

    def watched(self) -> Watched:
        """Yield further descriptors to poll, as ``EventLoop`` does."""
        return iter(())

    def on_broken_output(self, number: int) -> None:
        """Handle a closed or full standard output; ``number`` is its signal."""


class EventLoop:
    """Waits for all agents of a job, the user's signals and the output process."""

    def __init__(
        self,
        output: OutputProcess | NoOutput,
        signal_fd: int,
        progress: StartProgress,
        timeouts: Timeouts,
    ) -> None:
        self.output, self.signal_fd = output, signal_fd
        self.progress, self.timeouts = progress, timeouts
        self.nodes: list[AgentNode] = []
        self.is_hurried = False  # drop output that cannot be shown at once
        self.has_strays = False  # a killed process may have left others
        self.store = StoreService()  # each generation has a new one
        self.job_id = ""
        self.status: StatusService | None = None  # after a moment
        self._warned: set[AgentNode] = set()  # of their memory
        self.join_server: JoinServer | None = None  # if nodes may still join
        self.stopped_by: int | None = None  # the user's last signal to end the job

    @property
    def _services(self) -> "list[StatusService | JoinServer]":
        return [each for each in (self.status, self.join_server) if each is not None]

    @property
    def live_nodes(self) -> list[AgentNode]:
        return [node for node in self.nodes if not node.is_over]

    @property
    def is_held_back(self) -> bool:
        return self.output.waiting_bytes >= _MAX_BACKLOG_BYTES

    def serve(
        self,
        handler: Handler,
        is_done: Callable[[], bool],
        deadline: Callable[[], float],
    ) -> bool:
        """Run until ``is_done()``; return False if the deadline passes first."""
        while not is_done():
            now_s, nodes = time.monotonic(), self.live_nodes
            due_s = min([deadline(), *(node.silent_by_s for node in nodes)])
            due_s = min([due_s, *(node.ping(now_s) for node in nodes)])
            for service in self._services:
                service.advance()
                due_s = min(due_s, service.due_s)
            due_s = min(due_s, self.progress.due_s)
            serve_ready(self._watched(handler), due_s - now_s)
            self.progress.report_late()
            if self.is_hurried or not self.is_held_back:
                for node in self.live_nodes:
                    node.grant()
            self._lose_silent(handler)
            if time.monotonic() > deadline():
                return is_done()
        return True

    def _watched(self, handler: Handler) -> Watched:
        output = self.output
        yield self.signal_fd, select.POLLIN, partial(self._on_signals, handler)
        if not output.has_ended:
            yield output.read_fd, select.POLLIN, partial(self._read_output, handler)
        if output.write_fd >= 0:
            yield output.write_fd, select.POLLOUT, output.flush
        for node in self.live_nodes:
            transport = node.transport
            if node.is_writing:
                yield transport.write_fd, select.POLLOUT, node.flush
            if node.has_errors:
                yield transport.error_fd, select.POLLIN, node.read_errors
            serve = partial(self._serve_node, handler, node)
            yield transport.read_fd, select.POLLIN, serve
        for service in self._services:
            yield from service.watched()
        yield from handler.watched()

    def _read_output(self, handler: Handler) -> None:
        if number := self.output.read():
            handler.on_broken_output(number)

    def _serve_node(self, handler: Handler, node: AgentNode) -> None:
        if node.is_over:
            return
        try:
            self._receive(handler, node)
        except LaunchError as error:
            handler.on_fault(node, error)

    def _receive(self, handler: Handler, node: AgentNode) -> None:
        received = node.receive()
        if received is None:
            self.lose(handler, node, node.explain_end())
            return
        node.heard()
        for message in received:
            if isinstance(message, Output):
                node.require_own(message.worker)
                node.owed_bytes += len(message.data)
                if self.is_hurried and self.is_held_back:
                    self.output.discard()
                self.output.output(message)
                handler.on_output(message)
            elif isinstance(message, Relayed):
                self.store.on_relayed(node, message)
            elif isinstance(message, (Pong, Notice, Observed)):
                self._note(node, message)
            elif not node.is_over:
                handler.on_message(node, message)

    def _note(self, node: AgentNode, message: Pong | Notice | Observed) -> None:
        if isinstance(message, Pong):
            node.on_pong(message)
            if (use := node.memory_use(_ALL_MEMORY)) and node not in self._warned:
                self._warned.add(node)
                self.notice(node, f"uses {use}")
        elif isinstance(message, Notice):
            self.notice(node, message.text)
        elif self.status is not None:
            self.status.on_observed(node.name, message.line)

    def notice(self, node: AgentNode, text: str) -> None:
        where = f"{node.name}: " if len(self.nodes) > 1 else ""
        self.output.notice(where + text)

    def lose(self, handler: Handler, node: AgentNode, loss: HostLoss) -> None:
        if use := node.memory_use(_MUCH_MEMORY):
            age_s = time.monotonic() - node.heard_at_s
            reason = (
                f"{loss.reason}; {age_s:.0f} s before it used {use}, and a container"
            )
            loss = loss._replace(reason=f"{reason} is killed at its limit")
        node.close()
        self.store.forget(node)
        handler.on_loss(node, loss)

    def _lose_silent(self, handler: Handler) -> None:
        now_s, nodes = time.monotonic(), self.live_nodes
        if all(now_s <= node.silent_by_s for node in nodes):
            return
        # Include hosts that would follow at once.
        due_s = now_s + self.timeouts.ping_s
        silent = [node for node in nodes if due_s > node.silent_by_s]
        # Imported late: most jobs lose no host.
        from ronde.launch.network import find_answering

        probed = [n for n in silent if n.timeouts.probes_silent and not n.has_more_time]
        answering = find_answering({node.name: node.addresses for node in probed})
        for node in silent:
            if node.name in answering:
                node.give_more_time()
            elif not wait_for([node.transport.read_fd], [], 0):
                node.transport.kill()
                silence_s = time.monotonic() - node.heard_at_s
                reason = f"no message from it for {silence_s:.0f} s"
                self.lose(handler, node, HostLoss(reason, EXIT_UNREACHABLE))

    def _on_signals(self, handler: Handler) -> None:
        numbers = read_signals(self.signal_fd)
        for index, number in enumerate(numbers):
            if number in STOPPING:
                self.stopped_by = number
            if number != SUSPENDING:
                handler.on_signal(number)
                continue
            if signal.SIGCONT in numbers[index:]:
                continue  # SIGCONT came right after it
            # Stop the ranks and then this process, until it is continued.
            for node in self.live_nodes:
                node.send(Forward(signal.SIGSTOP))
            suspend_self()
            for node in self.live_nodes:
                node.heard()
                node.send(Forward(signal.SIGCONT))

    def write_out(self, limit_s: float) -> int:
        output, number, is_last = self.output, 0, False
        output.close()
        while not output.has_ended:
            readable = [output.read_fd, *([] if is_last else [self.signal_fd])]
            writable = [] if output.write_fd < 0 else [output.write_fd]
            ready = wait_for(readable, writable, limit_s)
            is_stopped = any(n in STOPPING for n in read_signals(self.signal_fd))
            if not is_last and (not ready or is_stopped):
                output.discard()
                is_last, limit_s = True, _LAST_S
            elif not ready:
                output.kill()
                text = "the last lines were not written: the output stalls"
                with suppress(OSError, ValueError):
                    if wait_for([], [sys.stderr.fileno()], 0):
                        print(f"ronde: {text}.", file=sys.stderr, flush=True)  # noqa: T201
                break
            elif output.read_fd in ready:
                number = output.read() or number
            else:
                output.flush()
        return number
