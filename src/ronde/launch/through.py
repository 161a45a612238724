"""A sink in front of another one."""

from collections.abc import Sequence

from ronde.launch.frames import Output
from ronde.launch.sink import Generation, RankStacks, Sink
from ronde.launch.verdict import Verdict


class Through:
    """Hands everything on: the base of sinks that look at what passes.

    Args:
        inner: Gets everything.
    """

    def __init__(self, inner: Sink) -> None:
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

    def finished(self, verdict: Verdict) -> None:
        """Hand on that all ranks of the generation have ended."""
        self._inner.finished(verdict)

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
