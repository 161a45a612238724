"""Ranks compare their clocks and hand their records to rank 0, through a store.

No rank waits for long: one that does not take part, because it is gone or never began
a timeline, is left out when its time is up.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

from ronde.timeline.alignment import ClockReading, bound_offset
from ronde.timeline.events import ClockBound

NUM_EXCHANGES = 32
CHUNK_BYTES = 1 << 20  # a store takes 8 MiB at once
_LOOK_S = 1.0  # how long to wait before looking whether this rank closes
_POLL_S = 0.01

_logger = logging.getLogger("ronde")


class SharedStore(Protocol):
    """What is needed of ``torch.distributed.Store``."""

    def set(self, key: str, value: bytes, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    # A RuntimeError when the time is up.
    def wait(self, keys: list[str], timeout: timedelta, /) -> object: ...
    def delete_key(self, key: str, /) -> bool: ...


class GatheringOptions(NamedTuple):
    """How long a rank waits for others that have begun a timeline, and its clock."""

    start_s: float = 30.0  # to compare clocks with
    exchange_s: float = 1.0  # each exchange of times but the first
    end_s: float = 5.0  # to compare clocks with again, or to hand in their records
    take_s: float = 2.0  # until rank 0 has taken its records
    now_ns: Callable[[], int] = time.monotonic_ns


USUAL = GatheringOptions()


class Gathering:
    """One rank's end of one recording of all ranks.

    The methods after ``start`` are called by one thread.
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
        self._is_leader = False
        self._closing = threading.Event()
        name = "ronde-timeline-clocks"
        self._thread = threading.Thread(target=self._compare, name=name, daemon=True)

    def start(self) -> None:
        """Announce that this rank records, and compare the clocks in a thread."""
        self._store.set(f"clock/{self._rank}", self._clock.encode())
        self._thread.start()

    def stop(self) -> None:
        self._closing.set()
        self._thread.join()

    def compare_again(self) -> None:
        self.stop()
        self._closing.clear()
        deadline = time.monotonic() + self._options.end_s
        if self._rank == 0:
            self._serve("end", self._foreign_clocks(self._announced()), deadline)
        elif self._is_leader:
            self._measure("end", deadline)

    def hand_in(self, part: bytes) -> bool:
        """Give rank 0 this rank's records; on any other rank."""
        starts = range(0, len(part), CHUNK_BYTES)
        for number, at in enumerate(starts):
            chunk = part[at : at + CHUNK_BYTES]
            self._store.set(f"part/{self._rank}/{number}", chunk)
        self._store.set(f"part/{self._rank}", str(len(starts)).encode())
        limit_s = self._options.take_s
        # One wait and no questions: rank 0 may end as soon as it has answered.
        try:
            self._store.wait([f"taken/{self._rank}"], timedelta(seconds=limit_s))
        except RuntimeError:
            return self._store.check([f"taken/{self._rank}"])
        return True

    def collect(self) -> tuple[dict[int, bytes], list[int]]:
        """Take the other ranks' records; on rank 0."""
        parts: dict[int, bytes] = {}
        missing: list[int] = []
        deadline = time.monotonic() + self._options.end_s
        for rank in self._announced():
            if rank == 0:
                continue
            if not self._wait_for([f"part/{rank}"], deadline):
                missing.append(rank)
                continue
            deadline = time.monotonic() + self._options.end_s
            count = int(self._take(f"part/{rank}"))
            chunks = (self._take(f"part/{rank}/{number}") for number in range(count))
            parts[rank] = b"".join(chunks)
            self._store.set(f"taken/{rank}", b"")
        # An answer to this shows that those before it are out.
        self._store.check(["clock/0"])
        return parts, missing

    def _compare(self) -> None:
        """Compare the clocks at the start; the thread."""
        deadline = time.monotonic() + self._options.start_s
        try:
            if self._rank == 0:
                self._wait_for([f"clock/{r}" for r in range(self._size)], deadline)
                self._serve("start", self._foreign_clocks(self._announced()), deadline)
            elif self._wait_for(["clock/0"], deadline):
                is_own = self._store.get("clock/0").decode() == self._clock
                if not is_own and self._store.add(f"leader/{self._clock}", 1) == 1:
                    self._is_leader = True
                    self._measure("start", deadline)
        except RuntimeError as error:
            if self._closing.is_set():  # as other ranks may be gone
                return
            _logger.warning(
                "the clocks of the timeline cannot be compared: %s. Hosts are aligned "
                "by their time of day.",
                error,
            )

    def _announced(self) -> list[int]:
        everyone = list(range(self._size))
        if self._store.check([f"clock/{rank}" for rank in everyone]):
            return everyone
        return [rank for rank in everyone if self._store.check([f"clock/{rank}"])]

    def _foreign_clocks(self, ranks: Sequence[int]) -> list[str]:
        clocks = {self._store.get(f"clock/{rank}").decode() for rank in ranks}
        return sorted(clocks - {self._clock})

    def _serve(self, phase: str, clocks: Sequence[str], deadline: float) -> None:
        for clock in clocks:
            until = deadline
            for number in range(NUM_EXCHANGES):
                key = f"{phase}/{clock}/{number}"
                if not self._wait_quickly(f"ask/{key}", until):
                    break
                self._store.set(f"answer/{key}", str(self._options.now_ns()).encode())
                self._store.delete_key(f"ask/{key}")
                until = time.monotonic() + self._options.exchange_s

    def _measure(self, phase: str, deadline: float) -> None:
        exchanges: list[ClockReading] = []
        for number in range(NUM_EXCHANGES):
            key = f"{phase}/{self._clock}/{number}"
            asked_ns = self._options.now_ns()
            self._store.set(f"ask/{key}", b"")
            if not self._wait_quickly(f"answer/{key}", deadline):
                break
            answered_ns = self._options.now_ns()
            answer_ns = int(self._take(f"answer/{key}"))
            exchanges.append(ClockReading(asked_ns, answer_ns, answered_ns))
            deadline = time.monotonic() + self._options.exchange_s
        if len(exchanges) > 1:
            # The first waited for rank 0 to be there.
            self._on_bound(bound_offset(exchanges[1:]))

    def _take(self, key: str) -> bytes:
        value = self._store.get(key)
        self._store.delete_key(key)
        return value

    def _wait_for(self, keys: list[str], deadline: float) -> bool:
        while not self._store.check(keys):
            if time.monotonic() > deadline or self._closing.wait(_POLL_S):
                return False
        return True

    def _wait_quickly(self, key: str, deadline: float) -> bool:
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                self._store.wait([key], timedelta(seconds=min(left_s, _LOOK_S)))
            except RuntimeError:
                self._store.check([key])  # raises where the store itself is gone
                if self._closing.is_set():
                    return False
            else:
                return True
        return False
