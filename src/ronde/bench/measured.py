"""What a benchmark reports while it runs, as values; no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum

from ronde.bench.options import Options
from ronde.bench.results import Row, Side
from ronde.topology.limits.bounds import Limit


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """Times of single iterations, and their figures without the skipped ones."""

    times_us: tuple[float, ...]  # of the slowest rank in each
    rank_times_us: tuple[tuple[float, ...], ...]  # by rank and iteration
    num_skipped: int
    min_us: float
    max_us: float
    mean_us: float
    median_us: float  # of an even number the upper, as nccl-tests takes it
    deviation_us: float

    @classmethod
    def of_ranks(
        cls, rank_times_us: Sequence[Sequence[float]], num_skipped: int
    ) -> "IterationTimes":
        times = tuple(max(column) for column in zip(*rank_times_us, strict=True))
        kept = sorted(times[num_skipped:])
        mean = sum(kept) / len(kept)
        return cls(
            times,
            tuple(tuple(each) for each in rank_times_us),
            num_skipped,
            kept[0],
            kept[-1],
            mean,
            kept[len(kept) // 2],
            math.sqrt(sum((t - mean) ** 2 for t in kept) / len(kept)),
        )

    @property
    def variation_percent(self) -> float:
        return 100 * self.deviation_us / self.mean_us if self.mean_us else 0.0

    def percentile_us(self, percent: int) -> float:
        """Return the time that ``percent`` of the iterations do not exceed."""
        times = sorted(self.times_us[self.num_skipped :])
        return times[max(0, math.ceil(percent / 100 * len(times)) - 1)]


@dataclass(frozen=True, slots=True)
class Device:
    """What one rank runs on."""

    rank: int  # of the world
    group: int  # of the group that the rank is in
    pid: int
    host: str  # where that is
    index: int  # of the device on its host
    bus_id: tuple[int, int, int]  # PCI domain, bus and device; zeros for a CPU
    name: str  # what it is

    @property
    def bus_text(self) -> str:
        return "{:04x}:{:02x}:{:02x}".format(*self.bus_id)


@dataclass(frozen=True, slots=True)
class Heading:
    """What is known before the first row."""

    options: Options
    engine: str  # what moves the bytes
    devices: tuple[Device, ...]  # one a rank
    size: int  # ranks of the group that is shown
    versions: Mapping[str, str]  # of what takes part, by name
    notes: tuple[str, ...] = ()
    shown_variables: tuple[str, ...] = ()  # the environment, as far as it may be quoted
    limit: Limit | None = None  # the physical bound, where one is known
    # time of an operation on one element, where that was measured
    call_overhead_us: float | None = None
    nccl_version: int = 0  # as NCCL writes it in one number; 0 without it
    started_at: datetime = field(default_factory=datetime.now)


@dataclass(frozen=True, slots=True)
class Half:
    """One place of one row."""

    side: Side  # what the row says
    iterations: IterationTimes | None = None  # where each was timed
    num_failed: int = 0  # checks that failed


@dataclass(frozen=True, slots=True)
class Measured:
    """One row, when it is there."""

    row: Row
    out_of_place: Half  # more of that half
    in_place: Half  # more of that half
    cycle: int  # number of the sweep, from 0 on
    num_iterations: int  # timed iterations of each half
    at: datetime  # local time of its end
    remarks: tuple[str, ...] = ()  # lines to print before it, as comments


class Reason(IntEnum):
    """Why there are no more rows; where ranks differ the greatest counts."""

    COMPLETE = 0
    DURATION = 1  # the time that the user gave it is over
    STOPPED = 2  # by the user


@dataclass(frozen=True, slots=True)
class Remark:
    """A sentence between the rows."""

    text: str


@dataclass(slots=True)
class Totals:
    """What is kept of all rows: a soak must not grow."""

    num_rows: int = 0
    num_busbw: int = 0  # bandwidths in the sum
    sum_busbw_gb_per_s: float = 0.0  # of all rows and places
    peak_busbw_gb_per_s: float = 0.0
    peak_size_bytes: int = 0
    num_failed: int = 0  # checks that failed
    num_wrong: float = 0.0
    is_checked: bool = False  # something was verified

    def add(self, measured: Measured) -> None:
        self.num_rows += 1
        for half in (measured.out_of_place, measured.in_place):
            busbw = half.side.busbw_gb_per_s or 0.0
            self.num_busbw += 1
            self.sum_busbw_gb_per_s += busbw
            if busbw > self.peak_busbw_gb_per_s:
                self.peak_busbw_gb_per_s = busbw
                self.peak_size_bytes = measured.row.size_bytes
            self.num_failed += half.num_failed
            if half.side.num_wrong is not None:
                self.is_checked = True
                self.num_wrong += half.side.num_wrong

    @property
    def average_busbw_gb_per_s(self) -> float:
        """The plain mean, small sizes and both places included."""
        return self.sum_busbw_gb_per_s / self.num_busbw if self.num_busbw else 0.0


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known after the last row."""

    totals: Totals  # of all rows
    # what the average had to reach nine tenths of; None for nothing
    least_busbw_gb_per_s: float | None = None
    memory: str = ""  # the memory line, or empty
    errors: tuple[str, ...] = ()  # what went wrong, one sentence each
    reason: Reason = Reason.COMPLETE  # why it ended
    ended_at: datetime = field(default_factory=datetime.now)

    @property
    def is_fast_enough(self) -> bool | None:
        """Whether the average is what was asked for; None where nothing was."""
        if self.least_busbw_gb_per_s is None:
            return None
        average = self.totals.average_busbw_gb_per_s
        return average >= 0.9 * self.least_busbw_gb_per_s

    @property
    def is_failed(self) -> bool:
        """Whether a check failed, or the bandwidth did not suffice."""
        return self.totals.num_failed > 0 or self.is_fast_enough is False
