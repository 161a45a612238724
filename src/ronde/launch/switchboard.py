"""The one place where the controller waits: for agents, user and output process."""

import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from ronde.launch.frames import Output, Relayed
from ronde.launch.messages import Forward, FromAgent, Pong
from ronde.launch.node import Loss, Node
from ronde.launch.output_process import OutputProcess
from ronde.launch.signals import SUSPENDING, read_signals, suspend_self
from ronde.launch.sink import Unseen
from ronde.launch.start_progress import StartProgress
from ronde.launch.store_service import StoreService
from ronde.launch.timeouts import Timeouts
from ronde.launch.wire import wait_for

_MAX_BACKLOG_BYTES = 256 << 10
_LAST_S = 1.0


class Attendant(Protocol):
    """Who answers what comes in."""

    def take(self, node: Node, message: FromAgent) -> None:
        """Answer a message."""
        ...

    def take_output(self, output: Output) -> None:
        """Look at what a rank wrote, which is shown already."""
        ...

    def take_loss(self, node: Node, loss: Loss) -> None:
        """Go on without a host; its node is over and closed."""
        ...

    def take_signal(self, number: int) -> None:
        """Do what the user wants."""
        ...

    def take_broken_output(self, number: int) -> None:
        """Nobody reads the job's standard output any more, which counts as a signal."""
        ...


class Switchboard:
    """All agents of a job, its user's signals and its output, waited for together.

    Args:
        output: Gets all output.
        signal_fd: Reads the user's signals.
        progress: Says what a slow start waits for.
        timeouts: How long nodes are waited for.
    """

    def __init__(
        self,
        output: OutputProcess | Unseen,
        signal_fd: int,
        progress: StartProgress,
        timeouts: Timeouts,
    ) -> None:
        self.timeouts = timeouts
        self.output = output
        self.progress = progress
        self.nodes: list[Node] = []
        self.is_hurried = False
        """Whether output that cannot be shown at once is dropped."""
        self.store = StoreService()
        """Where the ranks meet; each generation of them has a new one."""
        self.signal_fd = signal_fd

    @property
    def live_nodes(self) -> list[Node]:
        """Those that are not over."""
        return [node for node in self.nodes if not node.is_over]

    @property
    def is_held_back(self) -> bool:
        """Whether so much waits to be shown that the ranks must wait."""
        return self.output.backlog_bytes >= _MAX_BACKLOG_BYTES

    def serve(
        self,
        attendant: Attendant,
        is_done: Callable[[], bool],
        deadline: Callable[[], float],
    ) -> bool:
        """Serve everybody until ``is_done()``; False when the deadline came before."""
        while not is_done():
            now_s = time.monotonic()
            due_s = min([deadline(), *(node.silent_by_s for node in self.live_nodes)])
            due_s = min([due_s, *(node.ping(now_s) for node in self.live_nodes)])
            self._serve_ready(attendant, min(due_s, self.progress.due_s) - now_s)
            self.progress.look()
            self._grant()
            self._look_for_silent(attendant)
            if time.monotonic() > deadline():
                return is_done()
        return True

    def _serve_ready(self, attendant: Attendant, timeout_s: float) -> None:
        by_fd: dict[int, Node] = {}
        output = self.output
        readable = [self.signal_fd, *([] if output.has_ended else [output.read_fd])]
        writable = [] if output.write_fd < 0 else [output.write_fd]
        for node in self.live_nodes:
            wire = node.link.wire
            fds = [wire.read_fd] + ([wire.error_fd] if node.link.has_errors else [])
            readable += fds
            writable += [wire.write_fd] if node.link.is_writing else []
            by_fd |= dict.fromkeys([*fds, wire.write_fd], node)
        limit_s = None if timeout_s == float("inf") else max(0.0, timeout_s)
        for fd in wait_for(readable, writable, limit_s):
            if fd == self.signal_fd:
                self._take_signals(attendant)
            elif fd == output.read_fd:
                self._read_output(attendant)
            elif fd not in by_fd:
                output.flush()
            elif not by_fd[fd].is_over:
                self._serve_node(attendant, by_fd[fd], fd)

    def _serve_node(self, attendant: Attendant, node: Node, fd: int) -> None:
        link = node.link
        if link.is_writing and fd == link.wire.write_fd:
            link.flush()
        if fd == link.wire.error_fd:
            link.read_errors()
        elif fd == link.wire.read_fd:
            self._receive(attendant, node)

    def _receive(self, attendant: Attendant, node: Node) -> None:
        received = node.link.receive()
        if received is None:
            while node.link.has_errors and wait_for([node.link.wire.error_fd], [], 0.1):
                node.link.read_errors()
            self.lose(attendant, node, node.explain_end())
            return
        node.heard()
        for message in received:
            if isinstance(message, Output):
                node.require_own(message.rank)
                node.take_output(len(message.data))
                if self.is_hurried and self.is_held_back:
                    self.output.discard()
                self.output.output(message)
                attendant.take_output(message)
            elif isinstance(message, Relayed):
                self.store.take(node, message)
            elif isinstance(message, Pong):
                node.take_pong(message)
            elif not node.is_over:
                attendant.take(node, message)

    def lose(self, attendant: Attendant, node: Node, loss: Loss) -> None:
        """Go on without a node."""
        node.close()
        self.store.forget(node)
        attendant.take_loss(node, loss)

    def _look_for_silent(self, attendant: Attendant) -> None:
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
        from ronde.launch.placement.routes import find_answering

        asked = {node.name: node.addresses for node in silent if not node.is_doubted}
        answering = find_answering(asked)
        for node in silent:
            if node.name in answering:
                node.doubt()
            elif not wait_for([node.link.wire.read_fd], [], 0):
                node.link.wire.kill()
                self.lose(attendant, node, node.explain_silence())

    def _grant(self) -> None:
        """Let agents send more, unless what they sent cannot be shown."""
        if self.is_held_back and not self.is_hurried:
            return
        for node in self.live_nodes:
            node.grant()

    def _take_signals(self, attendant: Attendant) -> None:
        for number in read_signals(self.signal_fd):
            if number == SUSPENDING:
                self._suspend()
            else:
                attendant.take_signal(number)

    def _suspend(self) -> None:
        """Stop the ranks and then this process, until it is continued."""
        for node in self.live_nodes:
            node.link.send(Forward(signal.SIGSTOP))
        suspend_self()
        for node in self.live_nodes:
            node.heard()
            node.link.send(Forward(signal.SIGCONT))

    def _read_output(self, attendant: Attendant) -> None:
        number = self.output.read()
        if number:
            attendant.take_broken_output(number)

    def write_out(self, limit_s: float | None) -> int:
        """Have what is left to show written, and end what writes it.

        A signal, or the time, ends the wait; what is not written ``_LAST_S`` later is
        lost.

        Returns:
            The signal as which it counts that nobody reads the standard output any
            more, else 0.
        """
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
    """Say a sentence of the launcher's own, if that can be done without waiting."""
    with suppress(OSError, ValueError):
        if wait_for([], [sys.stderr.fileno()], 0):
            print(f"ronde: {text}.", file=sys.stderr, flush=True)  # noqa: T201
