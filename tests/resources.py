"""What a process holds, as the kernel counts it, and what an error holds."""

import time
import traceback
from collections.abc import Callable
from pathlib import Path


def num_frames(error: BaseException | None) -> int:
    """Return how many frames an error and its causes keep alive."""
    if error is None:
        return 0
    own = sum(1 for _ in traceback.walk_tb(error.__traceback__))
    return own + num_frames(error.__cause__)


def least_resources() -> tuple[int, int]:
    """Return how many descriptors and threads this process holds.

    A thread is joined before the kernel takes it off the list, which it does when the
    thread is given a core once more: hence the least of many counts, between which this
    thread gives up its own.
    """
    counts = [_count()]
    for _ in range(25):
        time.sleep(0.02)
        counts.append(_count())
    return min(counts)


def least_when_idle(wait: Callable[[], object]) -> float:
    """Return the processor time that waiting takes: the least of three times.

    What goes on for as long as one waits, it costs each time; what a start left over,
    or a machine with much to do, it does not.
    """
    used = []
    for _ in range(3):
        begun_s = time.process_time()
        wait()
        used.append(time.process_time() - begun_s)
        if used[-1] < 0.01:
            break
    return min(used)


def _count() -> tuple[int, int]:
    return (
        len(list(Path("/proc/self/fd").iterdir())),
        len(list(Path("/proc/self/task").iterdir())),
    )
