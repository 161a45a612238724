"""Which of the other processes still run, read off ``/proc``."""

from dataclasses import dataclass, field
from pathlib import Path

_ENDED = "ZX"
_STOPPED = "T"
_IS_STOPPED_AFTER = 4
"""Looks in a row that must find a process stopped: a whole job may have been stopped
and be just going on, one rank before the other."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that no later one is taken for: its number and when it started."""

    pid: int
    started_at: int

    @classmethod
    def of(cls, pid: int) -> "Process":
        """Describe a process of this machine that runs now."""
        return cls(pid, int(_stat(pid)[19]))


@dataclass(slots=True)
class Peers:
    """All ranks' processes, in rank order."""

    processes: list[Process]
    _num_stopped: dict[int, int] = field(default_factory=dict[int, int])

    def find_loss(self, rank: int) -> str:
        """Say what is wrong with a rank's process; nothing where it runs.

        To be called a few times a second while waiting for it.
        """
        process = self.processes[rank]
        name = f"rank {rank}, process {process.pid},"
        try:
            state, *fields = _stat(process.pid)
            is_gone = int(fields[18]) != process.started_at or state in _ENDED
        except OSError:
            state, is_gone = "", True
        if is_gone:
            return f"{name} ended"
        if state not in _STOPPED:
            self._num_stopped.pop(rank, None)
            return ""
        count = self._num_stopped[rank] = self._num_stopped.get(rank, 0) + 1
        if count < _IS_STOPPED_AFTER:
            return ""
        return f"{name} is stopped; kill -CONT {process.pid} lets it go on"


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/pid/stat`` from the state, the third, on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
