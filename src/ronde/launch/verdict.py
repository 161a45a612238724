"""Which rank broke the job, and what exit code says so."""

import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ronde.launch.signals import interruption_code

_PEER_LOST = re.compile(
    r"connection (was )?(likely )?(closed|refused|reset|aborted)|socket closed"
    r"|closed by (remote )?peer|reset by peer|broken pipe|remote process exit"
    r"|failed to recv|sendbytes failed|recvvector failed|recvvalue failed"
    r"|connectfullmesh|no route to host|process failure|err_proc_failed"
    r"|ncclremoteerror|heartbeatmonitor.*tcpstore|peerlosterror"
)
"""What a rank writes, in lower case, that ends because another one is gone: words of
ronde's, Gloo's, NCCL's, torch's store's, MPI's and the kernel's."""

_TIMED_OUT = re.compile(
    r"timed out waiting|collective operation timeout|timeout caused pair closure"
    r"|wait timeout|some nccl operations have failed or timed out"
    r"|dump signal .*from (rank \d+|another rank)|horovod has been shut down"
)
"""Likewise, of one that another did not answer in time."""

_IS_STOPPED = "is stopped; kill -cont"
"""Likewise, of one that found another stopped, which will not end soon."""

_LOST_RANK = re.compile(
    r"\brank (\d+),?( process \d+,)? (is gone|has shut down|ended|said goodbye"
    r"|closed its communicator)"
)
"""How ronde's errors name who is gone."""

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
        at_s: When it began to end, as far as that was seen, in seconds since the ranks
            were started.
        was_stopped: True when the job was being ended already, or when that ended it.
        stderr_tail: The last lines it wrote to stderr.
        traceback: The Python traceback that is its last word on stderr, or empty.
        evidence: What the kernel says of its end, a core file or a lack of memory, in
            half a sentence, or empty.
        was_leaving: True when it was stopped, but seemed to end by itself before.
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
    was_leaving: bool = False

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
        """Whether it gave up, saying that a peer was gone or did not answer."""
        last_words = self.last_words
        return has_lost_peer(last_words) or bool(_TIMED_OUT.search(last_words))

    @property
    def lost_ranks(self) -> frozenset[int]:
        """Those of which it said that they were gone."""
        found = _LOST_RANK.finditer(self.last_words)
        return frozenset(int(each[1]) for each in found) - {self.rank}

    @property
    def last_words(self) -> str:
        """What may say why it ended, in lower case; nothing of one that was killed.

        Of one that an exception ended the traceback counts and nothing it said before.
        """
        if self.status <= 0 and self.status != -signal.SIGABRT:
            return ""
        said = self.traceback if self.status == 1 else ""
        return (said or "\n".join(self.stderr_tail)).lower()


def has_lost_peer(last_words: str) -> bool:
    """Whether these last words are those of who ends because a peer is gone."""
    return bool(_PEER_LOST.search(last_words.lower()))


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
    the others the one that began to end first is the cause, and a rank did so before
    those that name it as lost; where two are equally early, one that a signal ended
    comes before one that exited with a code, and that before a host.

    Where all that failed lost their peer, the cause is one that was stopped before it
    had ended: one that crashed, seemed to end by itself, or is named by the others. If
    the stop order ended it, its own exit code is not known, and theirs is the job's.

    Args:
        ends: How each rank ended, in any order.
        interrupted_by: Number of the signal by which the user ended the job.
        lost: Hosts that went away, in any order; their ranks have no end.
    """
    ends = _dated(ends)
    failed = [end for end in ends if end.status != 0 and not end.was_stopped]
    by_itself = [*(end for end in failed if not end.is_hearsay), *lost]
    suspects = by_itself or (failed and _late_suspects(ends, failed)) or failed
    cause = min(suspects, key=_priority, default=None)
    by_rank = sorted(ends, key=lambda end: end.rank)
    ended = tuple(e for e in by_rank if e.was_stopped and e is not cause)
    if interrupted_by is not None:
        exit_code = interruption_code(interrupted_by)
    elif isinstance(cause, RankEnd) and cause.was_stopped and not cause.is_crash:
        exit_code = min(failed, key=_priority).exit_code
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


def find_awaited(end: RankEnd, running: Collection[int]) -> set[int]:
    """Return the ranks of which one may have made this one fail, and has not ended.

    Args:
        end: How a rank failed that was not stopped.
        running: Those that have not ended.
    """
    if _IS_STOPPED in end.last_words:
        return set()
    if end.lost_ranks:
        return set(end.lost_ranks.intersection(running))
    return set(running) if has_lost_peer(end.last_words) else set()


def _dated(ends: Sequence[RankEnd]) -> list[RankEnd]:
    """Return the ends, none of which began later than others took note of it."""
    noted: dict[int, float] = {}
    for end in ends:
        for rank in end.lost_ranks:
            noted[rank] = min(end.at_s, noted.get(rank, end.at_s))
    return [
        replace(end, at_s=noted[end.rank])
        if end.at_s > noted.get(end.rank, end.at_s)
        else end
        for end in ends
    ]


def _late_suspects(ends: Sequence[RankEnd], failed: Sequence[RankEnd]) -> list[RankEnd]:
    """Return who may have made the others lose their peer, but was stopped then."""
    named = {rank for end in failed for rank in end.lost_ranks}
    return [
        end
        for end in ends
        if end.was_stopped
        and end.status != 0
        and (end.is_crash or end.was_leaving or end.rank in named)
    ]


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
