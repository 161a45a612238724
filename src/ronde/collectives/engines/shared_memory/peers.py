"""Which of the other processes still run, read off ``/proc``."""

import os
from pathlib import Path
from typing import NamedTuple

_ENDED = "ZX"
_STOPPED = "T"
_IS_STOPPED_AFTER = 4
"""Looks in a row that must find a process stopped: a whole job may have been stopped
and be just going on, one rank before the other."""


class PeerProcess(NamedTuple):
    """A process, identified also by its start time: a pid may be used again."""

    pid: int
    started_at: int
    """In clock ticks since boot."""
    cores: int
    """A bit for each core that it may use."""

    @classmethod
    def of(cls, pid: int) -> "PeerProcess":
        cores = sum(1 << core for core in os.sched_getaffinity(pid))
        return cls(pid, int(_stat(pid)[19]), cores)

    def encode(self) -> bytes:
        return f"{self.pid} {self.started_at} {self.cores:x}".encode()

    @classmethod
    def decode(cls, text: bytes) -> "PeerProcess":
        pid, started_at, cores = text.split()
        return cls(int(pid), int(started_at), int(cores, 16))

    def state(self) -> str:
        """Return its state as ``/proc`` has it, a letter; nothing once it ended."""
        try:
            state, *fields = _stat(self.pid)
        except OSError:
            return ""
        is_gone = int(fields[18]) != self.started_at or state in _ENDED
        return "" if is_gone else state


class Peers:
    """All ranks' processes, in rank order."""

    def __init__(self, processes: list[PeerProcess]) -> None:
        self.processes = processes
        self._num_stopped: dict[int, int] = {}

    @property
    def is_crowded(self) -> bool:
        """Whether there are fewer cores than ranks."""
        cores = 0
        for process in self.processes:
            cores |= process.cores
        return cores.bit_count() < len(self.processes)

    def find_loss(self, rank: int) -> str:
        """Return what is wrong with a rank's process; nothing where it runs.

        To be called a few times a second while waiting for it.
        """
        process = self.processes[rank]
        name = f"rank {rank}, process {process.pid},"
        state = process.state()
        if not state:
            return f"{name} ended"
        if state not in _STOPPED:
            self._num_stopped.pop(rank, None)
            return ""
        count = self._num_stopped[rank] = self._num_stopped.get(rank, 0) + 1
        if count < _IS_STOPPED_AFTER:
            return ""
        return f"{name} is stopped; kill -CONT {process.pid} lets it go on"


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
