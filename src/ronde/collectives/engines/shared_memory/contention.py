"""Whether other programs want the cores: then whoever waits had better sleep.

Note [Yield or sleep]
    Where every rank has a core, or ranks share cores among themselves, an answer comes
    within microseconds, and to look for it, yielding the core in between, is quicker
    than to sleep. Beside programs that compute, a yield may hand one of them the core
    for tens of milliseconds, and looking uses up this process's share of the core; who
    sleeps takes no share, and gets the core at once when it is woken. So the number of
    threads that want to run now is read from time to time, which takes 10 us: with more
    than there are cores, and more than there are ranks, all waits sleep at once.
"""

import os
import time

from ronde.collectives.engines.shared_memory.futex import sched_yield

_LOOK_EVERY_S = 0.01
_LATE_S = 0.0005
"""A yield that takes so long: another program had the core. Ranks take less in turn."""

_now = time.monotonic


class Contention:
    """What the waits of this process know of other programs; any thread may call."""

    def __init__(self) -> None:
        self._num_expected = os.cpu_count() or 1
        self._is_seen = False
        self._look_at_s = 0.0

    def expect(self, num_ranks: int) -> None:
        """Take so many threads that want to run for this job's own."""
        self._num_expected = max(self._num_expected, num_ranks)

    def num_looks(self, most: int) -> int:
        """Return how often a wait that begins now should look before it sleeps."""
        now = _now()
        if now >= self._look_at_s:
            self._look_at_s = now + _LOOK_EVERY_S
            self._is_seen = _num_runnable() > self._num_expected
        return 0 if self._is_seen else most

    def pause(self) -> bool:
        """Let others run between two looks; say whether to look on."""
        begun = _now()
        sched_yield()
        if _now() - begun < _LATE_S:
            return True
        self._look_at_s = 0.0
        return False


def _num_runnable() -> int:
    """Return how many threads of this machine run or want to; 0 where it is unknown."""
    try:
        file = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return int(os.read(file, 128).split()[3].partition(b"/")[0])
    except (OSError, ValueError, IndexError):
        return 0
    finally:
        os.close(file)


CONTENTION = Contention()
"""Of this process."""
