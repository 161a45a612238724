"""Ranks that failed, from the words of Python, torch, torchrun, srun and mpirun."""

import re
import signal
from typing import NamedTuple

_MAX_KEPT = 1 << 12
_MAX_CAUSE = 160
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


class RankFailure(NamedTuple):
    """A process of a job that failed."""

    cause: str  # ``CUDA error: an illegal memory access was encountered``.
    rank: int = -1  # -1 if unknown.
    name: str = "a rank"  # If its rank is unknown: ``task 13``, ``local rank 5``.
    host: str = ""
    pid: int = 0


class FailureReader:
    """Takes lines one by one; those of other programs do no harm."""

    def __init__(self) -> None:
        self._found: dict[object, RankFailure] = {}
        # By tag, failures whose last error stands in the next line.
        self.waiting: dict[str, object] = {}
        self._table_rank = -1  # In torchrun's table.

    def feed(self, line: str) -> None:
        line = line.rstrip()
        for tag in [tag for tag in self.waiting if line.startswith(tag)]:
            key = self.waiting.pop(tag)
            cause = f"{self._found[key].cause}: {line.removeprefix(tag).strip()}"
            self._found[key] = self._found[key]._replace(cause=cause[:_MAX_CAUSE])
        tag = line.removesuffix("Last error:")
        if match := _RAISED.match(line):
            tag, name, text = match.groups()
            if "[rank" in tag or _OF_TORCH.search(f"{name}: {text}"):
                self._add(_key(tag), f"{name.rpartition('.')[2]}: {text}")
        elif match := _IN_WATCHDOG.search(line):
            self._add(_key(line), match[1])
        elif tag != line and _key(tag) in self._found:
            self.waiting[tag] = _key(tag)
        elif match := _TABLE_RANK.search(line):
            self._table_rank = int(match[1])
        elif match := _EXIT.search(line):
            self._exited(int(match[1]), match[2], int(match[3]))
        elif match := _TASK.search(line):
            host, task, state, rank, place, end = match.groups()
            key = int(rank) if rank else (host, task)
            self._add(key, state or end, task or "", host or place)

    def report(self) -> tuple[RankFailure, ...]:
        return tuple(self._found.values())

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
            self._found.setdefault(key, RankFailure(cause, rank, name, host, pid))


def _key(tag: str) -> int | str:
    """Return the rank in a tag, or the tag."""
    match = _RANK.search(tag)
    return int(next(filter(None, match.groups()))) if match else tag
