"""Where each rank is: the stacks of its Python, asked for from outside and at any time.

Note [Stacks]: an agent gives each rank the path of a file in memory, and a start-up
module on its ``PYTHONPATH`` (``startup/sitecustomize.py``) that has ``faulthandler``
write all stacks there on one signal. That works in a call into C too, and while another
thread holds the interpreter. Nobody is signalled who does not hold that file open and
catch that signal: of others the state in the kernel is told.
"""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ronde.launch.lineage import (
    Process,
    descendants,
    read_process,
    read_processes,
    signal_process,
)
from ronde.launch.messages import ProcessStack, Stacks

ANSWER_S = 5.0
"""What the agents of a job have to answer in."""

_SIGNAL = signal.SIGRTMAX - 4
_DIRECTORY = Path(__file__).parent / "startup"
_PROCESS_S = 1.0
_RANK_S = 4.0
_POLL_S = 0.005
_MAX_PROCESSES = 16
_MAX_TEXT_BYTES = 64 << 10


class _Signals(NamedTuple):
    """What is known of the signal in one process, and in which threads."""

    blocked_in: frozenset[str]
    is_pending: bool
    is_caught: bool


class StackTaker:
    """Takes the stacks of one agent's ranks; a part of its loop."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._asked: dict[int, _Asked] = {}

    @property
    def due_s(self) -> float:
        """When ``take`` must be called at the latest, on the monotonic clock."""
        return time.monotonic() + _POLL_S if self._asked else float("inf")

    def environment(self, rank: int, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables by which a rank can be asked.

        Args:
            rank: Its number.
            env: What it has besides.
        """
        try:
            fd = self._files[rank] = os.memfd_create("ronde-stacks", os.MFD_CLOEXEC)
        except OSError:
            return {}
        # Those of a launcher around this one, or of the host that this came from.
        place = _DIRECTORY.parts[-3:]
        paths = env.get("PYTHONPATH", "").split(os.pathsep)
        others = [path for path in paths if path and Path(path).parts[-3:] != place]
        return {
            "RONDE_STACKS": f"{_SIGNAL},/proc/{os.getpid()}/fd/{fd}",
            "PYTHONPATH": os.pathsep.join([str(_DIRECTORY), *others]),
        }

    def ask(self, pids: Mapping[int, int]) -> None:
        """Ask ranks where they are.

        Args:
            pids: The process of each rank that runs.
        """
        table = read_processes()
        for rank, pid in pids.items():
            if rank not in self._asked and pid in table:
                processes = [table[pid], *descendants(pid, table=table)]
                self._asked[rank] = _Asked(processes, self._files.get(rank))

    def take(self) -> list[Stacks]:
        """Return what those say that have told all; call it again when it is due."""
        told = [
            Stacks(rank, tuple(asked.told))
            for rank, asked in self._asked.items()
            if asked.is_over()
        ]
        for each in told:
            del self._asked[each.rank]
        return told

    def close(self) -> None:
        """Forget the ranks, which have ended."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        self._asked.clear()


class _Asked:
    """One rank that was asked: its processes one after the other."""

    def __init__(self, processes: Sequence[Process], fd: int | None) -> None:
        self.told: list[ProcessStack] = []
        self._fd = fd
        self._waiting = [p for p in processes if not p.is_zombie][:_MAX_PROCESSES]
        self._now: Process | None = None
        self._before = _Signals(frozenset(), is_pending=False, is_caught=False)
        self._ends_at_s = time.monotonic() + _RANK_S
        self._due_s = 0.0

    def is_over(self) -> bool:
        """Go on as far as it goes now; True when there is no more to come."""
        while self._now is not None or self._waiting:
            if self._now is None:
                self._begin(self._waiting.pop(0))
            elif self._has_answered() or time.monotonic() > self._due_s:
                self._end(self._now)
            else:
                return False
        return True

    def _begin(self, process: Process) -> None:
        now_s = time.monotonic()
        self._before = _read_signals(process.pid)
        # Both: by default the signal would end a process.
        can_answer = self._before.is_caught and self._holds_file(process.pid)
        if not can_answer or now_s > self._ends_at_s or self._fd is None:
            self._tell(process, "")
            return
        os.ftruncate(self._fd, 0)
        self._now, self._due_s = process, now_s + _PROCESS_S
        signal_process(process, _SIGNAL)

    def _has_answered(self) -> bool:
        """Whether the handler has run to its end: it blocks its own signal."""
        if self._now is None or self._fd is None or not os.fstat(self._fd).st_size:
            return False
        signals = _read_signals(self._now.pid)
        return not signals.is_pending and signals.blocked_in <= self._before.blocked_in

    def _end(self, process: Process) -> None:
        text = ""
        if self._fd is not None:
            text = os.pread(self._fd, _MAX_TEXT_BYTES, 0).decode(errors="replace")
        self._now = None
        self._tell(process, text)

    def _tell(self, process: Process, text: str) -> None:
        state = "" if text else _state(process.pid)
        self.told.append(ProcessStack(process.pid, process.name, state, text))

    def _holds_file(self, pid: int) -> bool:
        if self._fd is None:
            return False
        wanted = os.fstat(self._fd)
        try:
            return any(
                os.path.samestat(wanted, each.stat())
                for each in Path(f"/proc/{pid}/fd").iterdir()
            )
        except OSError:
            return False


def _read_signals(pid: int) -> _Signals:
    """Return what the kernel says of our signal in all threads of a process."""
    bit = 1 << (_SIGNAL - 1)
    blocked_in: set[str] = set()
    is_pending = is_caught = False
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            fields = dict(
                line.split(":\t", 1)
                for line in (task / "status").read_text(errors="replace").splitlines()
                if line.startswith(("Sig", "ShdPnd"))
            )
            masks = {name: int(fields[name], 16) & bit for name in _MASKS}
            if masks["SigBlk"]:
                blocked_in.add(task.name)
            is_pending |= bool(masks["SigPnd"] or masks["ShdPnd"])
            is_caught |= bool(masks["SigCgt"])
    except (OSError, ValueError, KeyError):
        # It ends meanwhile: nothing is known, and nothing is waited for.
        return _Signals(frozenset(blocked_in), is_pending=False, is_caught=False)
    return _Signals(frozenset(blocked_in), is_pending, is_caught)


_MASKS = ("SigBlk", "SigPnd", "ShdPnd", "SigCgt")
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits in the kernel, not to be interrupted",
    "T": "is stopped",
    "t": "is traced",
    "Z": "has ended",
    "X": "has ended",
}


def _state(pid: int) -> str:
    """Say in a few words what the kernel says of a process."""
    process = read_process(pid)
    if process is None:
        return "has ended"
    try:
        place = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        place = ""
    where = f" in {place}" if place not in ("", "0") else ""
    return _STATES.get(process.state, process.state) + where
