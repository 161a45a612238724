"""The agent: owns one host's ranks, and is told by its controller what to do.

It runs under ``python -I -S`` with nothing but the standard library, has one thread
and one loop, and speaks frames over its standard input and output.
"""

import os
import selectors
import signal
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ronde.errors import LaunchError
from ronde.launch.frames import FrameDecoder, Output, Relayed
from ronde.launch.intake import Intake
from ronde.launch.introduction import introduce
from ronde.launch.keeper import run_kept
from ronde.launch.lineage import has_children, sweep
from ronde.launch.local_job import LocalJob, Phase
from ronde.launch.messages import (
    TO_AGENT,
    Converse,
    Credit,
    Ending,
    Forward,
    Kill,
    Leave,
    Locate,
    Located,
    Ping,
    Pong,
    Prepare,
    Said,
    Say,
    Silent,
    Start,
    Stop,
    TakeStacks,
    ToAgent,
    decode_message,
)
from ronde.launch.outbox import Outbox
from ronde.launch.signals import is_kept_ignored
from ronde.launch.store_relay import name_directory
from ronde.store.local_socket import remove

if TYPE_CHECKING:
    from ronde.launch.conversation import Conversation

_READ_BYTES = 64 << 10
_LOCATE_S = 2.0
_NEVER = float("inf")


def main(first_word_s: float = _NEVER) -> NoReturn:
    """Run an agent on standard input and output; end the process with its exit code.

    Args:
        first_word_s: Seconds after which an agent that was told nothing ends: the end
            of a connection that broke silently is never seen.
    """
    directory = name_directory()  # the keeper must know it as well
    run_kept(lambda: _run_agent(first_word_s, directory), directory)


def _run_agent(first_word_s: float, directory: Path) -> int:
    control_in, control_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)
    agent = Agent(control_in, control_out, first_word_s, directory)
    try:
        agent.run()
    except (BrokenPipeError, EOFError):
        pass
    finally:
        # Whatever happened: nothing outlives the agent.
        if has_children():
            sweep(on_reaped=lambda _pid, _status: None)
        remove(directory)
    return 0 if agent.is_leaving else 1


class Agent:
    """Runs one job after another on its host, as long as its controller is there.

    Args:
        control_in: Where the controller's frames come from; its end means that the
            controller is gone, and everything is killed at once.
        control_out: Where frames go to.
        first_word_s: How long to wait for the first frame.
        directory: Where to make sockets; it is not there yet.
    """

    def __init__(
        self, control_in: int, control_out: int, first_word_s: float, directory: Path
    ) -> None:
        self.is_leaving = False
        self._control_in = control_in
        self._decoder = FrameDecoder()
        self._outbox = Outbox(control_out)
        self._selector = selectors.DefaultSelector()
        self._intake = Intake(self._selector, self._outbox)
        self._directory = directory
        self._job: LocalJob | None = None
        self._conversation: Conversation | None = None
        self._lease_s = first_word_s
        self._controller_addresses: tuple[str, ...] = ()
        self._heard_at = time.monotonic()
        self._keeper = os.getppid()

    def run(self) -> None:
        """Do what the controller says until there is nothing more to do.

        Raises:
            EOFError: The controller or the keeper is gone.
            BrokenPipeError: The controller is gone.
        """
        os.set_blocking(self._control_in, False)
        self._selector.register(
            self._control_in, selectors.EVENT_READ, self._read_control
        )
        self._selector.register(_signal_pipe(), selectors.EVENT_READ, self._read_signal)
        self._outbox.tell(introduce())
        while not (self.is_leaving and self._outbox.is_empty):
            for key, _ in self._selector.select(self._timeout_s()):
                key.data(key.fd)
            if time.monotonic() > self._heard_at + self._lease_s:
                self._doubt_controller()
            if self._job is not None:
                self._job.advance()
                if self._job.phase is Phase.OVER:
                    self._job = None
                else:
                    self._job.pace()
            self._outbox.flush()
            self._watch_writing()
            self._intake.pace()

    def _doubt_controller(self) -> None:
        """Wait for the controller as long again, if its host answers: see ``Timeouts``.

        Raises:
            EOFError: It does not, or that was waited.
        """
        # Imported where it is needed: most agents hear of their controller.
        from ronde.launch.placement.routes import find_answering

        addresses, self._controller_addresses = self._controller_addresses, ()
        if not find_answering({"": addresses}):
            raise EOFError("the controller is silent")
        self._lease_s *= 2

    def _timeout_s(self) -> float | None:
        due_s = self._heard_at + self._lease_s
        if self._job is not None:
            due_s = min(due_s, self._job.due_s)
        return None if due_s == _NEVER else max(0.0, due_s - time.monotonic())

    def _watch_writing(self) -> None:
        is_watched = self._outbox.fd in self._selector.get_map()
        if self._outbox.is_writing and not is_watched:
            self._selector.register(
                self._outbox.fd, selectors.EVENT_WRITE, _nothing_to_read
            )
        elif is_watched and not self._outbox.is_writing:
            self._selector.unregister(self._outbox.fd)

    def _read_control(self, fd: int) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise EOFError("the controller is gone")
        self._heard_at = time.monotonic()
        for frame in self._decoder.feed(data):
            if isinstance(frame, Output):
                raise LaunchError("an agent takes no output.")
            if isinstance(frame, Relayed):
                if self._job is not None:
                    self._job.deliver(frame)
                continue
            self._obey(decode_message(frame, TO_AGENT))
            # What takes long here is no silence of the controller's.
            self._heard_at = max(self._heard_at, time.monotonic())

    def _read_signal(self, fd: int) -> None:
        if signal.SIGTERM in os.read(fd, _READ_BYTES):
            self._take_leave()
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if self._conversation is not None and self._conversation.pid == pid:
                self._end_conversation(os.waitstatus_to_exitcode(status))
            elif self._job is not None:
                self._job.note_end(pid, status)

    def _take_leave(self) -> None:
        """Have the ranks end in their grace; without ranks, or a keeper, end at once.

        Raises:
            EOFError: There is nobody to wait for.
        """
        if os.getppid() != self._keeper:
            raise EOFError("the keeper is gone")
        if self._job is None:
            raise EOFError("there is nothing to end but this")
        self._outbox.tell(Ending(signal.SIGTERM))

    def _obey(self, order: ToAgent) -> None:
        match order:
            case Credit():
                self._outbox.grant(order.num_bytes)
            case Ping():
                self._lease_s = order.lease_s or _NEVER
                self._controller_addresses = order.addresses
                self._outbox.tell(Pong(order.sent_at_s, time.monotonic()))
            case Locate():
                self._locate(order)
            case Converse() | Say():
                self._converse(order)
            case Prepare():
                if self._job is not None:
                    # A host was lost meanwhile, and its controller tries again.
                    self._job.call_off()
                self._job = LocalJob(order.job, self._outbox, self._intake)
                self._job.prepare(self._directory, self._selector)
            case Leave():
                self.is_leaving = True
            case Start() | Stop() | Kill() | Forward() | TakeStacks():
                self._run_on(order)

    def _run_on(self, order: Start | Stop | Kill | Forward | TakeStacks) -> None:
        if isinstance(order, Forward) and order.signal == signal.SIGSTOP:
            # The controller stops as well: no word of it is missed until the next.
            self._heard_at = _NEVER
        if self._job is None:
            # It is over: Finished has crossed the order.
            return
        match order:
            case Start():
                self._job.start(order)
            case Stop():
                self._job.stop(order.signal)
            case Kill():
                self._job.kill()
            case Forward():
                self._job.forward(order.signal)
            case TakeStacks():
                self._job.take_stacks()

    def _converse(self, order: Converse | Say) -> None:
        if isinstance(order, Say):
            if self._conversation is not None:
                self._conversation.tell(order.line)
            return
        # Imported where it is needed, like what is below: no job asks for it.
        from ronde.launch.conversation import Conversation

        try:
            self._conversation = Conversation(
                order.module,
                self._selector,
                lambda line: self._outbox.tell(Said(line)),
            )
        except OSError as error:
            self._outbox.tell(Silent(f"its program does not start: {error.strerror}"))

    def _end_conversation(self, code: int) -> None:
        if self._conversation is not None:
            self._conversation.close()
            self._conversation = None
            self._outbox.tell(Silent(f"its program ended with exit code {code}"))

    def _locate(self, order: Locate) -> None:
        # Imported where it is needed: a job on one host has nothing to locate.
        from ronde.launch.placement.routes import locate

        sources = locate(order.addresses, order.port, _LOCATE_S)
        self._outbox.tell(Located(sources))


def _nothing_to_read(_fd: int) -> None:
    """Do nothing: the loop writes what it has after every wake."""


def _signal_pipe() -> int:
    """Return a descriptor that reads the numbers of the signals that come in."""
    read_fd, write_fd = os.pipe()
    for fd in (read_fd, write_fd):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    # Handlers and not SIG_IGN: what is ignored stays ignored in the ranks, and that is
    # for the user to want.
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if not is_kept_ignored(number):
            signal.signal(number, _noticed)
    return read_fd


def _noticed(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the signal's number is in the pipe already."""
