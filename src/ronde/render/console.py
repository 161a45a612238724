"""Display of the ranks' output: tagged lines and progress bars."""

import codecs
import os
import select
import stat
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.launch.job.failure import JobResult, RankEnd
from ronde.launch.job.output import NO_ATTEMPT, Attempt, NewWorker
from ronde.launch.wire.messages import Output, Stacks, Stream
from ronde.render.text import RankChoice

HELD_BYTES = 64 << 10  # a longer line is shown in pieces
HELD_S = 2.0  # an unfinished line is shown after this time
_TIME = "time"
# A write of at most PIPE_BUF bytes does not block after poll. Non-blocking mode would
# hold for every process that shares the descriptor, the user's shell too.
_PIECE_BYTES = 4096
_PIPE_PIECE_BYTES = 64 << 10
_FILE_PIECE_BYTES = 1 << 20
_MAX_PIECES = 64
_MAX_BARS = 8
_RESERVED_ROWS = 2
SCREEN_PROGRESS_S = 0.5  # least time between two states of a bar on a terminal
FILE_PROGRESS_S = 10.0  # the same in files and pipes
_Key = tuple[int, int]  # worker and stream
MAX_OWN_CODE = 7  # the command's own exit codes: the rank has printed the reason


class RankLines(NamedTuple):
    """One or more consecutive lines of a rank's output."""

    text: bytes  # UTF-8 without the last newline; undecodable bytes are escaped
    is_continuation: bool = False  # the beginning of the first was shown before


class LineAssembler:
    """Splits one stream into lines.

    A line ends at its newline, at the end of the stream, at ``HELD_BYTES``, or after
    ``HELD_S``. The rest of a line that was cut by one of these two limits is marked
    as a continuation. A carriage return discards the part of a line before it.
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._held_since_s = 0.0
        self._is_continuation = False

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    @property
    def due_s(self) -> float | None:
        if not self._held or self._is_overwriting:
            return None
        return self._held_since_s + HELD_S

    @property
    def progress(self) -> bytes | None:
        """The current text of the progress bar, None if there is none."""
        if not self._is_overwriting:
            return None
        text = newest_part(bytes(self._held))
        return printable(text[: whole_length(text)])

    def feed(self, data: bytes, now_s: float) -> list[RankLines]:
        # Never line by line: the cost of a flood must not grow with its lines.
        whole, newline, rest = data.rpartition(b"\n")
        lines: list[RankLines] = []
        if newline:
            lines.append(self._lines(bytes(self._held) + whole))
            self._held.clear()
        if rest:
            self._held += rest
            self._held_since_s = now_s
        if b"\r" in rest or self._is_overwriting:
            self._forget_overwritten()
        while len(self._held) >= HELD_BYTES:
            lines.append(self._cut(HELD_BYTES))
        return lines

    def rest(self, now_s: float) -> list[RankLines]:
        """Return the unfinished line if it is older than ``HELD_S``."""
        is_due = self.due_s is not None and now_s >= self.due_s
        is_due = is_due and whole_length(bytes(self._held)) > 0
        return [self._cut(len(self._held))] if is_due else []

    def end(self) -> list[RankLines]:
        raw = bytes(self._held)
        self._held.clear()
        # A bar that was erased at its end leaves blanks, which are no line.
        is_wiped = b"\r" in raw and not newest_part(raw).strip()
        return [] if not raw or is_wiped else [self._lines(raw)]

    @property
    def _is_overwriting(self) -> bool:
        """True if the unfinished line is a bar: see ``_forget_overwritten``."""
        return self._held.startswith(b"\r")

    def _lines(self, raw: bytes) -> RankLines:
        if b"\r" in raw:
            raw = raw.replace(b"\r\n", b"\n")
        if b"\r" in raw:
            raw = b"\n".join(newest_part(line) for line in raw.split(b"\n"))
        lines = RankLines(printable(raw), self._is_continuation)
        self._is_continuation = False
        return lines

    def _cut(self, length: int) -> RankLines:
        piece = bytes(self._held[:length])
        piece = piece[: whole_length(piece) or length]
        del self._held[: len(piece)]
        line = self._lines(piece)
        self._is_continuation = True
        return line

    def _forget_overwritten(self) -> None:
        """Drop overwritten text. A carriage return at the start marks a bar."""
        newest = newest_part(bytes(self._held))
        is_ended = self._held.endswith(b"\r")
        self._held[:] = b"\r" + newest + (b"\r" if is_ended and newest else b"")


def newest_part(raw: bytes) -> bytes:
    """Return the text after the last carriage return that is not at the end."""
    return raw.rstrip(b"\r").rpartition(b"\r")[2]


def whole_length(raw: bytes) -> int:
    """Return the length of ``raw`` without an incomplete UTF-8 sequence at its end."""
    return codecs.utf_8_decode(raw, "replace")[1]


def printable(raw: bytes) -> bytes:
    return raw.decode("utf-8", "backslashreplace").encode()


class TagStyle(StrEnum):
    """The content of a ``Tag``: the rank, the host and rank, or nothing."""

    AUTO = "auto"  # the rank, and its host where there are several
    RANK = "rank"
    HOST = "host"
    NONE = "none"


class Tag(NamedTuple):
    """The form of the prefix that each line of output gets."""

    style: TagStyle = TagStyle.AUTO
    has_time: bool = False  # the time of day comes first


def parse_tag(text: str) -> Tag:
    """Read ``--tag``: ``rank``, ``host`` or ``none``, with or without ``,time``."""
    words = [word.strip() for word in text.split(",")]
    styles = [word for word in words if word != _TIME]
    if len(styles) > 1 or words.count(_TIME) > 1 or not set(styles) <= set(TagStyle):
        raise UsageError(
            "--tag must be rank, host, none or time, or one of the first three and "
            f"time, got {text!r}. Type: --tag host,time"
        )
    return Tag(TagStyle(styles[0]) if styles else TagStyle.AUTO, _TIME in words)


class Tagger:
    """Prefixes each rank's lines with its tag."""

    def __init__(self, tag: Tag) -> None:
        self._tag = tag
        self._names: list[bytes] = []

    def begin(self, hosts: Sequence[str]) -> None:
        """Build the tag of each rank: ``[3]``, ``[node2:3]`` or nothing."""
        style = self._tag.style
        if style is TagStyle.AUTO:
            style = TagStyle.HOST if len(set(hosts)) > 1 else TagStyle.RANK
        form = {TagStyle.HOST: "[{1}:{0}] ", TagStyle.RANK: "[{0}] "}.get(style, "")
        self._names = [
            form.format(rank, host).encode("utf-8", "backslashreplace")
            for rank, host in enumerate(hosts)
        ]

    def tagged(self, rank: int, lines: RankLines) -> bytes:
        """Return a rank's lines with tags; ``+`` in a tag marks a continuation."""
        first = self.tag(rank)
        head = first[:-1] + b"+" if lines.is_continuation and first else first
        return head + lines.text.replace(b"\n", b"\n" + first) + b"\n"

    def tag(self, rank: int) -> bytes:
        if not self._tag.has_time:
            return self._names[rank]
        now_s = time.time()
        clock = time.strftime("%H:%M:%S", time.localtime(now_s)).encode()
        return b"%s.%03d " % (clock, int(now_s % 1 * 1000)) + self._names[rank]


class FdWriter:
    """Buffered writer for one descriptor, which it shares with other processes."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._write_fd = -1
        self._waiting = bytearray()
        self._piece_bytes = _PIECE_BYTES
        self._ready = select.poll()
        self._ready.register(fd, select.POLLOUT)
        try:
            self._mode = os.fstat(fd).st_mode
            self.is_broken = False
        except OSError:
            self._mode, self.is_broken = 0, True

    def _open(self) -> None:
        """Reopen a pipe if possible, so that it still blocks for other processes."""
        # Then a write takes sixteen times as much, and wakes the reader less often. Not
        # before the first write: the process that writes may be a fork of this one.
        self._write_fd = self.fd
        if stat.S_ISREG(self._mode):
            self._piece_bytes = _FILE_PIECE_BYTES
        elif stat.S_ISFIFO(self._mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
            with suppress(OSError):
                self._write_fd = os.open(f"/proc/self/fd/{self.fd}", flags)
                weakref.finalize(self, os.close, self._write_fd)
                self._piece_bytes = _PIPE_PIECE_BYTES

    @property
    def waiting_bytes(self) -> int:
        return len(self._waiting)

    def put(self, data: bytes) -> None:
        if not self.is_broken:
            self._waiting += data

    def discard(self) -> None:
        self._waiting.clear()

    def write(self) -> None:
        """Write until a write would block; the call needs a ready descriptor."""
        if self._write_fd < 0:
            self._open()
        for _ in range(_MAX_PIECES):
            piece = self._waiting[: self._piece_bytes]
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
            del self._waiting[:taken]
            if taken < len(piece) or not self._ready.poll(0):
                return


class Screen:
    """Writes lines and, on a terminal, progress bars to one descriptor."""

    def __init__(self, writer: FdWriter) -> None:
        self.writer = writer
        self.is_terminal = os.isatty(writer.fd)
        self._bars: dict[_Key, bytes] = {}
        self._view: list[bytes] = []  # lines below the bars
        self._num_drawn = 0

    def print(self, text: bytes) -> None:
        self.writer.put(self._erased() + text + self._drawn())

    def set_bar(self, key: _Key, text: bytes | None) -> None:
        """Show a bar, or remove it if ``text`` is None; bars are ordered by key."""
        if self._bars.get(key) == text:
            return
        if text is None:
            del self._bars[key]
        else:
            self._bars[key] = text
        self.print(b"")

    def set_view(self, lines: Sequence[str]) -> None:
        """Show lines below the bars; without lines, the last ones become output."""
        last = self._view
        self._view = [line.encode("utf-8", "backslashreplace") for line in lines]
        self.print(b"" if lines else b"".join(line + b"\n" for line in last))

    def _erased(self) -> bytes:
        if not self._num_drawn:
            return b""
        up = b"\x1b[%dA" % (self._num_drawn - 1) if self._num_drawn > 1 else b""
        self._num_drawn = 0
        return b"\r" + up + b"\x1b[J"

    def _drawn(self) -> bytes:
        if not (self._bars or self._view):
            return b""
        try:
            columns, rows = os.get_terminal_size(self.writer.fd)
        except OSError:
            columns, rows = 0, 0
        # A terminal whose size was never set reports 0.
        columns, rows = columns or 80, rows or 24
        num_bars = max(1, min(_MAX_BARS, rows - _RESERVED_ROWS))
        lines = [self._bars[key] for key in sorted(self._bars)[:num_bars]]
        lines = [*lines, *self._view][: max(1, rows - _RESERVED_ROWS)]
        self._num_drawn = len(lines)
        # A full line would make the terminal wrap.
        return b"\n".join(line.decode()[: columns - 1].encode() for line in lines)


class Console:
    """An ``OutputSink`` that shows tagged lines on two descriptors; it never blocks."""

    def __init__(
        self,
        stdout_fd: int,
        stderr_fd: int,
        *,
        tag: Tag | None = None,
        only: RankChoice | None = None,
        log_dir: str = "",
    ) -> None:
        stdout = stderr = Screen(FdWriter(stdout_fd))
        if not _is_same(stdout_fd, stderr_fd):
            stderr = Screen(FdWriter(stderr_fd))
        self._screens = {Stream.STDOUT: stdout, Stream.STDERR: stderr}
        self._writers = {stdout.writer, stderr.writer}
        self._tagger = Tagger(tag or Tag())
        self._only = only
        self._log_dir = log_dir
        self._attempt = NO_ATTEMPT
        self._shown: frozenset[int] = frozenset()
        self._assemblers: dict[_Key, LineAssembler] = {}
        self._holding: set[_Key] = set()
        self._progress_due_s: dict[_Key, float] = {}
        self._progress_shown: dict[_Key, bytes] = {}
        self._is_discarding = False

    def begin(self, attempt: Attempt) -> None:
        hosts = attempt.hosts
        self._shown = frozenset(range(len(hosts)))
        if self._only is not None:
            self._shown = self._only.among(hosts)
        self._tagger.begin(hosts)
        self._attempt = attempt
        self._assemblers.clear()
        self._progress_due_s.clear()
        self._progress_shown.clear()

    def add_worker(self, new: NewWorker) -> None:
        self._attempt = self._attempt.add(new)
        hosts = self._attempt.hosts
        if self._only is None or new.worker in self._only.among(hosts):
            self._shown |= {new.worker}
        self._tagger.begin(hosts)

    def output(self, output: Output, now_s: float) -> None:
        if self._is_discarding or output.worker not in self._shown:
            return
        key = (output.worker, int(output.stream))
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

    def live_view(self, lines: Sequence[str]) -> None:
        self._screens[Stream.STDOUT].set_view(lines)

    def stacks(self, taken: Sequence[Stacks]) -> None:
        # Imported here: few jobs need it.
        from ronde.render.job import draw_stacks

        self._report(draw_stacks(taken, self._attempt.hosts))

    def finished(self, result: JobResult) -> None:
        for key in sorted(self._holding):
            self._show(key, self._assemblers[key].end())
        self._holding.clear()
        if result.cause is None and result.interrupted_by is None:
            return
        # As above.
        from ronde.render.job import summarize

        self._report(summarize(result, self._attempt, self._log_dir))

    def tick(self, now_s: float) -> float:
        """Show unfinished lines that are due; return the next due time."""
        due: list[float] = []
        for key in sorted(self._holding):
            assembler = self._assemblers[key]
            self._show(key, assembler.rest(now_s))
            if assembler.progress is not None:
                self._show_progress(key, assembler.progress, now_s)
                if assembler.progress != self._progress_shown.get(key):
                    due.append(self._progress_due_s[key])
            elif assembler.due_s is not None:
                # An incomplete UTF-8 sequence stays due: the loop must not spin.
                due.append(max(assembler.due_s, now_s + SCREEN_PROGRESS_S))
            else:
                self._holding.discard(key)
        return min(due, default=float("inf"))

    @property
    def pending_fds(self) -> tuple[int, ...]:
        return tuple(each.fd for each in self._writers if each.waiting_bytes)

    @property
    def backlog_bytes(self) -> int:
        return sum(each.waiting_bytes for each in self._writers)

    def write_to(self, fd: int) -> None:
        for writer in self._writers:
            if writer.fd != fd or not writer.waiting_bytes:
                continue
            try:
                writer.write()
            except BrokenPipeError:
                # The two streams may share one writer.
                if writer is self._screens[Stream.STDOUT].writer:
                    raise

    def discard(self) -> None:
        self._is_discarding = True
        self._holding.clear()
        for writer in self._writers:
            writer.discard()

    def _show(self, key: _Key, lines: list[RankLines]) -> None:
        if not lines:
            return
        screen = self._screens[Stream(key[1])]
        screen.set_bar(key, None)
        screen.print(b"".join(self._tagger.tagged(key[0], each) for each in lines))

    def _show_progress(self, key: _Key, text: bytes, now_s: float) -> None:
        screen = self._screens[Stream(key[1])]
        interval_s = SCREEN_PROGRESS_S if screen.is_terminal else FILE_PROGRESS_S
        # A file does not get the first state, which shows little.
        first_s = now_s if screen.is_terminal else now_s + interval_s
        due_s = self._progress_due_s.setdefault(key, first_s)
        if now_s < due_s or text == self._progress_shown.get(key):
            return
        self._progress_shown[key] = text
        self._progress_due_s[key] = now_s + interval_s
        shown = self._tagger.tag(key[0]) + text
        if screen.is_terminal:
            screen.set_bar(key, shown)
        else:
            screen.print(shown + b"\n")

    def _report(self, text: str) -> None:
        screen = self._screens[Stream.STDERR]
        screen.print(text.encode("utf-8", "backslashreplace"))


def _is_same(stdout_fd: int, stderr_fd: int) -> bool:
    # One file needs one queue: two would cut each other's lines.
    try:
        return os.path.samestat(os.fstat(stdout_fd), os.fstat(stderr_fd))
    except OSError:
        return False


class SelfLaunchConsole(Console):
    """A console that shows the ranks as if they were one process.

    A message that several ranks write is shown once. If a rank ends with one of the
    command's own exit codes, that is not reported again.
    """

    def __init__(self) -> None:
        super().__init__(1, 2, tag=Tag(TagStyle.NONE))
        self._printed: dict[bytes, int] = {}

    def output(self, output: Output, now_s: float) -> None:
        data = output.data
        is_message = data.startswith(b"ronde: ") and data.endswith(b"\n")
        is_shown = output.stream is not Stream.STDERR or not is_message
        if is_shown or self._printed.setdefault(data, output.worker) == output.worker:
            super().output(output, now_s)

    def finished(self, result: JobResult) -> None:
        cause = result.cause
        is_own = isinstance(cause, RankEnd) and 0 <= cause.status <= MAX_OWN_CODE
        if cause is None or is_own or result.interrupted_by is not None:
            result = result._replace(cause=None, also_failed=(), interrupted_by=None)
        super().finished(result)
