"""Which rank broke the job, and what exit code says so."""

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

_HEARSAY = (
    "connection closed by",
    "connection reset by",
    "connection refused",
    "broken pipe",
    "socket closed",
    "closed by remote peer",
    "remote process exited",
    "timed out waiting",
    "collective operation timeout",
    "no route to host",
    "peerlosterror",
)
"""What a rank says, in lower case, when it failed because another one was gone."""

_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""Signals that no stop order brings about."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: Which.
        host: Where it ran.
        pid: Its process there.
        status: Exit code, or minus the number of the signal that ended it.
        at_s: Seconds since the ranks were started.
        was_stopped: True when the job was being ended already.
        stderr_tail: The last lines it wrote to stderr.
        traceback: The last Python traceback among what it wrote to stderr, or empty.
        evidence: What the kernel says of its end, a core file or a lack of memory, in
            half a sentence, or empty.
    """

    rank: int
    host: str
    pid: int
    status: int
    at_s: float
    was_stopped: bool
    stderr_tail: tuple[str, ...] = ()
    traceback: str = ""
    evidence: str = ""

    @property
    def exit_code(self) -> int:
        """The code that a shell would give: 128 plus the signal's number."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def is_crash(self) -> bool:
        """Whether a signal ended it that only its own doing sends."""
        return -self.status in _CRASHES

    @property
    def is_hearsay(self) -> bool:
        """Whether it gave up, saying that a peer was gone.

        Of one that an exception ended the traceback counts and nothing it said before.
        """
        if self.status <= 0 and self.status != -signal.SIGABRT:
            return False
        said = self.traceback if self.status == 1 else ""
        said = (said or "\n".join(self.stderr_tail)).lower()
        return any(words in said for words in _HEARSAY)


@dataclass(frozen=True, slots=True)
class LostHost:
    """A host that went away while its ranks ran.

    Attributes:
        host: Its name.
        ranks: Those that ran there.
        reason: What was seen of it: ``nothing was heard of it for 8 s``.
        exit_code: What the job ends with if this is its cause.
        at_s: When it went, in seconds since the ranks were started; of one that fell
            silent, when it was last heard of.
    """

    host: str
    ranks: tuple[int, ...]
    reason: str
    exit_code: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a job ended as it did.

    Attributes:
        exit_code: Of the whole job.
        cause: The rank that failed first and by itself, or the host that was lost
            before; None when all went well or the user ended the job.
        also_failed: Other ranks that failed before the job was being ended.
        ended: Ranks that were ended because of the cause, or of the user.
        interrupted_by: The signal by which the user ended the job, or None.
        also_lost: Hosts that were lost and are not the cause.
        ends: How every rank ended, by rank, but those of lost hosts.
    """

    exit_code: int
    cause: RankEnd | LostHost | None
    also_failed: tuple[RankEnd, ...]
    ended: tuple[RankEnd, ...]
    interrupted_by: int | None
    also_lost: tuple[LostHost, ...] = ()
    ends: tuple[RankEnd, ...] = ()

    def is_worth_restart(self, barred_codes: Collection[int]) -> bool:
        """Whether another start may do better.

        It may not where the user ended the job, where all went well, or where a rank
        that failed by itself says with its exit code that it would again.
        """
        if self.interrupted_by is not None or self.exit_code == 0:
            return False
        failed = [e for e in (self.cause, *self.also_failed) if isinstance(e, RankEnd)]
        return not any(each.exit_code in barred_codes for each in failed)


def judge(
    ends: Sequence[RankEnd],
    interrupted_by: int | None = None,
    lost: Sequence[LostHost] = (),
) -> Verdict:
    """Say what failed first and by itself, and derive the exit code.

    A rank that ended after the stop order is a consequence, and so is one that says
    that its peer was gone while another rank failed by itself or a host was lost. Of
    the others the earliest is the cause; where two are equally early, one that a signal
    ended comes before one that exited with a code, and that before a host. A rank that
    crashed while a core dump held it up ends after those that lost it, even after the
    stop order: it is the cause then.

    Args:
        ends: How each rank ended, in any order.
        interrupted_by: Number of the signal by which the user ended the job.
        lost: Hosts that went away, in any order; their ranks have no end.
    """
    failed = [end for end in ends if end.status != 0 and not end.was_stopped]
    by_itself = [*(end for end in failed if not end.is_hearsay), *lost]
    crashed_late = [end for end in ends if end.was_stopped and end.is_crash]
    suspects = by_itself or (failed and crashed_late) or failed
    cause = min(suspects, key=_priority, default=None)
    by_rank = sorted(ends, key=lambda end: end.rank)
    ended = tuple(e for e in by_rank if e.was_stopped and e is not cause)
    if interrupted_by is not None:
        exit_code = 128 + interrupted_by
    elif cause is not None:
        exit_code = cause.exit_code
    else:
        exit_code = _last_resort(ended)
    return Verdict(
        exit_code,
        cause,
        tuple(sorted((e for e in failed if e is not cause), key=_priority)),
        ended,
        interrupted_by,
        also_lost=tuple(sorted((e for e in lost if e is not cause), key=_priority)),
        ends=tuple(by_rank),
    )


def _priority(failure: RankEnd | LostHost) -> tuple[float, int, int]:
    """Order failures: the earliest first, and the surest where two are as early."""
    if isinstance(failure, LostHost):
        return failure.at_s, 2, min(failure.ranks, default=0)
    return failure.at_s, int(failure.status > 0), failure.rank


def _last_resort(ended: Sequence[RankEnd]) -> int:
    codes = [end.exit_code for end in ended if end.status != 0]
    return codes[0] if codes else 0


def signal_name(number: int) -> str:
    """Return a signal's name, as ``SIGSEGV``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
