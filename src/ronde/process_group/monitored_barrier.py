"""A barrier over the group's store that names absent ranks in its error."""

import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store

from ronde.process_group.works import BackendError

_PASSED = "passed"
_SLACK = timedelta(seconds=5)  # extra time for rank 0's result
_RESULT = "result"


def monitored_barrier(
    store: Store, rank: int, size: int, limit: timedelta, *, is_complete: bool
) -> None:
    """Wait for all ranks, over a store that only this barrier uses.

    Rank 0's error names one absent rank, or with ``is_complete`` all of them.
    """
    if rank != 0:
        store.set(str(rank), _PASSED)
        is_there = _is_set(store, _RESULT, limit + _SLACK)
        result = store.get(_RESULT).decode() if is_there else "rank 0 is late."
        if result != _PASSED:
            raise BackendError(
                f"Rank {rank} successfully reached monitoredBarrier, but received "
                f"errors while waiting for send/recv from rank 0: {result}"
            )
        return
    limit_ms = round(limit.total_seconds() * 1e3)
    problem = ""
    if not limit:
        problem = f"Rank 0 timed out in monitoredBarrier after {limit_ms} ms."
    elif absent := _find_absent(store, size, limit, is_complete=is_complete):
        ranks = f"Rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        problem = f"{ranks} failed to pass monitoredBarrier in {limit_ms} ms."
    store.set(_RESULT, problem or _PASSED)
    if problem:
        raise BackendError(f"{problem} Check whether they hang or have ended.")


def _find_absent(
    store: Store, size: int, limit: timedelta, *, is_complete: bool
) -> list[int]:
    absent: list[int] = []
    until_s = time.monotonic() + limit.total_seconds()
    for rank in range(1, size):
        left_s = max(until_s - time.monotonic(), 0.001)
        if not _is_set(store, str(rank), timedelta(seconds=left_s)):
            absent.append(rank)
            if not is_complete:
                break
    return absent


def _is_set(store: Store, key: str, limit: timedelta) -> bool:
    with suppress(RuntimeError):  # timed out
        store.wait([key], limit)
    return store.check([key])
