"""What a process holds, as the kernel counts it, and what an error holds."""

import os
import time
import traceback
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
    thread is given a core once more: hence the least count of half a second.
    """
    end = time.monotonic() + 0.5
    counts = [_count()]
    while time.monotonic() < end:
        counts.append(_count())
        os.sched_yield()
    return min(counts)


def _count() -> tuple[int, int]:
    return (
        len(list(Path("/proc/self/fd").iterdir())),
        len(list(Path("/proc/self/task").iterdir())),
    )
