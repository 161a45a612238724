"""The process that shows a job's output and events, and writes them to files.

It is forked from the controller, which therefore does not block when a file system or a
terminal stalls.
"""

import errno
import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn, Protocol, get_args

from ronde.errors import LaunchError, UsageError
from ronde.launch.job.failure import JobResult
from ronde.launch.limits import NO_ROOM
from ronde.launch.signals import OUTPUT_FULL, is_kept_ignored, wait_for
from ronde.launch.wire.messages import (
    MessageDecoder,
    MessageWriter,
    Notice,
    Output,
    PipeTransport,
    Stacks,
    encode,
)
from ronde.processes import die_with_parent

_PIPE_BYTES = 1 << 20
_READ_BYTES = 256 << 10
_MAX_BACKLOG_BYTES = 256 << 10
_MAX_UNWRITTEN_BYTES = 512 << 20
_MAX_DISCARDED_BYTES = 16 << 20
_KILLED_S = 0.2
_IGNORED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGTTOU),
)


class Attempt(NamedTuple):
    """One attempt to run a job, and the host of each worker."""

    job_id: str
    epoch: int  # 0 for the first start, one more for each restart
    hosts: tuple[str, ...]  # of each worker, by id

    def add(self, new: "NewWorker") -> "Attempt":
        return self._replace(hosts=(*self.hosts, new.host))


class NewWorker(NamedTuple):
    """One more worker of an elastic job, with the next id."""

    worker: int
    host: str


NO_ATTEMPT = Attempt("", 0, ())


def attempt_dir(directory: str, attempt: Attempt) -> str:
    return f"{directory}/{attempt.job_id}/attempt_{attempt.epoch}"


class OutputSink(Protocol):
    """Interface of a job's display; the output process calls its methods.

    The process polls the ``pending_fds``, calls ``write_to`` for ready ones, and reads
    no more output while ``backlog_bytes`` is large. ``write_to`` raises BrokenPipeError
    with an errno once standard output cannot be written to.
    """

    @property
    def pending_fds(self) -> tuple[int, ...]: ...

    @property
    def backlog_bytes(self) -> int: ...

    def begin(self, attempt: Attempt) -> None: ...

    def add_worker(self, new: NewWorker) -> None: ...

    def output(self, output: Output, now_s: float) -> None: ...

    def notice(self, text: str) -> None: ...

    def live_view(self, lines: Sequence[str]) -> None:
        """Show lines below the output; without lines, the last ones become output."""
        ...

    def stacks(self, taken: Sequence[Stacks]) -> None: ...

    def finished(self, result: JobResult) -> None: ...

    def tick(self, now_s: float) -> float:
        """Show lines that are due; return the time for the next call, or infinity."""
        ...

    def write_to(self, fd: int) -> None: ...

    def discard(self) -> None: ...


MakeSinks = Callable[[], tuple[OutputSink, Sequence["JobFile"]]]
"""Returns the sink and the files of a job; may raise UsageError."""


class JobFile:
    """Base class of a job's files; output is written to them before it is shown.

    ``begin`` may raise UsageError; later errors become notices.
    """

    def __init__(self, sink: OutputSink, path: str) -> None:
        self._notice = sink.notice
        self._path = path
        self._attempt = NO_ATTEMPT

    def begin(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def add_worker(self, new: NewWorker) -> None:
        self._attempt = self._attempt.add(new)

    def output(self, output: Output) -> None: ...

    def finished(self, result: JobResult) -> None: ...


class EndOfStacks(NamedTuple):
    """To the output process: show all ``Stacks`` since the last ``EndOfStacks``."""


class LiveView(NamedTuple):
    """To the output process: lines to show below the output."""

    lines: tuple[str, ...]


class OutputAnswer(NamedTuple):
    """From the output process: an attempt can begin, or writing has failed."""

    problem: str  # error of an attempt, or empty
    signal: int  # SIGPIPE, SIGHUP of a closed terminal, OUTPUT_FULL; or 0


_Order = Attempt | NewWorker | Notice | LiveView | Stacks | EndOfStacks | JobResult
_ORDERS: tuple[type[_Order | Output], ...] = (Output, *get_args(_Order))


class NoOutput:
    """Replaces ``OutputProcess`` if no ranks are started."""

    read_fd = write_fd = -1
    waiting_bytes = 0
    is_ready = has_ended = True

    def _do_nothing(self, *_: object) -> None: ...

    begin = add_worker = output = notice = stacks = finished = _do_nothing
    live_view = discard = flush = read = close = kill = _do_nothing


class OutputProcess(MessageWriter):
    """The controller's connection to the output process; writes do not block.

    The output process is forked from this process and dies with it. At the fork, this
    process must have only one thread and no other children.
    """

    def __init__(self, make_sinks: MakeSinks) -> None:
        orders, self._orders_fd = os.pipe()
        self.read_fd, replies = os.pipe()
        discard, self._discard_fd = os.pipe()
        parent = os.getpid()
        # A signal between the fork and its handlers would count twice.
        signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        self._pid = os.fork()
        if not self._pid:
            _run_output(make_sinks, (orders, discard, replies), parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
        for fd in (orders, replies, discard):
            os.close(fd)
        with suppress(OSError):
            fcntl.fcntl(self._orders_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        pipes = PipeTransport(self.read_fd, self._orders_fd)
        super().__init__(pipes.write, _MAX_UNWRITTEN_BYTES)
        self._reader = MessageDecoder((OutputAnswer,))
        self._is_closing = False
        self.is_ready = True  # the attempt can begin
        self.has_ended = False  # everything is written

    def begin(self, attempt: Attempt) -> None:
        self.is_ready = False
        self.send(attempt)

    def add_worker(self, worker: int, host: str) -> None:
        self.send(NewWorker(worker, host))

    def output(self, output: Output) -> None:
        # Files may be stalled while the ranks write on.
        is_discarding = self._discard_fd < 0
        if not (is_discarding and self.waiting_bytes >= _MAX_DISCARDED_BYTES):
            self.send(output)

    def notice(self, text: str) -> None:
        self.send(Notice(text))

    def live_view(self, lines: Sequence[str]) -> None:
        # The next one comes soon.
        if not (lines and self.waiting_bytes):
            self.send(LiveView(tuple(lines)))

    def stacks(self, taken: Sequence[Stacks]) -> None:
        for each in taken:
            self.send(each)
        self.send(EndOfStacks())

    def finished(self, result: JobResult) -> None:
        self.send(result)

    def discard(self) -> None:
        """Drop output that is not shown yet; files still receive all of it."""
        if self._discard_fd >= 0:
            os.close(self._discard_fd)
            self._discard_fd = -1

    @property
    def write_fd(self) -> int:
        return self._orders_fd if self.waiting_bytes else -1

    def read(self) -> int:
        data = os.read(self.read_fd, _READ_BYTES)
        if not data:
            self.has_ended = True
            os.waitpid(self._pid, 0)
            if not self._is_closing:
                raise LaunchError(
                    "the output process exited before the job ended. Start the job "
                    "again."
                )
            return 0
        unread_signal = 0
        for answer in self._reader.feed(data):
            if answer.problem:
                raise UsageError(answer.problem)
            if not answer.signal:
                self.is_ready = True
            elif not is_kept_ignored(answer.signal):
                unread_signal = answer.signal
        return unread_signal

    def close(self) -> None:
        """Send the buffered rest; ``has_ended`` becomes true once all is written."""
        self._is_closing = True
        self.flush()
        if not self.has_ended:
            # The process must notice this end even if it was stopped.
            os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        if not self.has_ended:
            os.kill(self._pid, signal.SIGKILL)
            if wait_for([self.read_fd], [], _KILLED_S):
                os.waitpid(self._pid, 0)

    def send(self, message: object) -> None:
        if self._orders_fd >= 0:
            # ``read`` finds the reason.
            with suppress(BrokenPipeError):
                super().send(message)

    def flush(self) -> None:
        with suppress(BrokenPipeError):
            super().flush()
        if self._is_closing and self._orders_fd >= 0 and not self.waiting_bytes:
            os.close(self._orders_fd)
            self._orders_fd = -1


def _run_output(
    make_sinks: MakeSinks, fds: tuple[int, int, int], parent: int
) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        # An agent must notice the end of the controller.
        first = 3
        for fd in (*sorted(fds), os.sysconf("SC_OPEN_MAX")):
            os.closerange(first, fd)
            first = fd + 1
        orders, discard, replies = fds
        if die_with_parent(parent, signal.SIGKILL):
            _Writer(*make_sinks(), replies).run(orders, discard)
        os._exit(0)
    except UsageError as error:
        os.write(fds[2], encode(OutputAnswer(str(error), 0)))
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the outermost line of a process
        import traceback

        traceback.print_exc()
        os._exit(1)


class _Writer:
    """The loop of the output process; any step may block."""

    def __init__(
        self, sink: OutputSink, files: Sequence[JobFile], replies_fd: int
    ) -> None:
        self._sink = sink
        self._files = files
        self._replies_fd = replies_fd
        self._reader = MessageDecoder(_ORDERS)
        self._stacks: list[Stacks] = []

    def run(self, orders_fd: int, discard_fd: int) -> None:
        sink, is_open, is_discarding = self._sink, True, False
        while is_open or sink.pending_fds:
            readable = [] if is_discarding else [discard_fd]
            if is_open and sink.backlog_bytes < _MAX_BACKLOG_BYTES:
                readable.append(orders_fd)
            now_s = time.monotonic()
            limit_s = sink.tick(now_s) - now_s
            for fd in wait_for(readable, sink.pending_fds, limit_s):
                if fd == discard_fd:
                    is_discarding = True
                    sink.discard()
                elif fd == orders_fd:
                    is_open = self._read_orders(fd)
                else:
                    self._write_to(fd)

    def _write_to(self, fd: int) -> None:
        try:
            self._sink.write_to(fd)
        except BrokenPipeError as error:
            is_terminal = stat.S_ISCHR(os.fstat(fd).st_mode)
            number = OUTPUT_FULL if error.errno in NO_ROOM else signal.SIGPIPE
            is_hangup = is_terminal and error.errno == errno.EIO
            self._answer("", signal.SIGHUP if is_hangup else number)

    def _read_orders(self, fd: int) -> bool:
        data = os.read(fd, _READ_BYTES)
        for order in self._reader.feed(data):
            if isinstance(order, Output):
                for file in self._files:
                    file.output(order)
                self._sink.output(order, time.monotonic())
            else:
                self._handle(order)
        return bool(data)

    def _handle(self, order: _Order) -> None:
        match order:
            case Attempt():
                self._begin(order)
            case NewWorker():
                for each in (*self._files, self._sink):
                    each.add_worker(order)
            case Notice():
                self._sink.notice(order.text)
            case LiveView():
                self._sink.live_view(order.lines)
            case Stacks():
                self._stacks.append(order)
            case EndOfStacks():
                self._sink.stacks(self._stacks)
                self._stacks = []
            case JobResult():
                for each in (*self._files, self._sink):
                    each.finished(order)

    def _begin(self, attempt: Attempt) -> None:
        problem = ""
        try:
            for each in (*self._files, self._sink):
                each.begin(attempt)
        except UsageError as error:
            problem = str(error)
        self._answer(problem)

    def _answer(self, problem: str, number: int = 0) -> None:
        # With the controller gone, this process ends at once too.
        with suppress(BrokenPipeError):
            os.write(self._replies_fd, encode(OutputAnswer(problem, number)))
