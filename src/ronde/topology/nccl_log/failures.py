"""Find failed ranks in the output of Python, torch, torchrun, srun and mpirun."""

import re
import signal
from collections import defaultdict
from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

_MAX_KEPT = 1 << 12
_MAX_CAUSE = 160
# ``[rank3]:``, ``[1,3]<stderr>:`` of mpirun, ``3: `` of srun, ``[PG 0 Rank 3]``.
_RANK = re.compile(
    r"\[rank(\d{1,6})\]|\[\d+,(\d{1,6})\]<std|^ {0,6}(\d{1,6}): |\bRank (\d{1,6})\]"
)
# An exception, after tags of ranks, pods and loggers.
_RAISED = re.compile(
    r"((?:\[[^\]]{1,80}\](?:<std\w{3}>)?:? ?| {0,6}[\w.-]{0,253}\d: |\([^()]{1,80}\) |"
    r"\d{4}-\d\d-\d\d[T ]\S{8,20} |[\w.-]{1,128} +\| ){0,4})"
    r"((?:\w+\.)*[A-Z]\w*(?:Error|Exception)): (\S.*)"
)
# Exceptions without a rank count only if they are torch's.
_OF_TORCH = re.compile(
    r"\bDist(?:Backend|Store|Network)Error|torch\.\S*(?:OutOfMemory|Accelerator)Error"
    r"|RuntimeError: (?:(?:CUDA|HIP|NCCL) error|\[\S*gloo)"
)
# How a rank's line begins: a traceback, or more of one, or neither.
_OWN = re.compile(
    r"\[rank(\d{1,6})\]:(?: (Traceback \(|  File|Exception ignored)"
    r"|(\[|\s*$| \s| During handling| The above exc))?"
)
_DESTROYED = re.compile(r" rank (\d+) nranks (\d+) .*- Destroy COMPLETE")
_IN_WATCHDOG = re.compile("terminated with exception: ((?:CUDA|HIP) error: .+)")
_EXIT = re.compile(
    r"exitcode *: (-?\d{1,3})(?:\) local_rank: (\d{1,6}))? \(pid: (\d{1,10})\)"
)
_TABLE_RANK = re.compile(r"rank +: (\d{1,6}) \(local_rank: \d+\)")
_TASK = re.compile(
    r"srun: error: ([\w.-]+): (tasks? [\d,-]+): (.+)"
    r"|process rank (\d{1,6}) with PID \d+ on node (\S+) exited on (.+)"
)
_NOISE = re.compile(
    r"^RuntimeError: |\[\S*/gloo/\S*\]| in: \S+(?=,)| \(run with \w+=INFO[^)]*\)"
    r"|, NCCL version \S+"
)


class Outcome(IntEnum):
    """The state of a rank after its last failure; after several, the lowest value."""

    FAILED = 0
    RESTARTED = 1  # The job was started again.
    WENT_ON = 2  # It caught the exception.


class RankFailure(NamedTuple):
    """A failed rank, the cause, and its state after the failure."""

    cause: str  # ``CUDA error: an illegal memory access was encountered``.
    rank: int = -1  # -1 if unknown.
    name: str = "a rank"  # If its rank is unknown: ``task 13``, ``local rank 5``.
    host: str = ""
    pid: int = 0
    outcome: Outcome = Outcome.FAILED


class FailureReader:
    """Collects failures from single lines; ignores lines of other programs."""

    def __init__(self) -> None:
        self._found: dict[object, RankFailure] = {}
        # By tag: failures with their last error in the next line.
        self.waiting: dict[str, object] = {}
        self._table_rank = -1  # In torchrun's table.
        self._num_seen = 0  # Signs of failures.
        self._seen: dict[object, int] = {}  # The last one's number, by failure.
        # Number of failures at the end of each rank, by size of the communicator.
        self._destroyed: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._in_traceback: dict[int | str, str] = {}  # How it began, by rank.
        self.may_go_on: set[object] = set()  # Ranks that may have caught theirs.
        self._rank = -1  # Of the last line.

    def feed(self, line: str) -> None:
        line = line.rstrip()
        self._feed_own(line)
        for tag in [tag for tag in self.waiting if line.startswith(tag)]:
            key = self.waiting.pop(tag)
            cause = f"{self._found[key].cause}: {line.removeprefix(tag).strip()}"
            self._found[key] = self._found[key]._replace(cause=cause[:_MAX_CAUSE])
        tag = line.removesuffix("Last error:")
        if match := _RAISED.match(line):
            tag, name, text = match.groups()
            key, of_torch = _key(tag), _OF_TORCH.search(f"{name}: {text}")
            start = self._in_traceback.pop(key, "")
            if start != "Exception ignored" and (start or of_torch):
                self._add(key, f"{name.rpartition('.')[2]}: {text}")
                if key in self._found and (not of_torch or "OutOfMemory" in name):
                    self.may_go_on.add(key)
        elif match := _IN_WATCHDOG.search(line):
            self._add(_key(line), match[1])
        elif tag != line and _key(tag) in self._found:
            self.waiting[tag] = _key(tag)
        else:
            self._feed_end(line)

    def feed_nccl(self, text: str) -> None:
        """Read an NCCL message that may report the end of a communicator."""
        if match := _DESTROYED.search(text):
            self._destroyed[int(match[2])][int(match[1])] = self._num_seen

    def report(self, ranks: Collection[int] = ()) -> tuple[RankFailure, ...]:
        """Return failures; failures before a regular end of all ranks are marked.

        ``ranks`` are the ranks in the log if it has only one job.
        """
        size = max(self._destroyed, default=0)
        nums = self._destroyed[size]
        is_whole = len(nums) == size > 0 or nums.keys() >= {*ranks} > set()
        num_before = min(nums.values()) if is_whole else 0
        for key, each in self._found.items():
            if self._seen[key] <= num_before and each.outcome is Outcome.FAILED:
                has_ended = each.pid or each.host or not ranks
                outcome = Outcome.RESTARTED if has_ended else Outcome.WENT_ON
                self._found[key] = each._replace(outcome=outcome)
        return tuple(self._found.values())

    def _feed_own(self, line: str) -> None:
        """Find ranks that continue to write after an exception."""
        match = _OWN.search(line)
        rank = int(match[1]) if match else -1
        if match and match[2]:
            self._in_traceback.setdefault(rank, match[2])
        # An exception may have several lines.
        is_new = rank != self._rank and rank in self.may_go_on
        if is_new and match and match.lastindex == 1 and not _RAISED.match(line):
            self.may_go_on.discard(rank)
            self._found[rank] = self._found[rank]._replace(outcome=Outcome.WENT_ON)
        self._rank = rank

    def _feed_end(self, line: str) -> None:
        if match := _TABLE_RANK.search(line):
            self._table_rank = int(match[1])
        elif match := _EXIT.search(line):
            self._exited(int(match[1]), match[2], int(match[3]))
        elif "attempts left; will restart worker group" in line:
            for key, each in self._found.items():
                if each.outcome is Outcome.FAILED:
                    self._found[key] = each._replace(outcome=Outcome.RESTARTED)
        elif match := _TASK.search(line):
            host, task, state, rank, node, end = match.groups()
            key = int(rank) if rank else (host, task)
            self._add(key, state or end, task or "", host or node)

    def _exited(self, code: int, local: str | None, pid: int) -> None:
        key, cause = ("pid", pid), f"exit code {code}"
        if -signal.NSIG < code < 0:
            cause = f"signal {-code} ({signal.strsignal(-code)})"
        self._add(key, cause, f"local rank {local}" if local else "a rank", pid=pid)
        if key in self._found and not local:
            self._found[key] = self._found[key]._replace(rank=self._table_rank)

    def _add(
        self,
        key: object,
        cause: str,
        name: str = "a rank",
        host: str = "",
        pid: int = 0,
    ) -> None:
        if len(self._found) < _MAX_KEPT:
            cause = _NOISE.sub("", cause).strip(" .")[:_MAX_CAUSE]
            rank = key if isinstance(key, int) else -1
            if key not in self._found or self._found[key].outcome is not Outcome.FAILED:
                self._found[key] = RankFailure(cause, rank, name, host, pid)
            self._num_seen += 1
            self._seen[key] = self._num_seen


def _key(tag: str) -> int | str:
    match = _RANK.search(tag)
    return int(next(filter(None, match.groups()))) if match else tag
