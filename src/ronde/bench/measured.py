"""What a benchmark says while it runs, as values; torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum

from ronde.bench.iterations import IterationTimes
from ronde.bench.options import Options
from ronde.bench.rows import Row, Side
from ronde.topology.limits.bounds import Limit


@dataclass(frozen=True, slots=True)
class Device:
    """What one rank runs on.

    Attributes:
        rank: Of the world.
        group: Of the group that the rank is in.
        pid: Its process.
        host: Where that is.
        index: Of the device on its host.
        bus_id: PCI domain, bus and device; zeros for a CPU.
        name: What it is.
    """

    rank: int
    group: int
    pid: int
    host: str
    index: int
    bus_id: tuple[int, int, int]
    name: str

    @property
    def bus_text(self) -> str:
        """The place on the bus as nccl-tests writes it."""
        return "{:04x}:{:02x}:{:02x}".format(*self.bus_id)


@dataclass(frozen=True, slots=True)
class Heading:
    """What is known before the first row.

    Attributes:
        options: What was asked for; sizes as they will be, not as they were asked for.
        engine: What moves the bytes.
        devices: One a rank.
        size: Ranks of the group that is told of.
        versions: Of what takes part, by name.
        notes: What is to be said of how it is measured, one sentence each.
        shown_variables: The environment, as far as it may be quoted.
        limit: The physical bound, where one is known.
        call_overhead_us: Time of an operation on one element, where that was measured.
        nccl_version: As NCCL writes it in one number; 0 without it.
        started_at: Local time.
    """

    options: Options
    engine: str
    devices: tuple[Device, ...]
    size: int
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()
    shown_variables: tuple[str, ...] = ()
    limit: Limit | None = None
    call_overhead_us: float | None = None
    nccl_version: int = 0
    started_at: datetime = field(default_factory=datetime.now)


@dataclass(frozen=True, slots=True)
class Half:
    """One place of one row.

    Attributes:
        side: What the row says.
        iterations: Where each was timed.
        num_failed: Checks that failed.
    """

    side: Side
    iterations: IterationTimes | None = None
    num_failed: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """One row, when it is there.

    Attributes:
        row: The figures.
        out_of_place: More of that half.
        in_place: More of that half.
        cycle: Number of the sweep, from 0 on.
        num_iterations: Timed iterations of each half.
        at: Local time of its end.
        remarks: Lines to print before it, as comments.
    """

    row: Row
    out_of_place: Half
    in_place: Half
    cycle: int
    num_iterations: int
    at: datetime
    remarks: tuple[str, ...] = ()


class Reason(IntEnum):
    """Why there are no more rows; where ranks differ the greatest counts."""

    COMPLETE = 0
    DURATION = 1
    """The time that the user gave it is over."""
    STOPPED = 2
    """The user ended it."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A sentence between the rows."""

    text: str


@dataclass(slots=True)
class Totals:
    """What is kept of all rows: a soak must not grow.

    Attributes:
        num_rows: Rows measured.
        num_busbw: Bandwidths in the sum.
        sum_busbw_gb_per_s: Of all rows and places.
        peak_busbw_gb_per_s: The greatest.
        peak_size_bytes: Its row.
        num_failed: Checks that failed.
        num_wrong: Wrong elements.
        is_checked: Something was verified.
    """

    num_rows: int = 0
    num_busbw: int = 0
    sum_busbw_gb_per_s: float = 0.0
    peak_busbw_gb_per_s: float = 0.0
    peak_size_bytes: int = 0
    num_failed: int = 0
    num_wrong: float = 0.0
    is_checked: bool = False

    def add(self, measured: Measured) -> None:
        """Take a row in."""
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
    """What is known after the last row.

    Attributes:
        totals: Of all rows.
        least_busbw_gb_per_s: What the average had to reach nine tenths of; None for
            nothing.
        memory: The memory line, or empty.
        errors: What went wrong, one sentence each.
        reason: Why it ended.
        ended_at: Local time.
    """

    totals: Totals
    least_busbw_gb_per_s: float | None = None
    memory: str = ""
    errors: tuple[str, ...] = ()
    reason: Reason = Reason.COMPLETE
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
