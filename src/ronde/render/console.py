"""A job on a terminal or in pipes: lines with their ranks, and progress bars."""

import os
import select
import stat
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ronde.launch.failure import JobResult, RankEnd
from ronde.launch.messages import Output, Stream
from ronde.launch.output.files import Generation, RankStacks
from ronde.render.lines import LineAssembler, RankLines, Tag, Tagger, TagPlace
from ronde.render.ranks import RankChoice

# What poll calls ready takes so many bytes at once (PIPE_BUF). Non-blocking mode is
# no way: it would hold for everybody who shares the descriptor, the user's shell too.
_PIECE_BYTES = 4096
_PIPE_PIECE_BYTES = 64 << 10
_FILE_PIECE_BYTES = 1 << 20
_MAX_PIECES = 64
_MAX_BARS = 8
_RESERVED_ROWS = 2
SCREEN_PROGRESS_S = 0.5
"""Least time between two states of one progress bar on a terminal."""
FILE_PROGRESS_S = 10.0
"""Least time between two states of one progress bar anywhere else."""
_DEFAULT_TAG = Tag()
_Key = tuple[int, int]
MAX_OWN_CODE = 7
"""Exit codes up to this one are the command's own: the rank has printed why."""


class FdWriter:
    """Bytes waiting for one descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._write_fd = -1
        self._waiting: deque[memoryview] = deque()
        self.waiting_bytes = 0
        self._piece_bytes = _PIECE_BYTES
        self._ready = select.poll()
        self._ready.register(fd, select.POLLOUT)
        try:
            self._mode = os.fstat(fd).st_mode
            self.is_broken = False
        except OSError:
            self._mode, self.is_broken = 0, True

    def _open(self) -> None:
        """Open a pipe once more, if that is allowed, in a mode of our own.

        Then a write takes sixteen times as much, and wakes the reader less often. Not
        before the first write, which another process may do.
        """
        self._write_fd = self.fd
        if stat.S_ISREG(self._mode):
            self._piece_bytes = _FILE_PIECE_BYTES
        elif stat.S_ISFIFO(self._mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
            with suppress(OSError):
                self._write_fd = os.open(f"/proc/self/fd/{self.fd}", flags)
                weakref.finalize(self, os.close, self._write_fd)
                self._piece_bytes = _PIPE_PIECE_BYTES

    def put(self, data: bytes) -> None:
        if data and not self.is_broken:
            self._waiting.append(memoryview(data))
            self.waiting_bytes += len(data)

    def discard(self) -> None:
        self._waiting.clear()
        self.waiting_bytes = 0

    def write(self) -> None:
        """Write while the descriptor is ready, as it must be at the call."""
        if self._write_fd < 0:
            self._open()
        for _ in range(_MAX_PIECES):
            piece = self._take_piece()
            if not piece:
                return
            try:
                taken = os.write(self._write_fd, piece)
            except BlockingIOError:
                taken = 0
            except OSError as error:
                self.is_broken = True
                self.discard()
                # With its number: EIO is a closed terminal.
                raise BrokenPipeError(error.errno, error.strerror) from error
            self.waiting_bytes -= taken
            if taken < len(piece):
                self._waiting.appendleft(memoryview(piece)[taken:])
                return
            if not self._ready.poll(0):
                return

    def _take_piece(self) -> bytes | memoryview:
        taken: list[memoryview] = []
        room = self._piece_bytes
        while self._waiting and room:
            head = self._waiting.popleft()
            if len(head) > room:
                self._waiting.appendleft(head[room:])
                head = head[:room]
            taken.append(head)
            room -= len(head)
        return taken[0] if len(taken) == 1 else b"".join(taken)


class Screen:
    """Lines and bars on one terminal."""

    def __init__(self, writer: FdWriter) -> None:
        self._writer = writer
        self._bars: dict[tuple[int, int], bytes] = {}
        self._num_drawn = 0

    def print(self, text: bytes) -> None:
        self._writer.put(self._erased() + text + self._drawn())

    def set_bar(self, key: tuple[int, int], text: bytes | None) -> None:
        """Show, change or, with None, remove one bar; bars are ordered by key."""
        if self._bars.get(key) == text:
            return
        if text is None:
            del self._bars[key]
        else:
            self._bars[key] = text
        self.print(b"")

    def _erased(self) -> bytes:
        if not self._num_drawn:
            return b""
        up = b"\x1b[%dA" % (self._num_drawn - 1) if self._num_drawn > 1 else b""
        self._num_drawn = 0
        return b"\r" + up + b"\x1b[J"

    def _drawn(self) -> bytes:
        if not self._bars:
            return b""
        try:
            columns, rows = os.get_terminal_size(self._writer.fd)
        except OSError:
            columns, rows = 0, 0
        # A terminal whose size was never set reports 0.
        columns, rows = columns or 80, rows or 24
        num_bars = max(1, min(_MAX_BARS, rows - _RESERVED_ROWS))
        keys = sorted(self._bars)[:num_bars]
        self._num_drawn = len(keys)
        # One column less: a full line would make the terminal wrap.
        return b"\n".join(self._bars[k].decode()[: columns - 1].encode() for k in keys)


class Console:
    """Shows a job's output on two descriptors; an ``OutputSink``.

    Each stream of a rank goes to ours of the same kind, each line after a tag with its
    rank. It never waits for a descriptor.
    """

    def __init__(
        self,
        stdout_fd: int,
        stderr_fd: int,
        *,
        tag: Tag = _DEFAULT_TAG,
        only: RankChoice | None = None,
        log_dir: str = "",
    ) -> None:
        stdout = FdWriter(stdout_fd)
        stderr = stdout if _is_same(stdout_fd, stderr_fd) else FdWriter(stderr_fd)
        self._writers = {Stream.STDOUT: stdout, Stream.STDERR: stderr}
        self._screens = {
            stream: Screen(writer)
            for stream, writer in self._writers.items()
            if os.isatty(writer.fd)
        }
        if stderr is stdout and self._screens:
            self._screens[Stream.STDERR] = self._screens[Stream.STDOUT]
        self._tagger = Tagger(tag)
        self._only = only
        self._log_dir = log_dir
        self._generation: Generation | None = None
        self._shown: frozenset[int] = frozenset()
        self._assemblers: dict[_Key, LineAssembler] = {}
        self._holding: set[_Key] = set()
        self._progress_due_s: dict[_Key, float] = {}
        self._progress_shown: dict[_Key, bytes] = {}
        self._is_discarding = False

    def begin(self, generation: Generation) -> None:
        hosts = generation.hosts
        self._shown = frozenset(range(len(hosts)))
        if self._only is not None:
            self._shown = self._only.among(hosts)
        self._tagger.begin(hosts)
        self._generation = generation
        self._assemblers.clear()
        self._progress_due_s.clear()
        self._progress_shown.clear()

    def output(self, output: Output, now_s: float) -> None:
        if self._is_discarding or output.rank not in self._shown:
            return
        key = (output.rank, int(output.stream))
        assembler = self._assemblers.get(key)
        if assembler is None:
            assembler = self._assemblers[key] = LineAssembler()
        self._show(key, assembler.feed(output.data, now_s))
        if not assembler.is_holding:
            self._holding.discard(key)
            return
        self._holding.add(key)
        if assembler.progress is not None:
            self._show_progress(key, assembler.progress, now_s)

    def notice(self, text: str) -> None:
        self._report(f"ronde: {text.removesuffix('.')}.\n")

    def stacks(self, taken: Sequence[RankStacks]) -> None:
        # Hardly any job is asked.
        from ronde.render.job_end import draw_stacks

        self._report(draw_stacks(taken))

    def finished(self, result: JobResult) -> None:
        for key in sorted(self._holding):
            self._show(key, self._assemblers[key].end())
        self._holding.clear()
        if result.cause is None and result.interrupted_by is None:
            return
        # Most jobs end well, and start without this.
        from ronde.render.job_end import summarize

        self._report(summarize(result, self._generation, self._log_dir))

    def tick(self, now_s: float) -> float | None:
        """Show what has rested long enough; return when the next will have."""
        due: list[float] = []
        for key in sorted(self._holding):
            assembler = self._assemblers[key]
            self._show(key, assembler.rest(now_s))
            if assembler.progress is not None:
                self._show_progress(key, assembler.progress, now_s)
                if assembler.progress != self._progress_shown.get(key):
                    due.append(self._progress_due_s[key])
            elif assembler.due_s is not None:
                # A cut UTF-8 sequence stays due; it must not keep the loop spinning.
                due.append(max(assembler.due_s, now_s + SCREEN_PROGRESS_S))
            else:
                self._holding.discard(key)
        return min(due, default=None)

    @property
    def pending_fds(self) -> tuple[int, ...]:
        fds = [c.fd for c in self._writers.values() if c.waiting_bytes]
        return tuple(dict.fromkeys(fds))

    @property
    def backlog_bytes(self) -> int:
        return sum(c.waiting_bytes for c in set(self._writers.values()))

    def write_to(self, fd: int) -> None:
        for writer in set(self._writers.values()):
            if writer.fd != fd or not writer.waiting_bytes:
                continue
            try:
                writer.write()
            except BrokenPipeError:
                # Both streams may have this one.
                if writer is self._writers[Stream.STDOUT]:
                    raise

    def discard(self) -> None:
        self._is_discarding = True
        self._holding.clear()
        for writer in self._writers.values():
            writer.discard()

    def _show(self, key: _Key, lines: list[RankLines]) -> None:
        if not lines:
            return
        rank, stream = key[0], Stream(key[1])
        screen = self._screens.get(stream)
        if screen is not None:
            screen.set_bar(key, None)
        self._print(stream, b"".join(self._tagger.tagged(rank, each) for each in lines))

    def _show_progress(self, key: _Key, text: bytes, now_s: float) -> None:
        rank, stream = key[0], Stream(key[1])
        screen = self._screens.get(stream)
        if screen is None:
            # The first state shows little; the clock runs from there.
            due_s = self._progress_due_s.setdefault(key, now_s + FILE_PROGRESS_S)
        else:
            due_s = self._progress_due_s.get(key, now_s)
        if now_s < due_s or text == self._progress_shown.get(key):
            return
        self._progress_shown[key] = text
        shown = self._tagger.tag(rank) + text
        if screen is None:
            self._print(stream, shown + b"\n")
            self._progress_due_s[key] = now_s + FILE_PROGRESS_S
        else:
            screen.set_bar(key, shown)
            self._progress_due_s[key] = now_s + SCREEN_PROGRESS_S

    def _report(self, text: str) -> None:
        self._print(Stream.STDERR, text.encode("utf-8", "backslashreplace"))

    def _print(self, stream: Stream, text: bytes) -> None:
        if not text:
            return
        screen = self._screens.get(stream)
        if screen is None:
            self._writers[stream].put(text)
        else:
            screen.print(text)


def _is_same(stdout_fd: int, stderr_fd: int) -> bool:
    """Whether both are one file, where two queues would cut each other's lines."""
    try:
        return os.path.samestat(os.fstat(stdout_fd), os.fstat(stderr_fd))
    except OSError:
        return False


class SelfLaunchConsole(Console):
    """Shows ranks as if they were one process; an ``OutputSink``.

    A message of several ranks is shown once, and a rank that ends with one of the
    command's own codes is not explained again.
    """

    def __init__(self) -> None:
        super().__init__(1, 2, tag=Tag(TagPlace.NONE))
        self._printed: dict[bytes, int] = {}

    def output(self, output: Output, now_s: float) -> None:
        data = output.data
        is_message = data.startswith(b"ronde: ") and data.endswith(b"\n")
        is_shown = output.stream is not Stream.STDERR or not is_message
        if is_shown or self._printed.setdefault(data, output.rank) == output.rank:
            super().output(output, now_s)

    def finished(self, result: JobResult) -> None:
        cause = result.cause
        is_own = isinstance(cause, RankEnd) and 0 <= cause.status <= MAX_OWN_CODE
        if cause is None or is_own or result.interrupted_by is not None:
            result = replace(result, cause=None, also_failed=(), interrupted_by=None)
        super().finished(result)
