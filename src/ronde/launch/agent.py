"""The agent: owns one node's ranks, and is told by its controller what to do.

It runs under ``python -I -S`` with nothing but the standard library, has one thread
and one loop, and speaks frames over its standard input and output.
"""

import errno
import os
import selectors
import signal
import socket
import time
from enum import Enum, auto
from types import FrameType
from typing import NoReturn

from ronde.errors import LaunchError, UsageError
from ronde.launch.frames import FrameDecoder, Output
from ronde.launch.intake import Intake
from ronde.launch.job import Job
from ronde.launch.keeper import run_kept
from ronde.launch.lineage import has_children, sweep
from ronde.launch.messages import (
    PROTOCOL,
    TO_AGENT,
    Credit,
    Exited,
    Finished,
    Forward,
    Kill,
    Prepare,
    Ready,
    Refused,
    Start,
    Started,
    Stop,
    ToAgent,
    decode_message,
)
from ronde.launch.outbox import Outbox
from ronde.launch.ports import hold_port
from ronde.launch.preflight import create_log_dirs, enter_directory, resolve_program
from ronde.launch.rank_group import RankGroup
from ronde.launch.rank_process import raise_open_files_limit

_READ_BYTES = 64 << 10
_LEFTOVER_POLL_S = 0.02
_USAGE_ERRORS = frozenset(
    {errno.ENOENT, errno.ENOEXEC, errno.EACCES, errno.ENOTDIR, errno.E2BIG}
)


class Phase(Enum):
    """How far the agent's one job is."""

    WAITING = auto()
    RUNNING = auto()
    STOPPING = auto()
    FINISHED = auto()


def main() -> NoReturn:
    """Run an agent on standard input and output; end the process with its exit code."""
    run_kept(_run_agent)


def _run_agent() -> int:
    control_in, control_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)
    agent = Agent(control_in, control_out)
    try:
        agent.run()
    except (BrokenPipeError, EOFError):
        pass
    finally:
        # Whatever happened: nothing outlives the agent.
        if has_children():
            sweep(on_reaped=lambda _pid, _status: None)
    return 0 if agent.phase is Phase.FINISHED else 1


class Agent:
    """One job's ranks on one node, from the check to the sweep.

    Args:
        control_in: Where the controller's frames come from; its end means that the
            controller is gone, and everything is killed at once.
        control_out: Where frames go to.
    """

    def __init__(self, control_in: int, control_out: int) -> None:
        self.phase = Phase.WAITING
        self._control_in = control_in
        self._decoder = FrameDecoder()
        self._outbox = Outbox(control_out)
        self._ranks = RankGroup()
        self._selector = selectors.DefaultSelector()
        self._intake = Intake(self._selector, self._outbox)
        self._job: Job | None = None
        self._command: list[str] = []
        self._port: socket.socket | None = None
        self._started_at = 0.0
        self._deadline = 0.0

    def run(self) -> None:
        """Do what the controller says until the job is over and told.

        Raises:
            EOFError: The controller or the keeper is gone.
            BrokenPipeError: The controller is gone.
        """
        os.set_blocking(self._control_in, False)
        self._selector.register(
            self._control_in, selectors.EVENT_READ, self._read_control
        )
        self._selector.register(_signal_pipe(), selectors.EVENT_READ, self._read_signal)
        while not (self.phase is Phase.FINISHED and self._outbox.is_empty):
            for key, _ in self._selector.select(self._timeout_s()):
                key.data(key.fd)
            self._advance()
            self._outbox.flush()
            self._watch_writing()
            self._intake.pace()

    def _timeout_s(self) -> float | None:
        if self.phase is not Phase.STOPPING:
            return None
        left_s = max(0.0, self._deadline - time.monotonic())
        return left_s if self._ranks.is_running else min(left_s, _LEFTOVER_POLL_S)

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
        for frame in self._decoder.feed(data):
            if isinstance(frame, Output):
                raise LaunchError("an agent takes no output.")
            self._obey(decode_message(frame, TO_AGENT))

    def _read_signal(self, fd: int) -> None:
        if signal.SIGTERM in os.read(fd, _READ_BYTES):
            raise EOFError("the keeper is gone")
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self._note_end(pid, status)

    def _obey(self, order: ToAgent) -> None:
        match order:
            case Prepare():
                self._prepare(order)
            case Start():
                self._start(order)
            case Forward():
                self._ranks.send(order.signal)
            case Stop():
                self._stop(order.signal)
            case Kill():
                self._stop(signal.SIGKILL)
                self._deadline = 0.0
            case Credit():
                self._outbox.grant(order.num_bytes)

    def _prepare(self, order: Prepare) -> None:
        job = order.job
        try:
            _check_protocol(order.protocol)
            enter_directory(job.cwd)
            self._command = resolve_program(job.argv, job.env.get("PATH", os.defpath))
            self._port = hold_port("127.0.0.1", job.master_port)
            if job.log_dir:
                create_log_dirs(job)
            self._ranks.prepare(job)
        except (UsageError, LaunchError, OSError) as error:
            self._refuse(str(error), is_usage=isinstance(error, UsageError))
            return
        self._job = job
        port = self._port.getsockname()[1]
        self._outbox.tell(Ready(PROTOCOL, os.uname().nodename, os.getpid(), port))

    def _refuse(self, reason: str, *, is_usage: bool) -> None:
        self._outbox.tell(Refused(reason, is_usage))
        self.phase = Phase.FINISHED

    def _start(self, order: Start) -> None:
        if self._job is None or self._port is None:
            raise LaunchError("Start must come after Prepare.")
        meeting = {
            "MASTER_ADDR": order.master_addr,
            "MASTER_PORT": str(order.master_port),
        }
        self._started_at = time.monotonic()
        raise_open_files_limit(len(self._job.ranks))
        try:
            ranks = self._ranks.start(
                self._job, self._command, meeting, self._port.fileno()
            )
        except OSError as error:
            sweep(on_reaped=lambda _pid, _status: None)
            self._refuse(
                f"program must be one that can start, but {self._command[0]!r} does "
                f"not: {error.strerror}.",
                is_usage=error.errno in _USAGE_ERRORS,
            )
            return
        # From here on the port is rank 0's: when that ends, nothing may seem to listen.
        self._port.close()
        self.phase = Phase.RUNNING
        for rank in ranks:
            self._outbox.tell(Started(rank.rank, rank.pid))
            for pipe in rank.pipes:
                self._intake.add(pipe)

    def _stop(self, number: int) -> None:
        if self.phase is Phase.WAITING:
            self._outbox.tell(Finished(0, ()))
            self.phase = Phase.FINISHED
        if self.phase not in {Phase.RUNNING, Phase.STOPPING} or self._job is None:
            return
        if self.phase is Phase.RUNNING:
            self.phase = Phase.STOPPING
            self._deadline = time.monotonic() + self._job.grace_s
        self._ranks.stop(number)

    def _advance(self) -> None:
        """End the job when its time has come."""
        if self.phase is Phase.RUNNING:
            is_over = not self._ranks.is_running
        elif self.phase is Phase.STOPPING:
            is_late = time.monotonic() >= self._deadline
            is_over = is_late or not self._ranks.has_members()
        else:
            return
        if is_over:
            self._finish()

    def _finish(self) -> None:
        self._ranks.close()
        swept = sweep(on_reaped=self._note_end)
        self._intake.close()
        self.phase = Phase.FINISHED
        self._outbox.tell_last(Finished(swept.num_killed, swept.stuck))

    def _note_end(self, pid: int, status: int) -> None:
        rank = self._ranks.find(pid)
        if rank is None:
            return
        code = rank.reaped(status)
        for pipe in rank.pipes:
            self._intake.drain(pipe)
        at_s = time.monotonic() - self._started_at
        is_stopping = self.phase is Phase.STOPPING
        self._outbox.tell(Exited(rank.rank, code, at_s, is_stopping))


def _check_protocol(protocol: int) -> None:
    if protocol != PROTOCOL:
        raise LaunchError(
            f"protocol must be {PROTOCOL} here, got {protocol}. "
            "Run the same version of ronde on every host."
        )


def _nothing_to_read(_fd: int) -> None:
    """Do nothing: the loop writes what it has after every wake."""


def _signal_pipe() -> int:
    """Return a descriptor that reads the numbers of the signals that come in."""
    read_fd, write_fd = os.pipe()
    for fd in (read_fd, write_fd):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    # Handlers and not SIG_IGN: what is ignored stays ignored in the ranks.
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _noticed)
    return read_fd


def _noticed(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the signal's number is in the pipe already."""
