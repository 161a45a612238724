"""A barrier that says who did not come, without the connections of the ranks."""

import time
from datetime import timedelta

from torch.distributed import Store

from ronde.collectives.engine import ErrorContext
from ronde.errors import CollectiveError
from ronde.process_group.works import BackendError

_PASSED = "passed"
_SLACK = timedelta(seconds=5)  # for rank 0's verdict
_VERDICT = "verdict"


class MonitoredBarrier:
    """One such barrier, at a store that is empty under the keys used here."""

    def __init__(self, store: Store, rank: int, size: int, limit: timedelta) -> None:
        self._store, self._rank, self._size, self._limit = store, rank, size, limit

    def run(self, *, is_complete: bool) -> None:
        """Wait for all ranks; where ``is_complete`` rank 0 names all who are absent."""
        if self._rank != 0:
            self._store.set(str(self._rank), _PASSED)
            self._await_verdict()
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
        self._store.set(_VERDICT, problem or _PASSED)
        if problem:
            raise BackendError(f"{problem} See which of them hangs, or has ended.")

    def _find_absent(self, *, is_complete: bool) -> list[int]:
        absent: list[int] = []
        until_s = time.monotonic() + self._limit.total_seconds()
        for rank in range(1, self._size):
            left_s = max(until_s - time.monotonic(), 0.001)
            if absent and not is_complete:
                break
            if not self._comes(str(rank), timedelta(seconds=left_s)):
                absent.append(rank)
        return absent

    def _comes(self, key: str, limit: timedelta) -> bool:
        """Return whether a key is set in time."""
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

    def _await_verdict(self) -> None:
        is_there = self._comes(_VERDICT, self._limit + _SLACK)
        verdict = self._store.get(_VERDICT).decode() if is_there else "rank 0 is late."
        if verdict != _PASSED:
            raise BackendError(
                f"Rank {self._rank} successfully reached monitoredBarrier, but "
                f"received errors while waiting for send/recv from rank 0: {verdict}"
            )
