"""The console of a running job: every rank's lines, whole and told apart."""

import os
from collections.abc import Sequence

from ronde.launch.frames import Output, Stream
from ronde.launch.sink import Generation, RankStacks
from ronde.launch.verdict import Verdict
from ronde.render.channel import Channel
from ronde.render.lines import LineAssembler, Lines
from ronde.render.rank_ranges import RankChoice
from ronde.render.screen import Screen
from ronde.render.tags import Tag, Tagger

SCREEN_PROGRESS_S = 0.5
"""Least time between two states of one progress bar on a terminal."""

FILE_PROGRESS_S = 10.0
"""Least time between two states of one progress bar anywhere else."""

_DEFAULT_TAG = Tag()

_Key = tuple[int, int]


class Console:
    """Shows a job's output on two descriptors; a ``launch.sink.Sink``.

    Each rank's standard output goes to ours and its standard error to ours, line by
    line, each after a tag that says where it comes from. It never waits for a
    descriptor.

    Args:
        stdout_fd: For the ranks' standard output.
        stderr_fd: For their standard error and the launcher's own words.
        tag: What stands before each line.
        only: The ranks to show; None for all.
        log_dir: Directory of all jobs' files, for the summary; empty for none.
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
        stdout = Channel(stdout_fd)
        stderr = stdout if _is_same(stdout_fd, stderr_fd) else Channel(stderr_fd)
        self._channels = {Stream.STDOUT: stdout, Stream.STDERR: stderr}
        self._screens = {
            stream: Screen(channel)
            for stream, channel in self._channels.items()
            if os.isatty(channel.fd)
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
        """Take note of where the ranks are; nothing of those before is left.

        Raises:
            UsageError: A rank is to be shown that there is not.
        """
        hosts = generation.hosts
        only = self._only
        self._shown = (
            frozenset(range(len(hosts))) if only is None else only.among(hosts)
        )
        self._tagger.begin(hosts)
        self._generation = generation
        self._assemblers.clear()
        self._progress_due_s.clear()
        self._progress_shown.clear()

    def output(self, output: Output, now_s: float) -> None:
        """Take output of a rank and queue the lines that are whole now."""
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
        """Queue one sentence of the launcher's own."""
        said = f"ronde: {text.removesuffix('.')}.\n"
        self._print(Stream.STDERR, said.encode("utf-8", "backslashreplace"))

    def stacks(self, taken: Sequence[RankStacks]) -> None:
        """Queue where the ranks are."""
        # Hardly any job is asked.
        from ronde.render.stacks import draw_stacks

        text = draw_stacks(taken)
        self._print(Stream.STDERR, text.encode("utf-8", "backslashreplace"))

    def finished(self, verdict: Verdict) -> None:
        """Queue unfinished lines and, where the job failed, why."""
        for key in sorted(self._holding):
            self._show(key, self._assemblers[key].end())
        self._holding.clear()
        if verdict.cause is None and verdict.interrupted_by is None:
            return
        # Most jobs end well, and start without this.
        from ronde.render.summary import summarize

        text = summarize(verdict, self._generation, self._log_dir)
        self._print(Stream.STDERR, text.encode("utf-8", "backslashreplace"))

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
        """Descriptors for which something waits to be written."""
        fds = [c.fd for c in self._channels.values() if c.waiting_bytes]
        return tuple(dict.fromkeys(fds))

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait to be written."""
        return sum(c.waiting_bytes for c in set(self._channels.values()))

    def write_to(self, fd: int) -> None:
        """Write to a descriptor that is ready.

        Raises:
            BrokenPipeError: Nobody reads standard output any more. Where that is so of
                standard error alone, its lines are forgotten and nothing is raised.
        """
        for channel in set(self._channels.values()):
            if channel.fd != fd or not channel.waiting_bytes:
                continue
            try:
                channel.write()
            except BrokenPipeError:
                # Both streams may have this one.
                if channel is self._channels[Stream.STDOUT]:
                    raise

    def discard(self) -> None:
        """Forget what waits, and the ranks' output from now on."""
        self._is_discarding = True
        self._holding.clear()
        for channel in self._channels.values():
            channel.discard()

    def _show(self, key: _Key, lines: list[Lines]) -> None:
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
            # The first state says little; the clock runs from there.
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

    def _print(self, stream: Stream, text: bytes) -> None:
        if not text:
            return
        screen = self._screens.get(stream)
        if screen is None:
            self._channels[stream].put(text)
        else:
            screen.print(text)


def _is_same(stdout_fd: int, stderr_fd: int) -> bool:
    """Whether both are one file, where two queues would cut each other's lines."""
    try:
        return os.path.samestat(os.fstat(stdout_fd), os.fstat(stderr_fd))
    except OSError:
        return False
