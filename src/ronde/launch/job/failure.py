"""The cause of a failed job, and its exit code."""

import re
import signal
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ronde.launch.signals import interruption_code

_KEPT_BYTES = 32 << 10
_MAX_MESSAGE_LINES = 12
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_NOT_FATAL = re.compile(r"^(Exception ignored |Exception in thread |Error in atexit)")
"""Lines before a traceback that ends no process."""
_LAST_LINES = re.compile(
    r"^(\[(rank\d+\]:\[)?[WEIF]\d{4} |wandb: |terminate called|Aborted|Thread 0x"
    r"|Extension modules: |Fatal Python error|Current thread )"
    r"|Warning: |resource_tracker"
)
"""Lines after a traceback while a process ends: of Python, of torch's C++ parts, and of
experiment trackers."""
_COLOUR = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")
_PEER_LOST = re.compile(
    r"connection (was )?(likely )?(closed|refused|reset|aborted)|socket closed"
    r"|closed by (remote )?peer|reset by peer|broken pipe|remote process exit"
    r"|failed to recv|sendbytes failed|recvvector failed|recvvalue failed"
    r"|connectfullmesh|no route to host|process failure|err_proc_failed"
    r"|ncclremoteerror|heartbeatmonitor.*tcpstore|peerlosterror"
)
"""Errors of a rank that lost a peer, in lower case: of ronde, Gloo, NCCL, MPI, torch's
store and the kernel."""
_TIMED_OUT = re.compile(
    r"timed out waiting|collective operation timeout|timeout caused pair closure"
    r"|wait timeout|some nccl operations have failed or timed out"
    r"|dump signal .*from (rank \d+|another rank)|horovod has been shut down"
)
"""Errors of a rank whose peer did not answer in time, in lower case."""
_LOST_RANK = re.compile(
    r"\brank (\d+),?( process \d+,)? (is gone|has shut down|ended|said goodbye"
    r"|closed its communicator)"
)
"""The lost rank in errors of ronde."""
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""Signals that are no consequence of stopping a job."""


class Tail:
    """The last lines of a rank's standard error."""

    def __init__(self, num_lines: int = 20) -> None:
        self._num_lines = num_lines
        self._kept = bytearray()
        self.written_at_s = 0.0  # of the last line, monotonic

    def add(self, data: bytes) -> None:
        self.written_at_s = time.monotonic()
        self._kept += data
        if len(self._kept) > 2 * _KEPT_BYTES:
            del self._kept[:-_KEPT_BYTES]

    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines()[-self._num_lines :])

    def traceback(self) -> str:
        """Return the traceback at the end of the output, or an empty text.

        It includes chained exceptions. A prefix that all lines have, such as torch's
        ``[rank0]: ``, is removed.
        """
        has_any = _TRACEBACK.encode() in self._kept
        return find_traceback(self._lines()) if has_any else ""

    def _lines(self) -> list[str]:
        lines = bytes(self._kept[-_KEPT_BYTES:]).split(b"\n")
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        shown = shown if shown[-1] else shown[:-1]
        texts = (line.decode("utf-8", "backslashreplace") for line in shown)
        return [_COLOUR.sub("", text) for text in texts]


def find_traceback(lines: Sequence[str]) -> str:
    heads = [i for i in range(len(lines)) if _is_head(lines, i)]
    if not heads:
        return ""
    # The prefix of a wrapper; the border of an exception group is Python's own.
    prefix = lines[heads[-1]].removesuffix(_TRACEBACK)
    prefix = prefix.removesuffix("  + Exception Group ")
    plain = [line.removeprefix(prefix) for line in lines]
    first = heads[-1]
    for head in reversed(heads[:-1]):
        # Is the later traceback chained to this one?
        before = plain[max(0, first - 2) : first]
        if len(before) != 2 or before[0] not in _CHAINED or before[1].strip():
            break
        first = head
    end = _end(plain, heads[-1])
    return "\n".join(plain[first:end]) if _are_last_lines(plain[end:]) else ""


def _are_last_lines(lines: Sequence[str]) -> bool:
    is_ignored = False
    for line in lines:
        if _NOT_FATAL.search(line):
            is_ignored = True
        elif is_ignored:
            # Its last line is the exception, of any name.
            is_ignored = line[:1] in {" ", "\t"} or line.endswith(_TRACEBACK)
        elif line[:1].strip() and not _LAST_LINES.search(line):
            return False
    return True


def _is_head(lines: Sequence[str], index: int) -> bool:
    before = lines[index].removesuffix(_TRACEBACK)
    if before == lines[index] or before.rstrip().endswith("|"):
        return False
    above = lines[index - 1].removeprefix(before) if index else ""
    return not _NOT_FATAL.search(above)


def _end(lines: Sequence[str], head: int) -> int:
    end = head + 1
    while end < len(lines) and lines[end][:1] in {" ", "\t"}:
        end += 1
    # After the calls comes the exception, whose message may have several lines.
    limit = min(len(lines), end + _MAX_MESSAGE_LINES)
    while end < limit and lines[end].strip():
        if _NOT_FATAL.search(lines[end]) or _LAST_LINES.search(lines[end]):
            break
        end += 1
    return end


class RankEnd(NamedTuple):
    """Exit status, time and last output of a rank that ended."""

    rank: int  # in an elastic job its rank in the last view
    host: str
    pid: int
    status: int  # exit code, or minus the signal
    at_s: float  # when it began to end, since the start of the ranks
    was_stopped: bool  # it ended because the job was stopped, or after that
    stderr_tail: tuple[str, ...] = ()  # last lines of its stderr
    traceback: str = ""  # Python traceback at the end of its stderr, or empty
    evidence: str = ""  # of the kernel, in half a sentence, or empty
    was_leaving: bool = False  # it was stopped, but probably ended by itself before
    worker: int = -1  # its worker id, if that is not the rank

    @property
    def exit_code(self) -> int:
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def is_crash(self) -> bool:
        return -self.status in _CRASHES

    @property
    def is_secondary(self) -> bool:
        last_words = self.last_words
        return has_lost_peer(last_words) or bool(_TIMED_OUT.search(last_words))

    @property
    def lost_ranks(self) -> frozenset[int]:
        found = _LOST_RANK.finditer(self.last_words)
        return frozenset(int(each[1]) for each in found) - {self.rank}

    @property
    def last_words(self) -> str:
        """The rank's error text in lower case; only after an exit code or SIGABRT."""
        if self.status <= 0 and self.status != -signal.SIGABRT:
            return ""
        text = self.traceback if self.status == 1 else ""
        return (text or "\n".join(self.stderr_tail)).lower()


def has_lost_peer(last_words: str) -> bool:
    return bool(_PEER_LOST.search(last_words.lower()))


class LostHost(NamedTuple):
    """A host that was lost while its ranks ran."""

    host: str
    ranks: tuple[int, ...]
    reason: str  # ``no message from it for 8 s``
    exit_code: int  # of the job, if this is its cause
    at_s: float  # of its last message, since the start of the ranks


class ViewRecord(NamedTuple):
    """The start of a view of an elastic job, and the time and steps that it cost."""

    view: int
    began_at_s: float  # end of the previous view, since the start of the ranks
    took_s: float  # from that until all members ran
    size: int
    step: int  # its first step; -1 for the beginning of training
    steps_lost: int  # steps applied before, and repeated
    reason: str


class JobResult(NamedTuple):
    """The exit code of a job, its first failure, and all other failures."""

    exit_code: int  # of the whole job
    cause: RankEnd | LostHost | None  # the first failure; None without one
    also_failed: tuple[RankEnd, ...]  # other ranks, before the job was stopped
    ended: tuple[RankEnd, ...]  # ranks that were stopped
    interrupted_by: int | None  # the user's signal, or None
    also_lost: tuple[LostHost, ...] = ()  # other lost hosts
    views: tuple[ViewRecord, ...] = ()  # of an elastic job
    hang: str = ""  # the verdict on the hang that ended the job

    def is_worth_restart(self, excluded_codes: Collection[int]) -> bool:
        if self.hang:
            return True
        if self.interrupted_by is not None or self.exit_code == 0:
            return False
        failed = [e for e in (self.cause, *self.also_failed) if isinstance(e, RankEnd)]
        return not any(each.exit_code in excluded_codes for each in failed)


def judge(
    ends: Sequence[RankEnd],
    interrupted_by: int | None = None,
    lost: Sequence[LostHost] = (),
) -> JobResult:
    """Find the cause of a job's end, and its exit code.

    A rank that ended after the stop signal is a consequence. So is a rank that lost a
    peer, if another rank failed by itself. The cause is the first of the other
    failures; at equal times signals come before exit codes, and exit codes before lost
    hosts.

    If all failed ranks lost a peer, the cause may be a stopped rank: one that crashed,
    one that had probably failed before the signal, or one that an error message names.
    It may also be a rank that an error message names and that exited with 0. If the
    cause has no exit code, the job gets the exit code of the first failed rank.
    """
    # A rank that lost a peer ended after that peer.
    losses = [(end.at_s, end.lost_ranks) for end in ends if end.lost_ranks]
    noted = [[at_s for at_s, lost in losses if end.rank in lost] for end in ends]
    ends = [
        end._replace(at_s=min(end.at_s, *known)) if known else end
        for end, known in zip(ends, noted, strict=True)
    ]
    failed = [end for end in ends if end.status != 0 and not end.was_stopped]
    by_itself = [*(end for end in failed if not end.is_secondary), *lost]
    named = {rank for end in failed for rank in end.lost_ranks}
    left = [e for e in ends if e.rank in named and e.status == 0 and not e.was_stopped]
    late = [
        end
        for end in ends
        if end.was_stopped
        and end.status != 0
        and (end.is_crash or end.was_leaving or end.rank in named)
    ]
    candidates = by_itself or (failed and [*left, *late]) or failed
    cause = min(candidates, key=_priority, default=None)
    by_rank = sorted(ends, key=lambda end: end.rank)
    ended = tuple(e for e in by_rank if e.was_stopped and e is not cause)
    if interrupted_by is not None:
        exit_code = interruption_code(interrupted_by)
    elif isinstance(cause, RankEnd) and (
        cause in left or (cause in late and not cause.is_crash)
    ):
        exit_code = min(failed, key=_priority).exit_code
    elif cause is not None:
        exit_code = cause.exit_code
    else:
        exit_code = next((end.exit_code for end in ended if end.status != 0), 0)
    return JobResult(
        exit_code,
        cause,
        tuple(sorted((e for e in failed if e is not cause), key=_priority)),
        ended,
        interrupted_by,
        also_lost=tuple(sorted((e for e in lost if e is not cause), key=_priority)),
    )


def find_awaited(end: RankEnd, running: Collection[int]) -> set[int]:
    """Return the running ranks that may have caused a rank's end."""
    if end.lost_ranks:
        return set(end.lost_ranks.intersection(running))
    return set(running) if has_lost_peer(end.last_words) else set()


def _priority(failure: RankEnd | LostHost) -> tuple[float, int, int]:
    if isinstance(failure, LostHost):
        return failure.at_s, 2, min(failure.ranks, default=0)
    return failure.at_s, int(failure.status > 0), failure.rank


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
