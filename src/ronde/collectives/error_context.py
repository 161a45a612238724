"""What torch says when a collective fails, in ronde's errors."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from ronde.errors import CollectiveError, PeerLostError

_SOURCE_LINE = re.compile(r"^\[enforce fail at [^]]*\] .*?\. |^\[[^]]*\] ")
_TIMED_OUT = re.compile(
    r"timed? ?out|caused pair closure|timeout after|wait timeout", re.IGNORECASE
)
_PEER_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|remote process exited|socket closed"
    r"|connection (was )?(closed|refused|reset|aborted)|failed to recv|connectfullmesh"
    r"|process failure|err_proc_failed",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class ErrorContext:
    """Where a collective runs, for the sentence that says how it failed.

    Attributes:
        name: The collective.
        rank: This process.
        size: Number of processes.
        timeout_s: How long the engine waits for the others.
    """

    name: str
    rank: int
    size: int
    timeout_s: float

    def explain(self, error: Exception) -> CollectiveError:
        """Turn an error of torch's into the one to raise."""
        place = f"{self.name} on rank {self.rank} of {self.size}"
        # torch puts its own source line, and the condition that it checked there,
        # before the first sentence, and advice after it.
        text = _SOURCE_LINE.sub("", str(error).partition("\n")[0]).partition(". ")[0]
        # Of an error of NCCL's this says most, such as: Duplicate GPU detected.
        said = str(error).partition("Last error:")[2].strip().partition("\n")[0]
        text += f"; NCCL: {said}" if said else ""
        if _TIMED_OUT.search(text):
            return CollectiveError(
                f"{place} must complete within timeout_s, got no answer for "
                f"{self.timeout_s:g} s ({text}). See which rank hangs or makes other "
                "calls, or give a longer timeout_s."
            )
        if _PEER_LOST.search(text):
            return PeerLostError(
                f"{place} needs every rank, but one is gone ({text}). Its own error "
                "says why."
            )
        return CollectiveError(f"{place} failed: {text}")

    @contextmanager
    def guard(self) -> Generator[None]:
        """Explain every error of torch's that leaves the block."""
        try:
            yield
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise self.explain(error) from error
