"""The start and end of each process of a job, on all hosts of this machine."""

import os
import select
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MARK = "RONDE_BENCHMARK"
"""Variable by which a job's processes are known."""

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""The resolution of a process's start time."""

_POLL_MS = 10
_YOUNG_S = 5.0
_EPOCH = "RONDE_EPOCH="


def now_s() -> float:
    """Return the time since boot, the clock of ``/proc`` and of all ranks."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class Life:
    """One process of a job.

    Attributes:
        pid: Its number, as seen from here.
        epoch: Its generation.
        rank: Its rank, or its parent's.
        begun_s: When it was forked, to the tick below.
        ended_s: When it was seen to have ended; infinity while it lives.
    """

    pid: int
    epoch: int
    rank: int
    begun_s: float
    ended_s: float = float("inf")


class Observer:
    """Sees all processes that carry a mark and a generation, on all hosts.

    The kernel reports an end at once; new ones are looked for all the time.
    """

    def __init__(self, mark: str) -> None:
        self.lives: list[Life] = []
        self._mark = f"{MARK}={mark}"
        self._others: dict[str, float] = {}
        self._open: dict[int, Life] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @contextmanager
    def watching(self) -> Generator[None]:
        """Watch, until the block is left."""
        self._thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            self._thread.join()
            for fd in self._open:
                os.close(fd)

    def find(self, epoch: int, rank: int) -> int:
        """Return the number of a rank's first process."""
        of_rank = [o for o in self.lives if (o.epoch, o.rank) == (epoch, rank)]
        return min(of_rank, key=lambda life: (life.begun_s, life.pid)).pid

    def _run(self) -> None:
        poll = select.poll()
        while not self._is_over.is_set():
            self._note_ends(poll, _POLL_MS)
            known = {str(life.pid) for life in self._open.values()}
            for name in sorted(path.name for path in Path("/proc").glob("[0-9]*")):
                # Looking through all of them takes longer than a generation's change.
                self._note_ends(poll, 0)
                if name not in known and (found := self._look(name)) is not None:
                    fd, life = found
                    self._open[fd] = life
                    self.lives.append(life)
                    poll.register(fd, select.POLLIN)

    def _note_ends(self, poll: select.poll, timeout_ms: int) -> None:
        for fd, _ in poll.poll(timeout_ms):
            self._open.pop(fd).ended_s = now_s()
            poll.unregister(fd)
            os.close(fd)

    def _look(self, name: str) -> tuple[int, Life] | None:
        """Return a process of the job; others are looked at while they are young."""
        if self._others.get(name, float("inf")) < now_s() - _YOUNG_S:
            return None
        try:
            fd = os.pidfd_open(int(name))
        except OSError:
            return None
        life = self._read(name)
        if life is None:
            self._others.setdefault(name, now_s())
            os.close(fd)
            return None
        return fd, life

    def _read(self, name: str) -> Life | None:
        folder = Path("/proc") / name
        try:
            environ = (folder / "environ").read_bytes().decode(errors="replace")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        entries = environ.split("\0")
        epochs = [e.split("=")[1] for e in entries if e.startswith(_EPOCH)]
        ranks = [e.split("=")[1] for e in entries if e.startswith("RANK=")]
        if self._mark not in entries or not epochs or not ranks:
            return None
        return Life(int(name), int(epochs[0]), int(ranks[0]), int(fields[19]) * TICK_S)
