"""Where the output and the events of a running job go."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ronde.launch.failure import JobResult
from ronde.launch.messages import Output, ProcessStack


class Generation(NamedTuple):
    """One start of all ranks."""

    job_id: str
    epoch: int  # 0 for the first start, one more for each restart
    hosts: tuple[str, ...]  # name of each rank's host, by rank


class RankStacks(NamedTuple):
    """Where a rank is."""

    rank: int
    host: str
    processes: tuple[ProcessStack, ...]  # its own and those below it; or no answer


class OutputSink(Protocol):
    """Shows or writes what a job reports; in the output process, where it may wait.

    The output process polls the ``pending_fds``, calls ``write_to`` for each that is
    ready, and takes no more output while ``backlog_bytes`` is large.
    """

    def begin(self, generation: Generation) -> None:
        """Prepare for ranks that are about to start.

        Raises:
            UsageError: What the user asked for cannot be written.
        """
        ...

    def output(self, output: Output, now_s: float) -> None:
        """Take output of a rank; ``now_s`` is a monotonic clock."""
        ...

    def notice(self, text: str) -> None: ...

    def stacks(self, taken: Sequence[RankStacks]) -> None: ...

    def finished(self, result: JobResult) -> None:
        """Take the end of all ranks of the generation, after all of their output."""
        ...

    def tick(self, now_s: float) -> float | None:
        """Do what is due; return when to come again, None for not before output."""
        ...

    @property
    def pending_fds(self) -> tuple[int, ...]: ...

    @property
    def backlog_bytes(self) -> int: ...

    def write_to(self, fd: int) -> None:
        """Write to a descriptor that is ready, no more than it takes at once.

        Raises:
            BrokenPipeError: Nobody reads the ranks' standard output any more.
        """
        ...

    def discard(self) -> None: ...


class SinkWrapper:
    """Hands everything on: the base of sinks that look at what passes."""

    def __init__(self, inner: OutputSink) -> None:
        self._inner = inner

    def begin(self, generation: Generation) -> None:
        self._inner.begin(generation)

    def output(self, output: Output, now_s: float) -> None:
        self._inner.output(output, now_s)

    def notice(self, text: str) -> None:
        self._inner.notice(text)

    def stacks(self, taken: Sequence[RankStacks]) -> None:
        self._inner.stacks(taken)

    def finished(self, result: JobResult) -> None:
        self._inner.finished(result)

    def tick(self, now_s: float) -> float | None:
        return self._inner.tick(now_s)

    def write_to(self, fd: int) -> None:
        self._inner.write_to(fd)

    def discard(self) -> None:
        self._inner.discard()

    @property
    def pending_fds(self) -> tuple[int, ...]:
        return self._inner.pending_fds

    @property
    def backlog_bytes(self) -> int:
        return self._inner.backlog_bytes
