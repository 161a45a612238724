"""Output is shown and written by a process of its own, which alone may wait.

A file system or a terminal may stall for minutes; the controller must answer meanwhile.
"""

import errno
import fcntl
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn, cast, get_args

from ronde.errors import LaunchError, UsageError
from ronde.launch.failure import JobResult
from ronde.launch.messages import (
    FrameDecoder,
    MessageWriter,
    Notice,
    Output,
    PipeTransport,
    decode_message,
    encode,
)
from ronde.launch.output.files import Generation, JobFile, OutputSink, RankStacks
from ronde.launch.process_tree import die_with_parent
from ronde.launch.signals import is_kept_ignored, wait_for

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


class Begin(NamedTuple):
    """To the process: prepare everything for new ranks, and answer."""

    generation: Generation


class Began(NamedTuple):
    """To the process: all ranks run."""

    timings: dict[str, float]


class Finish(NamedTuple):
    """To the process: this is how the ranks ended."""

    result: JobResult


class EndOfStacks(NamedTuple):
    """To the process: show the ``RankStacks`` that came before, one a rank."""


class OutputAnswer(NamedTuple):
    """From the process: everything is prepared, or its output is read no more."""

    problem: str  # why not all is prepared; empty where it is
    signal: int  # SIGPIPE, or SIGHUP of a closed terminal; 0 where the output is read


_Order = Begin | Began | Notice | RankStacks | EndOfStacks | Finish
_ORDERS: tuple[type[_Order], ...] = get_args(_Order)


class NoOutput:
    """Takes the place of ``OutputProcess`` for a job that has no output."""

    read_fd = write_fd = -1
    backlog_bytes = 0
    is_settled = has_ended = True

    def _do_nothing(self, *_: object) -> None: ...

    begin = began = output = notice = stacks = finished = _do_nothing
    discard = flush = read = close = kill = _do_nothing


class OutputProcess:
    """The controller's end: takes everything at once, and never waits for a write.

    Must be made in a process with one thread, before that starts others: the process
    is a fork of this one. It ends with this process, however that ends.
    """

    def __init__(self, sink: OutputSink, files: Sequence[JobFile] = ()) -> None:
        orders, self._orders_fd = os.pipe()
        self.read_fd, replies = os.pipe()
        discard, self._discard_fd = os.pipe()
        parent = os.getpid()
        # A signal that came between fork and its being ignored would count twice.
        signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        self._pid = os.fork()
        if not self._pid:
            _run_output(sink, files, (orders, discard, replies), parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
        for fd in (orders, replies, discard):
            os.close(fd)
        with suppress(OSError):
            fcntl.fcntl(self._orders_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        pipes = PipeTransport(self.read_fd, self._orders_fd)
        self._writer = MessageWriter(pipes.write, _MAX_UNWRITTEN_BYTES)
        self._decoder = FrameDecoder()
        self._num_unanswered = 0
        self._is_closing = False
        self.has_ended = False  # whether all was written that will be

    def begin(self, generation: Generation) -> None:
        self._num_unanswered += 1
        self._send(Begin(generation))

    def began(self, timings: Mapping[str, float]) -> None:
        self._send(Began(dict(timings)))

    def output(self, output: Output) -> None:
        # What is to be discarded comes without end, and files may take nothing.
        is_discarding = self._discard_fd < 0
        if not (is_discarding and self.backlog_bytes >= _MAX_DISCARDED_BYTES):
            self._send(output)

    def notice(self, text: str) -> None:
        self._send(Notice(text))

    def stacks(self, taken: Sequence[RankStacks]) -> None:
        for each in taken:
            self._send(each)
        self._send(EndOfStacks())

    def finished(self, result: JobResult) -> None:
        self._send(Finish(result))

    def discard(self) -> None:
        """Have what waits to be shown forgotten; files get all they can."""
        if self._discard_fd >= 0:
            os.close(self._discard_fd)
            self._discard_fd = -1

    @property
    def is_settled(self) -> bool:
        """Whether nothing is waited for that must be known before ranks start."""
        return not self._num_unanswered

    @property
    def write_fd(self) -> int:
        return self._orders_fd if self._writer.waiting_bytes else -1

    @property
    def backlog_bytes(self) -> int:
        return self._writer.waiting_bytes

    def read(self) -> int:
        data = os.read(self.read_fd, _READ_BYTES)
        if not data:
            self.has_ended = True
            os.waitpid(self._pid, 0)
            if not self._is_closing:
                raise LaunchError(
                    "the process that writes the output must run as long as the job, "
                    "but it is gone. Start the job again."
                )
            return 0
        unread_signal = 0
        for frame in self._decoder.feed(data):
            answer = decode_message(cast("bytes", frame), (OutputAnswer,))
            if answer.problem:
                raise UsageError(answer.problem)
            if not answer.signal:
                self._num_unanswered -= 1
            elif not is_kept_ignored(answer.signal):
                unread_signal = answer.signal
        return unread_signal

    def close(self) -> None:
        """Announce that nothing follows; ``has_ended`` when all is written."""
        self._is_closing = True
        self.flush()
        if not self.has_ended:
            # Somebody may have stopped it, and it has to see this end.
            os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        if not self.has_ended:
            os.kill(self._pid, signal.SIGKILL)
            if wait_for([self.read_fd], [], _KILLED_S):
                os.waitpid(self._pid, 0)

    def _send(self, message: _Order | Output) -> None:
        if self._orders_fd >= 0:
            # Why nobody takes it is found out by ``read``.
            with suppress(BrokenPipeError):
                self._writer.send(message)
        self.flush()

    def flush(self) -> None:
        with suppress(BrokenPipeError):
            self._writer.flush()
        if self._is_closing and self._orders_fd >= 0 and not self.backlog_bytes:
            os.close(self._orders_fd)
            self._orders_fd = -1


def _run_output(
    sink: OutputSink, files: Sequence[JobFile], fds: tuple[int, int, int], parent: int
) -> NoReturn:
    """Be the process, which has just been forked; end it."""
    try:
        signal.set_wakeup_fd(-1)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        # An agent must see the end of its input when the controller ends.
        for kept, fd in enumerate(sorted(fds), start=3):
            os.dup2(fd, kept, inheritable=False)
        os.closerange(3 + len(fds), os.sysconf("SC_OPEN_MAX"))
        orders, discard, replies = (3 + sorted(fds).index(fd) for fd in fds)
        if die_with_parent(parent, signal.SIGKILL):
            _Writer(sink, files, replies).run(orders, discard)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the outermost line of a process
        import traceback

        traceback.print_exc()
        os._exit(1)


class _Writer:
    """What the process does: all of it may wait."""

    def __init__(
        self, sink: OutputSink, files: Sequence[JobFile], replies_fd: int
    ) -> None:
        self._sink = sink
        self._files = files
        self._replies_fd = replies_fd
        self._decoder = FrameDecoder()
        self._stacks: list[RankStacks] = []

    def run(self, orders_fd: int, discard_fd: int) -> None:
        sink, is_open, is_discarding = self._sink, True, False
        while is_open or sink.pending_fds:
            readable = [] if is_discarding else [discard_fd]
            if is_open and sink.backlog_bytes < _MAX_BACKLOG_BYTES:
                readable.append(orders_fd)
            now_s = time.monotonic()
            tick_at_s = sink.tick(now_s)
            limit_s = None if tick_at_s is None else max(0.0, tick_at_s - now_s)
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
            is_hangup = error.errno == errno.EIO
            self._answer("", signal.SIGHUP if is_hangup else signal.SIGPIPE)

    def _read_orders(self, fd: int) -> bool:
        data = os.read(fd, _READ_BYTES)
        for frame in self._decoder.feed(data):
            if isinstance(frame, Output):
                for file in self._files:
                    file.output(frame)
                self._sink.output(frame, time.monotonic())
            elif isinstance(frame, bytes):
                self._obey(decode_message(frame, _ORDERS))
        return bool(data)

    def _obey(self, order: _Order) -> None:
        match order:
            case Begin():
                self._begin(order.generation)
            case Began():
                for file in self._files:
                    file.began(order.timings)
            case Notice():
                self._sink.notice(order.text)
            case RankStacks():
                self._stacks.append(order)
            case EndOfStacks():
                self._sink.stacks(self._stacks)
                self._stacks = []
            case Finish():
                for file in self._files:
                    file.finished(order.result)
                self._sink.finished(order.result)

    def _begin(self, generation: Generation) -> None:
        problem = ""
        try:
            for file in self._files:
                file.begin(generation)
            self._sink.begin(generation)
        except UsageError as error:
            problem = str(error)
        self._answer(problem)

    def _answer(self, problem: str, number: int = 0) -> None:
        # If the controller is gone, this process ends at once, too.
        with suppress(BrokenPipeError):
            os.write(self._replies_fd, encode(OutputAnswer(problem, number)))
