"""Where a running job's output and events go: implemented by who shows them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ronde.launch.frames import Output
from ronde.launch.job import RankPlan
from ronde.launch.messages import ProcessStack
from ronde.launch.verdict import Verdict


class Generation(NamedTuple):
    """One start of all ranks.

    Attributes:
        job_id: Name of the job.
        epoch: 0 for the first start, one more for each restart.
        hosts: Name of each rank's host, by rank.
    """

    job_id: str
    epoch: int
    hosts: tuple[str, ...]


class RankStacks(NamedTuple):
    """Where a rank is.

    Attributes:
        rank: Which.
        host: Where it runs.
        processes: Its own and those below it; none where nothing was heard.
    """

    rank: int
    host: str
    processes: tuple[ProcessStack, ...]


class Sink(Protocol):
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

    def finished(self, verdict: Verdict) -> None:
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


class Unseen:
    """What the controller tells of a job that has no output; see ``OutputProcess``."""

    read_fd = write_fd = -1
    backlog_bytes = 0
    is_settled = has_ended = True

    def planned(
        self, job_id: str, argv: Sequence[str], places: Sequence[tuple[str, RankPlan]]
    ) -> None:
        """Record nothing."""

    def begin(self, generation: Generation) -> None:
        """Prepare nothing."""

    def began(self, timings: Mapping[str, float]) -> None:
        """Record nothing."""

    def output(self, output: Output) -> None:
        """Show nothing."""

    def notice(self, text: str) -> None:
        """Show nothing."""

    def stacks(self, taken: Sequence[RankStacks]) -> None:
        """Show nothing."""

    def finished(self, verdict: Verdict) -> None:
        """Show nothing."""

    def discard(self) -> None:
        """Have nothing to discard."""

    def flush(self) -> None:
        """Have nothing to write."""

    def read(self) -> None:
        """Have nothing to read."""

    def close(self) -> None:
        """Have nothing to end."""

    def kill(self) -> None:
        """Have nothing to kill."""
