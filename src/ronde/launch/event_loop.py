"""The one place where the controller waits: for agents, user and output process."""

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ronde.errors import LaunchError, StoreError
from ronde.launch.frames import Output, Relayed, wait_for
from ronde.launch.messages import Forward, FromAgent, Pong
from ronde.launch.node import AgentNode, HostLoss
from ronde.launch.output.output_process import OutputProcess
from ronde.launch.output.sink import NoOutput
from ronde.launch.signals import (
    ASKING,
    SUSPENDING,
    TIMED_OUT,
    InterruptedStartError,
    read_signals,
    suspend_self,
)
from ronde.launch.timeouts import Timeouts
from ronde.store.protocol import Splitter, max_connections
from ronde.store.server import StoreState
from ronde.units import format_duration

SLOW_S = 10.0  # after so long a step says once what it waits for
_VERBOSE_SLOW_S = _LONG_S = 2.0
_MAX_NAMES = 4
_MAX_UNSENT_BYTES = 256 << 20
_MAX_BACKLOG_BYTES = 256 << 10
_LAST_S = 1.0


class StartProgress:
    """The steps of one start, one after the other."""

    def __init__(self, say: Callable[[str], None], *, is_verbose: bool = False) -> None:
        self._say = say
        self._is_verbose = is_verbose
        self._what = ""
        self._awaited: Callable[[], Sequence[str]] = tuple
        self._begun_s = 0.0
        self.due_s = float("inf")
        """When ``look`` is to be called at the latest, on the monotonic clock."""

    def begin(self, what: str, awaited: Callable[[], Sequence[str]]) -> None:
        self._what, self._awaited = what, awaited
        self._begun_s = time.monotonic()
        self.due_s = self._begun_s + (_VERBOSE_SLOW_S if self._is_verbose else SLOW_S)

    def look(self) -> None:
        if time.monotonic() >= self.due_s:
            self.tell()
            self.due_s += SLOW_S if self._is_verbose else float("inf")

    def tell(self) -> None:
        names = self._awaited()
        if self._what and names:
            more = len(names) - _MAX_NAMES
            shown = ", ".join(names[:_MAX_NAMES]) + (
                f" and {more} more" if more > 0 else ""
            )
            took_s = time.monotonic() - self._begun_s
            self._say(f"waiting for {shown} {self._what}, {took_s:.0f} s so far")

    def took(self, done: str, took_s: float) -> None:
        if took_s >= _LONG_S:
            self._say(f"{done} in {format_duration(took_s)}")

    def end(self, done: str) -> None:
        self._what, self.due_s = "", float("inf")
        if self._is_verbose:
            took_s = time.monotonic() - self._begun_s
            self._say(f"{done} in {format_duration(took_s)}")


@dataclass(eq=False, slots=True)
class _Client:
    node: AgentNode
    number: int
    splitter: Splitter = field(default_factory=Splitter)


class StoreService:
    """Answers what agents relay from their ranks.

    Fencing: what was sent by ranks of another generation reaches nobody, since a
    generation has a store of its own and its number is in every frame.
    """

    def __init__(self, epoch: int = -1) -> None:
        self._epoch = epoch
        self._state: StoreState[_Client] = StoreState()
        self._clients: dict[tuple[str, int], _Client] = {}
        self._num_clients: Counter[str] = Counter()

    def take(self, node: AgentNode, relayed: Relayed) -> None:
        """Answer what came from a rank of a node, if it is of this generation."""
        if relayed.epoch != self._epoch:
            return
        client = self._clients.get((node.name, relayed.connection))
        if client is None and relayed.data:
            client = self._add_client(node, relayed.connection)
        if client is None:
            return
        if not relayed.data:
            self._forget(client)
            return
        try:
            for body in client.splitter.feed(relayed.data):
                for answered, reply in self._state.handle(client, body):
                    self._reply(answered, reply)
        except StoreError:
            # What it says is no request: it is told so by the connection's end.
            self._release(client)

    def forget(self, node: AgentNode) -> None:
        for client in [c for c in self._clients.values() if c.node is node]:
            self._forget(client)

    def _add_client(self, node: AgentNode, number: int) -> _Client | None:
        client = _Client(node, number)
        if self._num_clients[node.name] >= max_connections(len(node.ranks)):
            self._release(client)
            return None
        self._num_clients[node.name] += 1
        self._clients[node.name, number] = client
        return client

    def _reply(self, client: _Client, reply: bytes) -> None:
        link = client.node.link
        if link.relayed_bytes > _MAX_UNSENT_BYTES:
            self._release(client)
        else:
            link.relay(Relayed(self._epoch, client.number, reply))

    def _release(self, client: _Client) -> None:
        client.node.link.relay(Relayed(self._epoch, client.number, b""))
        self._forget(client)

    def _forget(self, client: _Client) -> None:
        if self._clients.pop((client.node.name, client.number), None) is not None:
            self._num_clients[client.node.name] -= 1
            self._state.forget(client)


class Handler:
    """Answers what comes in; by default as while no rank runs."""

    def __init__(self, loop: "EventLoop") -> None:
        self._loop = loop

    def take(self, node: AgentNode, message: FromAgent) -> None:
        raise NotImplementedError

    def take_output(self, output: Output) -> None:
        raise LaunchError(f"rank {output.rank} must not run now, but it writes.")

    def take_loss(self, node: AgentNode, loss: HostLoss) -> None:
        raise NotImplementedError

    def take_signal(self, number: int) -> None:
        if number in (ASKING, TIMED_OUT):
            self._loop.progress.tell()
        if number != ASKING:
            raise InterruptedStartError(number)

    def take_broken_output(self, number: int) -> None:
        """Nobody reads the job's standard output any more, which counts as a signal."""


class EventLoop:
    """All agents of a job, its user's signals and its output, waited for together."""

    def __init__(
        self,
        output: OutputProcess | NoOutput,
        signal_fd: int,
        progress: StartProgress,
        timeouts: Timeouts,
    ) -> None:
        self.timeouts = timeouts
        self.output = output
        self.progress = progress
        self.nodes: list[AgentNode] = []
        self.is_hurried = False
        """Whether output that cannot be shown at once is dropped."""
        self.store = StoreService()
        """Where the ranks meet; each generation of them has a new one."""
        self.signal_fd = signal_fd

    @property
    def live_nodes(self) -> list[AgentNode]:
        return [node for node in self.nodes if not node.is_over]

    @property
    def is_held_back(self) -> bool:
        return self.output.backlog_bytes >= _MAX_BACKLOG_BYTES

    def serve(
        self,
        handler: Handler,
        is_done: Callable[[], bool],
        deadline: Callable[[], float],
    ) -> bool:
        """Serve everybody until ``is_done()``; False when the deadline came before."""
        while not is_done():
            now_s = time.monotonic()
            due_s = min([deadline(), *(node.silent_by_s for node in self.live_nodes)])
            due_s = min([due_s, *(node.ping(now_s) for node in self.live_nodes)])
            self._serve_ready(handler, min(due_s, self.progress.due_s) - now_s)
            self.progress.look()
            self._grant()
            self._look_for_silent(handler)
            if time.monotonic() > deadline():
                return is_done()
        return True

    def _serve_ready(self, handler: Handler, timeout_s: float) -> None:
        by_fd: dict[int, AgentNode] = {}
        output = self.output
        readable = [self.signal_fd, *([] if output.has_ended else [output.read_fd])]
        writable = [] if output.write_fd < 0 else [output.write_fd]
        for node in self.live_nodes:
            transport = node.link.transport
            fds = [transport.read_fd] + (
                [transport.error_fd] if node.link.has_errors else []
            )
            readable += fds
            writable += [transport.write_fd] if node.link.is_writing else []
            by_fd |= dict.fromkeys([*fds, transport.write_fd], node)
        limit_s = None if timeout_s == float("inf") else max(0.0, timeout_s)
        for fd in wait_for(readable, writable, limit_s):
            if fd == self.signal_fd:
                self._take_signals(handler)
            elif fd == output.read_fd:
                self._read_output(handler)
            elif fd not in by_fd:
                output.flush()
            elif not by_fd[fd].is_over:
                self._serve_node(handler, by_fd[fd], fd)

    def _serve_node(self, handler: Handler, node: AgentNode, fd: int) -> None:
        link = node.link
        if link.is_writing and fd == link.transport.write_fd:
            link.flush()
        if fd == link.transport.error_fd:
            link.read_errors()
        elif fd == link.transport.read_fd:
            self._receive(handler, node)

    def _receive(self, handler: Handler, node: AgentNode) -> None:
        received = node.link.receive()
        if received is None:
            while node.link.has_errors and wait_for(
                [node.link.transport.error_fd], [], 0.1
            ):
                node.link.read_errors()
            self.lose(handler, node, node.explain_end())
            return
        node.heard()
        for message in received:
            if isinstance(message, Output):
                node.require_own(message.rank)
                node.take_output(len(message.data))
                if self.is_hurried and self.is_held_back:
                    self.output.discard()
                self.output.output(message)
                handler.take_output(message)
            elif isinstance(message, Relayed):
                self.store.take(node, message)
            elif isinstance(message, Pong):
                node.take_pong(message)
            elif not node.is_over:
                handler.take(node, message)

    def lose(self, handler: Handler, node: AgentNode, loss: HostLoss) -> None:
        node.close()
        self.store.forget(node)
        handler.take_loss(node, loss)

    def _look_for_silent(self, handler: Handler) -> None:
        now_s = time.monotonic()
        if all(now_s <= node.silent_by_s for node in self.live_nodes):
            return
        # With the one whose time has come all that would follow it at once.
        silent = [
            node
            for node in self.live_nodes
            if now_s + self.timeouts.ping_s > node.silent_by_s
        ]
        # Imported where it is needed: most jobs lose no host.
        from ronde.launch.placement.network import find_answering

        asked = {node.name: node.addresses for node in silent if not node.is_doubted}
        answering = find_answering(asked)
        for node in silent:
            if node.name in answering:
                node.doubt()
            elif not wait_for([node.link.transport.read_fd], [], 0):
                node.link.transport.kill()
                self.lose(handler, node, node.explain_silence())

    def _grant(self) -> None:
        if self.is_held_back and not self.is_hurried:
            return
        for node in self.live_nodes:
            node.grant()

    def _take_signals(self, handler: Handler) -> None:
        for number in read_signals(self.signal_fd):
            if number == SUSPENDING:
                self._suspend()
            else:
                handler.take_signal(number)

    def _suspend(self) -> None:
        for node in self.live_nodes:
            node.link.send(Forward(signal.SIGSTOP))
        suspend_self()
        for node in self.live_nodes:
            node.heard()
            node.link.send(Forward(signal.SIGCONT))

    def _read_output(self, handler: Handler) -> None:
        number = self.output.read()
        if number:
            handler.take_broken_output(number)

    def write_out(self, limit_s: float | None) -> int:
        """Have what is left to show written, and end what writes it."""
        output, number, is_last = self.output, 0, False
        output.close()
        while not output.has_ended:
            readable = [output.read_fd, *([] if is_last else [self.signal_fd])]
            writable = [] if output.write_fd < 0 else [output.write_fd]
            ready = wait_for(readable, writable, limit_s)
            if not is_last and (not ready or self.signal_fd in ready):
                output.discard()
                is_last, limit_s = True, _LAST_S
            elif not ready:
                output.kill()
                _say_last("the last lines were not written: what takes them stalls")
                break
            elif output.read_fd in ready:
                number = output.read() or number
            else:
                output.flush()
        return number


def _say_last(text: str) -> None:
    with suppress(OSError, ValueError):
        if wait_for([], [sys.stderr.fileno()], 0):
            print(f"ronde: {text}.", file=sys.stderr, flush=True)  # noqa: T201
