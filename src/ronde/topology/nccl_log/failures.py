"""Ranks that failed, from the words of Python, torch, torchrun, srun and mpirun."""

import re
import signal
from collections import defaultdict
from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

_MAX_KEPT = 1 << 12
_MAX_CAUSE = 160
_MAX_TEXT = 20  # Lines of an exception's text.
# ``[rank3]:``, ``[1,3]<stderr>:`` of mpirun, ``3: `` of srun, ``[PG 0 Rank 3]``.
_RANK = re.compile(
    r"\[rank(\d{1,6})\]|\[\d+,(\d{1,6})\]<std|^ {0,6}(\d{1,6}): |\bRank (\d{1,6})\]"
)
# Behind tags of ranks, pods and loggers: an exception, at the margin.
_RAISED = re.compile(
    r"((?:\[[^\]]{1,80}\](?:<std\w{3}>)?:? ?| {0,6}[\w.-]{0,253}\d: |\([^()]{1,80}\) |"
    r"\d{4}-\d\d-\d\d[T ]\S{8,20} |[\w.-]{1,128} +\| ){0,4})"
    r"((?:\w+\.)*[A-Z]\w*(?:Error|Exception)): (\S.*)"
)
# Without a rank any program may have printed an exception, and gone on.
_OF_TORCH = re.compile(
    r"\bDist(?:Backend|Store|Network)Error|torch\.\S*(?:OutOfMemory|Accelerator)Error"
    r"|RuntimeError: (?:(?:CUDA|HIP|NCCL) error|\[\S*gloo)"
)
_TRACEBACK = re.compile(
    r"\[rank(\d{1,6})\]: (Traceback \(|  File \"|Exception ignored)"
)
# A line of a rank's own, and none of an exception's text, nor of C++.
_OWN = re.compile(
    r"\[rank(\d{1,6})\]: (?!During handling|The above exc|Traceback|CUDA kernel|For deb"
    r"|Compile with|Search for|Device-side|Exception raised|frame #|Last error|nccl)\S"
)
_COMPLETE = re.compile(r" rank (\d+) nranks (\d+) .*- (Init|Destroy) COMPLETE")
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
    """What became of a rank after its failure; of several the least counts."""

    FAILED = 0
    RESTARTED = 1  # The job was started again.
    WENT_ON = 2  # It caught the exception.


class RankFailure(NamedTuple):
    """A process of a job that failed."""

    cause: str  # ``CUDA error: an illegal memory access was encountered``.
    rank: int = -1  # -1 if unknown.
    name: str = "a rank"  # If its rank is unknown: ``task 13``, ``local rank 5``.
    host: str = ""
    pid: int = 0
    outcome: Outcome = Outcome.FAILED


class FailureReader:
    """Takes lines one by one; those of other programs do no harm."""

    def __init__(self) -> None:
        self._found: dict[object, RankFailure] = {}
        # By tag, failures whose last error stands in the next line.
        self.waiting: dict[str, object] = {}
        self._table_rank = -1  # In torchrun's table.
        self._num_seen = 0  # Signs of failures.
        self._seen: dict[object, int] = {}  # The last one's number, by failure.
        # Their number so far where a rank reports this, by size.
        self._complete: defaultdict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        # Ranks that write a traceback, and whether Python ignores its exception.
        self._in_traceback: dict[object, bool] = {}
        self._ignored: set[int] = set()  # Ranks whose next exception Python ignores.
        self.may_go_on: set[object] = set()  # Ranks that may have caught theirs.
        # The rank of the last line, and how many an exception's text may have.
        self._rank, self._num_more = -1, 0

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
            is_ignored = self._in_traceback.pop(key, None)
            if not is_ignored and (is_ignored is False or of_torch):
                self._add(key, f"{name.rpartition('.')[2]}: {text}")
                self._num_more = _MAX_TEXT
                if not of_torch or "OutOfMemory" in name:
                    self.may_go_on.add(key)
        elif match := _IN_WATCHDOG.search(line):
            self._add(_key(line), match[1])
        elif tag != line and _key(tag) in self._found:
            self.waiting[tag] = _key(tag)
        else:
            self._feed_end(line)

    def feed_nccl(self, text: str) -> None:
        """Read a message of NCCL's on the start or the end of a communicator."""
        if match := _COMPLETE.search(text):
            rank, size, word = match.groups()
            self._complete[word, int(size)][int(rank)] = self._num_seen

    def report(
        self,
        ranks: Collection[int] = (),
        hosts: Collection[str] = (),
        *,
        is_one_job: bool = True,
    ) -> tuple[RankFailure, ...]:
        """Return failures; those before all ``ranks`` ended as they should ended none.

        Neither did those of other hosts than the log's before all ranks started.
        """
        started, ended = (self._num_before(w, ranks) for w in ("Init", "Destroy"))
        for key, each in self._found.items():
            is_other = each.host and each.host not in hosts
            is_over = self._seen[key] <= (max(started, ended) if is_other else ended)
            if is_over and each.outcome is Outcome.FAILED:
                has_ended = each.pid or each.host or not is_one_job
                outcome = Outcome.RESTARTED if has_ended else Outcome.WENT_ON
                self._found[key] = each._replace(outcome=outcome)
        return tuple(self._found.values())

    def _num_before(self, word: str, ranks: Collection[int]) -> int:
        """Return how many signs of failures stand before this of each rank."""
        size = max((size for kind, size in self._complete if kind == word), default=0)
        nums = self._complete[word, size]
        is_whole = len(nums) == size > 0 or nums.keys() >= {*ranks} > set()
        return min(nums.values()) if is_whole else 0

    def _feed_own(self, line: str) -> None:
        """Find ranks that write more after an exception than its text."""
        if match := _TRACEBACK.search(line):
            rank, beginning = int(match[1]), match[2]
            if beginning == "Exception ignored":
                self._ignored.add(rank)
            elif beginning == "Traceback (":
                self._in_traceback[rank] = rank in self._ignored
                self._ignored.discard(rank)
            else:  # The log may begin within a traceback.
                self._in_traceback.setdefault(rank, False)
        match = _OWN.search(line)
        rank = int(match[1]) if match else -1
        self._num_more = self._num_more - 1 if rank == self._rank else 0
        self._rank = rank
        if rank in self.may_go_on and self._num_more <= 0 and not _RAISED.match(line):
            self.may_go_on.discard(rank)
            self._found[rank] = self._found[rank]._replace(outcome=Outcome.WENT_ON)

    def _feed_end(self, line: str) -> None:
        """Read what launchers report on the end of processes."""
        if match := _TABLE_RANK.search(line):
            self._table_rank = int(match[1])
        elif match := _EXIT.search(line):
            self._exited(int(match[1]), match[2], int(match[3]))
        elif "attempts left; will restart worker group" in line:
            for key, each in self._found.items():
                if each.outcome is Outcome.FAILED:
                    self._found[key] = each._replace(outcome=Outcome.RESTARTED)
        elif match := _TASK.search(line):
            host, task, state, rank, place, end = match.groups()
            key = int(rank) if rank else (host, task)
            self._add(key, state or end, task or "", host or place)

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
    """Return the rank in a tag, or the tag."""
    match = _RANK.search(tag)
    return int(next(filter(None, match.groups()))) if match else tag
