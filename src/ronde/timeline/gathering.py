"""Clock comparison, and transfer of the ranks' records to rank 0, through a store.

All waits have a timeout. A rank that has ended or records nothing is left out.
"""

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, Protocol

from ronde.timeline.alignment import ClockReading, bound_offset
from ronde.timeline.events import ClockBound

NUM_EXCHANGES = 32
CHUNK_BYTES = 1 << 20  # a store accepts 8 MiB at once
_SLICE_S = 0.1  # part of a wait, after which closing is checked

_logger = logging.getLogger("ronde")


class SharedStore(Protocol):
    """The methods of ``torch.distributed.Store`` that a timeline uses."""

    def set(self, key: str, value: bytes, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    # Raises RuntimeError at the timeout.
    def wait(self, keys: list[str], timeout: timedelta, /) -> object: ...
    def delete_key(self, key: str, /) -> bool: ...


class GatheringOptions(NamedTuple):
    """Timeouts of waits for other ranks, and the clock to compare."""

    start_s: float = 30.0  # for the first comparison of clocks
    exchange_s: float = 1.0  # for each later exchange of times
    end_s: float = 5.0  # for the last comparison, and for each rank's records
    hand_in_s: float = 2.0  # until rank 0 has read this rank's records
    now_ns: Callable[[], int] = time.monotonic_ns


USUAL = GatheringOptions()


class Gathering:
    """One rank's side of the clock comparison and of the transfer of records.

    After ``start``, only one thread may call the other methods.
    """

    def __init__(
        self,
        store: SharedStore,
        rank: int,
        size: int,
        *,
        clock: str,
        on_bound: Callable[[ClockBound], None],
        options: GatheringOptions = USUAL,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._clock = clock
        self._on_bound = on_bound
        self._options = options
        self._is_leader = False  # leads ranks whose clock is not rank 0's
        self._closing = threading.Event()
        name = "ronde-timeline-clocks"
        self._thread = threading.Thread(target=self._start, name=name, daemon=True)

    def start(self) -> None:
        """Announce that this rank records, and compare clocks in a thread."""
        self._store.set(f"clock/{self._rank}", self._clock.encode())
        self._thread.start()

    def stop(self) -> None:
        self._closing.set()
        self._thread.join()

    def compare_again(self) -> None:
        self.stop()
        self._closing.clear()
        self._compare("end", time.monotonic() + self._options.end_s)

    def hand_in(self, part: bytes) -> bool:
        """Send this rank's records; return False if rank 0 does not read them soon."""
        starts = range(0, len(part), CHUNK_BYTES)
        for number, at in enumerate(starts):
            chunk = part[at : at + CHUNK_BYTES]
            self._store.set(f"part/{self._rank}/{number}", chunk)
        self._store.set(f"part/{self._rank}", str(len(starts)).encode())
        limit_s = self._options.hand_in_s
        # A single wait without slices, as rank 0 may end once it has answered.
        try:
            self._store.wait([f"taken/{self._rank}"], timedelta(seconds=limit_s))
        except RuntimeError:
            return self._store.check([f"taken/{self._rank}"])
        return True

    def collect(self) -> tuple[dict[int, bytes], list[int]]:
        """Return the other ranks' records, and the ranks that sent none in time."""
        parts: dict[int, bytes] = {}
        missing: list[int] = []
        deadline = time.monotonic() + self._options.end_s
        for rank in self._announced():
            if rank == 0:
                continue
            if not self._wait([f"part/{rank}"], deadline):
                missing.append(rank)
                continue
            deadline = time.monotonic() + self._options.end_s
            count = int(self._pop(f"part/{rank}"))
            chunks = (self._pop(f"part/{rank}/{number}") for number in range(count))
            parts[rank] = b"".join(chunks)
            self._store.set(f"taken/{rank}", b"")
        # A reply to this request shows that the previous answers were sent.
        self._store.check(["clock/0"])
        return parts, missing

    def _start(self) -> None:
        deadline = time.monotonic() + self._options.start_s
        try:
            if self._rank == 0:
                self._wait([f"clock/{rank}" for rank in range(self._size)], deadline)
            elif self._wait(["clock/0"], deadline):
                is_foreign = self._store.get("clock/0").decode() != self._clock
                if is_foreign and self._store.add(f"leader/{self._clock}", 1) == 1:
                    self._is_leader = True
            self._compare("start", deadline)
        except RuntimeError as error:
            if self._closing.is_set():  # as other ranks may have ended
                return
            _logger.warning(
                "cannot compare the hosts' clocks for the timeline: %s. Its times are "
                "aligned by the hosts' time of day instead.",
                error,
            )

    def _announced(self) -> list[int]:
        everyone = list(range(self._size))
        if self._store.check([f"clock/{rank}" for rank in everyone]):
            return everyone
        return [rank for rank in everyone if self._store.check([f"clock/{rank}"])]

    def _compare(self, phase: str, deadline: float) -> None:
        if self._is_leader:
            self._measure(f"{phase}/{self._clock}", deadline)
        elif self._rank == 0:
            clocks = {self._store.get(f"clock/{rank}") for rank in self._announced()}
            for clock in sorted(each.decode() for each in clocks):
                if clock != self._clock:
                    self._answer(f"{phase}/{clock}", deadline)

    def _answer(self, topic: str, deadline: float) -> None:
        """Send this rank's time to the leader of another clock's ranks when it asks."""
        for number in range(NUM_EXCHANGES):
            if not self._wait([f"ask/{topic}/{number}"], deadline):
                break
            now = str(self._options.now_ns()).encode()
            self._store.set(f"answer/{topic}/{number}", now)
            self._store.delete_key(f"ask/{topic}/{number}")
            deadline = time.monotonic() + self._options.exchange_s

    def _measure(self, topic: str, deadline: float) -> None:
        exchanges: list[ClockReading] = []
        for number in range(NUM_EXCHANGES):
            asked_ns = self._options.now_ns()
            self._store.set(f"ask/{topic}/{number}", b"")
            if not self._wait([f"answer/{topic}/{number}"], deadline):
                break
            answered_ns = self._options.now_ns()
            answer_ns = int(self._pop(f"answer/{topic}/{number}"))
            exchanges.append(ClockReading(asked_ns, answer_ns, answered_ns))
            deadline = time.monotonic() + self._options.exchange_s
        if len(exchanges) > 1:
            # The first exchange included the wait until rank 0 was ready.
            self._on_bound(bound_offset(exchanges[1:]))

    def _pop(self, key: str) -> bytes:
        value = self._store.get(key)
        self._store.delete_key(key)
        return value

    def _wait(self, keys: list[str], deadline: float) -> bool:
        """Wait for keys; return False at the deadline or when closed."""
        while not self._closing.is_set():
            left_s = min(deadline - time.monotonic(), _SLICE_S)
            if left_s <= 0:
                return self._store.check(keys)
            try:
                self._store.wait(keys, timedelta(seconds=left_s))
            except RuntimeError:
                self._store.check(keys[:1])  # raises if the store has ended
            else:
                return True
        return False
