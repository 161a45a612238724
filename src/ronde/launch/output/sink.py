"""Where the output and the events of a running job go."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ronde.launch.failure import JobResult
from ronde.launch.frames import Output
from ronde.launch.messages import ProcessStack


class Generation(NamedTuple):
    """One start of all ranks."""

    job_id: str  # name of the job
    epoch: int  # 0 for the first start, one more for each restart
    hosts: tuple[str, ...]  # name of each rank's host, by rank


class RankStacks(NamedTuple):
    """Where a rank is."""

    rank: int
    host: str
    # its own and those below it; none where nothing was heard
    processes: tuple[ProcessStack, ...]


class OutputSink(Protocol):
    """Shows or writes what a job says; in the output process, where it may wait.

    Who runs it polls the ``pending_fds``, calls ``write_to`` for each that is ready,
    and takes no more output while ``backlog_bytes`` is large.
    """

    def begin(self, generation: Generation) -> None:
        """Take note that all ranks are about to start.

        Raises:
            UsageError: What the user asked for cannot be written.
        """
        ...

    def output(self, output: Output, now_s: float) -> None:
        """Take output of a rank; ``now_s`` is a monotonic clock."""
        ...

    def notice(self, text: str) -> None:
        """Take one sentence of the launcher's own."""
        ...

    def stacks(self, taken: Sequence[RankStacks]) -> None:
        """Take where the ranks are, which the user has asked for."""
        ...

    def finished(self, result: JobResult) -> None:
        """Take note that all ranks of the generation have ended, and why.

        Their output has come before; what comes after is another generation's.
        """
        ...

    def tick(self, now_s: float) -> float | None:
        """Do what is due; return when to come again, None for not before output."""
        ...

    @property
    def pending_fds(self) -> tuple[int, ...]:
        """Descriptors for which something waits to be written."""
        ...

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait to be written."""
        ...

    def write_to(self, fd: int) -> None:
        """Write to a descriptor that is ready, no more than it takes at once.

        Raises:
            BrokenPipeError: Nobody reads the ranks' standard output any more.
        """
        ...

    def discard(self) -> None:
        """Forget all that waits, and what comes from now on."""
        ...


class NoOutput:
    """Takes the place of ``OutputProcess`` for a job that has no output."""

    read_fd = write_fd = -1
    backlog_bytes = 0
    is_settled = has_ended = True

    def _do_nothing(self, *_: object) -> None:
        """Show and record nothing."""

    planned = begin = began = output = notice = stacks = finished = _do_nothing
    discard = flush = read = close = kill = _do_nothing


class SinkWrapper:
    """Hands everything on: the base of sinks that look at what passes."""

    def __init__(self, inner: OutputSink) -> None:
        self._inner = inner

    def begin(self, generation: Generation) -> None:
        """Hand on that all ranks are about to start.

        Raises:
            UsageError: What the user asked for cannot be written.
        """
        self._inner.begin(generation)

    def output(self, output: Output, now_s: float) -> None:
        """Hand on output of a rank."""
        self._inner.output(output, now_s)

    def notice(self, text: str) -> None:
        """Hand on one sentence of the launcher's own."""
        self._inner.notice(text)

    def stacks(self, taken: Sequence[RankStacks]) -> None:
        """Hand on where the ranks are."""
        self._inner.stacks(taken)

    def finished(self, result: JobResult) -> None:
        """Hand on that all ranks of the generation have ended."""
        self._inner.finished(result)

    def tick(self, now_s: float) -> float | None:
        """Do what is due; return when to come again."""
        return self._inner.tick(now_s)

    @property
    def pending_fds(self) -> tuple[int, ...]:
        """Descriptors for which something waits to be written."""
        return self._inner.pending_fds

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._inner.backlog_bytes

    def write_to(self, fd: int) -> None:
        """Write to a descriptor that is ready.

        Raises:
            BrokenPipeError: Nobody reads the ranks' standard output any more.
        """
        self._inner.write_to(fd)

    def discard(self) -> None:
        """Have what waits to be shown forgotten, and what comes."""
        self._inner.discard()
