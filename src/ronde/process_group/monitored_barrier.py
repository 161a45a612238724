"""A barrier over the group's store, with absent ranks named in its error."""

import time
from datetime import timedelta

from torch.distributed import Store

from ronde.collectives.engine import ErrorContext
from ronde.errors import CollectiveError
from ronde.process_group.works import BackendError

_PASSED = "passed"
_SLACK = timedelta(seconds=5)  # extra time for rank 0's result
_RESULT = "result"


class MonitoredBarrier:
    """A single monitored barrier, over a store that only it uses."""

    def __init__(self, store: Store, rank: int, size: int, limit: timedelta) -> None:
        self._store, self._rank, self._size, self._limit = store, rank, size, limit

    def run(self, *, is_complete: bool) -> None:
        """Wait for all ranks; rank 0's error names all absent ranks or only one."""
        if self._rank != 0:
            self._store.set(str(self._rank), _PASSED)
            self._await_result()
            return
        limit_ms = round(self._limit.total_seconds() * 1e3)
        failed = "failed to pass monitoredBarrier"
        problem = ""
        if not self._limit:
            problem = f"Rank 0 timed out in monitoredBarrier after {limit_ms} ms."
        elif absent := self._find_absent(is_complete=is_complete):
            word = "Rank" if len(absent) == 1 else "Ranks"
            ranks = f"{word} {', '.join(map(str, absent))}"
            problem = f"{ranks} {failed} in {limit_ms} ms."
        self._store.set(_RESULT, problem or _PASSED)
        if problem:
            raise BackendError(f"{problem} See which of them hangs, or has ended.")

    def _find_absent(self, *, is_complete: bool) -> list[int]:
        absent: list[int] = []
        until_s = time.monotonic() + self._limit.total_seconds()
        for rank in range(1, self._size):
            left_s = max(until_s - time.monotonic(), 0.001)
            if absent and not is_complete:
                break
            if not self._is_set(str(rank), timedelta(seconds=left_s)):
                absent.append(rank)
        return absent

    def _is_set(self, key: str, limit: timedelta) -> bool:
        """Wait for a key; return True if it is set in time."""
        context = ErrorContext(
            "monitored_barrier", self._rank, self._size, limit.total_seconds()
        )
        if self._store.check([key]):
            return True
        try:
            with context:
                self._store.wait([key], limit)
        except CollectiveError:
            return self._store.check([key])
        return True

    def _await_result(self) -> None:
        is_there = self._is_set(_RESULT, self._limit + _SLACK)
        result = self._store.get(_RESULT).decode() if is_there else "rank 0 is late."
        if result != _PASSED:
            raise BackendError(
                f"Rank {self._rank} successfully reached monitoredBarrier, but "
                f"received errors while waiting for send/recv from rank 0: {result}"
            )
