"""Where a running job's output and events go: implemented by who shows them."""

from typing import NamedTuple, Protocol

from ronde.launch.frames import Output
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


class Sink(Protocol):
    """Takes what a job says without ever waiting.

    The controller polls the ``pending_fds``, calls ``write_to`` for each that is ready,
    and slows the ranks down while ``backlog_bytes`` is large.
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
    """A sink that shows nothing, for what has no output."""

    pending_fds: tuple[int, ...] = ()
    backlog_bytes = 0

    def begin(self, generation: Generation) -> None:
        """See ``Sink``."""

    def output(self, output: Output, now_s: float) -> None:
        """See ``Sink``."""

    def notice(self, text: str) -> None:
        """See ``Sink``."""

    def finished(self, verdict: Verdict) -> None:
        """See ``Sink``."""

    def tick(self, now_s: float) -> float | None:
        """See ``Sink``."""

    def write_to(self, fd: int) -> None:
        """See ``Sink``."""

    def discard(self) -> None:
        """See ``Sink``."""
