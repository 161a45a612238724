"""Which rank broke the job, what it wrote last, and the exit code."""

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
"""What Python puts before a traceback that ends no process."""
_FAREWELL = re.compile(
    r"^(\[(rank\d+\]:\[)?[WEIF]\d{4} |wandb: |terminate called|Aborted|Thread 0x"
    r"|Extension modules: |Fatal Python error|Current thread )"
    r"|Warning: |resource_tracker"
)
"""How lines begin, or what is in them, that follow a traceback while a process ends:
what Python, torch's C++ parts and trackers of experiments write then."""
_COLOUR = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")
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
_LOST_RANK = re.compile(
    r"\brank (\d+),?( process \d+,)? (is gone|has shut down|ended|said goodbye"
    r"|closed its communicator)"
)
"""How ronde's errors name who is gone."""
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""Signals that no stop order brings about."""


class Tail:
    """Remembers the end of what a rank wrote."""

    def __init__(self, num_lines: int = 20) -> None:
        self._num_lines = num_lines
        self._kept = bytearray()
        self.written_at_s = 0.0  # when the last came, on the monotonic clock

    def add(self, data: bytes) -> None:
        self.written_at_s = time.monotonic()
        self._kept += data
        if len(self._kept) > 2 * _KEPT_BYTES:
            del self._kept[:-_KEPT_BYTES]

    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines()[-self._num_lines :])

    def traceback(self) -> str:
        """Return the Python traceback that is the last word, or an empty text.

        With it come the exceptions that it was raised for, and the lines of its
        message; a prefix of every line, such as torch's ``[rank0]: ``, is taken away.
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
    # What a wrapper put before the first line. The border of an exception group is
    # Python's own.
    prefix = lines[heads[-1]].removesuffix(_TRACEBACK)
    prefix = prefix.removesuffix("  + Exception Group ")
    plain = [line.removeprefix(prefix) for line in lines]
    first = heads[-1]
    for head in reversed(heads[:-1]):
        # Whether the later traceback goes on from this one.
        before = plain[max(0, first - 2) : first]
        if len(before) != 2 or before[0] not in _CHAINED or before[1].strip():
            break
        first = head
    end = _end(plain, heads[-1])
    return "\n".join(plain[first:end]) if _is_farewell(plain[end:]) else ""


def _is_farewell(lines: Sequence[str]) -> bool:
    is_ignored = False
    for line in lines:
        if _NOT_FATAL.search(line):
            is_ignored = True
        elif is_ignored:
            # Its last line is the exception, which may be called anything.
            is_ignored = line[:1] in {" ", "\t"} or line.endswith(_TRACEBACK)
        elif line[:1].strip() and not _FAREWELL.search(line):
            return False
    return True


def _is_head(lines: Sequence[str], index: int) -> bool:
    """Whether a traceback begins here that may end a process."""
    before = lines[index].removesuffix(_TRACEBACK)
    if before == lines[index] or before.rstrip().endswith("|"):
        return False
    above = lines[index - 1].removeprefix(before) if index else ""
    return not _NOT_FATAL.search(above)


def _end(lines: Sequence[str], head: int) -> int:
    end = head + 1
    while end < len(lines) and lines[end][:1] in {" ", "\t"}:
        end += 1
    # What follows the calls is the exception, whose message may have several lines.
    limit = min(len(lines), end + _MAX_MESSAGE_LINES)
    while end < limit and lines[end].strip():
        if _NOT_FATAL.search(lines[end]) or _FAREWELL.search(lines[end]):
            break
        end += 1
    return end


class RankEnd(NamedTuple):
    """How one rank ended."""

    rank: int  # in an elastic job that of the last view
    host: str
    pid: int
    status: int  # exit code, or minus the number of the signal that ended it
    at_s: float  # when it began to end, as far as was seen, since the ranks' start
    was_stopped: bool  # the job was being ended already, or that ended it
    stderr_tail: tuple[str, ...] = ()  # the last lines it wrote to stderr
    traceback: str = ""  # the Python traceback that is its last word there, or empty
    evidence: str = ""  # the kernel's, a core file or a lack of memory: half a sentence
    was_leaving: bool = False  # it was stopped, but seemed to end by itself before
    worker: int = -1  # the id of a worker whose rank is another number

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
        """What may say why it ended, in lower case; nothing of one that was killed."""
        if self.status <= 0 and self.status != -signal.SIGABRT:
            return ""
        text = self.traceback if self.status == 1 else ""
        return (text or "\n".join(self.stderr_tail)).lower()


def has_lost_peer(last_words: str) -> bool:
    return bool(_PEER_LOST.search(last_words.lower()))


class LostHost(NamedTuple):
    """A host that went away while its ranks ran."""

    host: str
    ranks: tuple[int, ...]  # those that ran there
    reason: str  # what was seen of it: ``no message from it for 8 s``
    exit_code: int  # what the job ends with if this is its cause
    at_s: float  # when it was last heard of, since the ranks' start


class ViewRecord(NamedTuple):
    """How one view came about."""

    view: int
    began_at_s: float  # since the start of the ranks, when the one before was over
    took_s: float  # from then until all its members ran
    size: int
    step: int  # that it goes on from; -1 for from the beginning
    steps_lost: int  # that were applied once and must be done again
    reason: str


class JobResult(NamedTuple):
    """Why a job ended as it did."""

    exit_code: int  # of the whole job
    # the rank that failed first and by itself, or the host that was lost before; None
    # when all went well or the user ended the job
    cause: RankEnd | LostHost | None
    also_failed: tuple[RankEnd, ...]  # other ranks, before the job was being ended
    ended: tuple[RankEnd, ...]  # ranks that were ended by the user, or for the cause
    interrupted_by: int | None  # the signal by which the user ended the job, or None
    also_lost: tuple[LostHost, ...] = ()  # hosts that were lost and are not the cause
    views: tuple[ViewRecord, ...] = ()  # of an elastic job, one after the other

    def is_worth_restart(self, barred_codes: Collection[int]) -> bool:
        if self.interrupted_by is not None or self.exit_code == 0:
            return False
        failed = [e for e in (self.cause, *self.also_failed) if isinstance(e, RankEnd)]
        return not any(each.exit_code in barred_codes for each in failed)


def judge(
    ends: Sequence[RankEnd],
    interrupted_by: int | None = None,
    lost: Sequence[LostHost] = (),
) -> JobResult:
    """Return what failed first and by itself, and the job's exit code.

    A rank that ended after the stop order is a consequence, and so is one that lost its
    peer while another failed by itself. Of the others the first is the cause; of two
    equally early a signal comes before an exit code, and that before a host. Where all
    lost their peer, it is one that was stopped before it had ended: that crashed, or
    seemed to end by itself, or is named; or one that is named and had ended with 0. If
    the order ended it, or its code is 0, the job's code is theirs.
    """
    # Who lost a peer knew of its end at the latest then.
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
    suspects = by_itself or (failed and [*left, *late]) or failed
    cause = min(suspects, key=_priority, default=None)
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
    """Return the ranks of which one may have made this one fail, and has not ended."""
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
