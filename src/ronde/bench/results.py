"""Results of a benchmark and their record; does not import torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import IntEnum, StrEnum
from statistics import fmean, pstdev
from typing import Any, NamedTuple, cast

from ronde.bench.options import Options
from ronde.errors import UsageError
from ronde.plain_values import from_plain
from ronde.records import MachineRecord, Record
from ronde.topology.limits import Limit
from ronde.units import counted


@dataclass(frozen=True, slots=True)
class Side:
    """The figures of one half of a row, out of place or in place."""

    time_us: float | None  # time of an operation; None if not printed
    algbw_gb_per_s: float | None  # the operation's bytes divided by its time
    busbw_gb_per_s: float | None
    num_wrong: float | None  # wrong elements of all ranks; None if unchecked

    @property
    def is_measured(self) -> bool:
        """True unless the time or a rate is negative, infinite or NaN."""
        time_us, algbw = self.time_us or 0.0, self.algbw_gb_per_s or 0.0
        is_time, is_rate = 0 <= time_us < math.inf, 0 <= algbw < math.inf
        return is_time and is_rate and 0 <= (self.busbw_gb_per_s or 0.0) < math.inf


@dataclass(frozen=True, slots=True)
class Row:
    """The results for one size, type, operation and root of a collective."""

    size_bytes: int  # the larger of a rank's sent and received bytes
    count: int  # number of elements that each rank passes
    dtype: str  # nccl-tests' name of the type, such as ``float``
    redop: str  # such as ``sum``; ``none``; empty for a blank cell
    root: int | None  # -1 or None without a root
    out_of_place: Side | None  # None if that half was not measured
    in_place: Side | None

    def sides(self) -> list[Side]:
        return [side for side in (self.out_of_place, self.in_place) if side is not None]

    @property
    def shown_root(self) -> int:
        return -1 if self.root is None else self.root


HALVES = ("out_of_place", "in_place")


class RankSource(StrEnum):
    """Origin of the number of ranks in a ``RankCount``."""

    GIVEN = "given"
    DEVICES = "devices"  # the list of devices, one line per rank
    RATIO = "ratio"  # inferred from busbw / algbw
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class RankCount:
    """A number of ranks, known or inferred, with its possible range."""

    value: int | None = None  # None if unknown
    source: RankSource = RankSource.UNKNOWN
    # The least and largest numbers that are consistent with the printed figures.
    low: int | None = None
    high: int | None = None

    @classmethod
    def exactly(cls, value: int, source: RankSource) -> "RankCount":
        return cls(value, source, value, value)


@dataclass(frozen=True, slots=True)
class Run:
    """The rows and warnings of one benchmark of one collective."""

    test: str  # such as ``all_reduce``; empty if unknown
    ranks: RankCount
    # In the order of measurement. Sizes are repeated with several dtypes, operations,
    # roots or cycles, and if they are rounded to 0.
    rows: tuple[Row, ...]
    average_busbw_gb_per_s: float | None = None  # as printed
    num_out_of_bounds: int | None = None  # failed checks, as printed; None if unchecked
    is_complete: bool = True  # it ran to its end and no row is missing
    warnings: tuple[str, ...] = ()  # one sentence each
    failures: tuple[str, ...] = ()  # reasons of an early end, and wrong values
    engine: str = ""  # empty if unknown
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    def all_busbw_gb_per_s(self) -> list[float]:
        values = [side.busbw_gb_per_s for row in self.rows for side in row.sides()]
        return [value for value in values if value is not None]

    def num_wrong(self) -> float | None:
        """Return the number of wrong elements, or of failed checks in old logs."""
        counts = [side.num_wrong for row in self.rows for side in row.sides()]
        known = [count for count in counts if count is not None]
        return sum(known) if known else self.num_out_of_bounds

    def bad_values(self) -> list[tuple[int, str]]:
        """Describe wrong elements and impossible figures, with their row's index."""
        wrong = f"{self.num_wrong() or 0:g} wrong elements"
        unreal = "a time or rate that is negative or no number"
        found: dict[str, list[int]] = {wrong: [], unreal: []}
        for index, row in enumerate(self.rows):
            for side in row.sides():
                if side.num_wrong:
                    found[wrong].append(index)
                if not side.is_measured:
                    found[unreal].append(index)
        bad: list[tuple[int, str]] = []
        for problem, (first, *more) in ((p, at) for p, at in found.items() if at):
            row, rows = self.rows[first], counted(len({first, *more}), "row")
            where = f"the first of {row.size_bytes} bytes, {row.dtype} {row.redop}"
            bad.append((first, f"{problem} in {rows}, {where}"))
        return bad


KIND = "bench"
_MEASURED = ("rows", "average_busbw_gb_per_s")
_ELSEWHERE = MachineRecord(num_cores=0, cpu="", python="", platform="")
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_record(run: Run, *, was_measured_here: bool = True) -> Record:
    """Return a record of kind ``bench``, with infinity and NaN as text."""
    values = cast("dict[str, Any]", finite(asdict(run)))
    machine = MachineRecord.here() if was_measured_here else _ELSEWHERE
    return Record(KIND, values, machine=machine)


def from_record(record: Record) -> Run:
    if record.kind != KIND:
        raise UsageError(f"a record's kind must be {KIND}, got {record.kind!r}.")
    values = {
        name: _numbers(value) if name in _MEASURED else value
        for name, value in record.values.items()
    }
    try:
        return from_plain(Run, values, "a run")
    except ValueError as error:
        raise UsageError(f"a {KIND} record has invalid values: {error}") from error


def _numbers(value: object) -> object:
    """Undo ``finite``: turn texts for infinity and NaN into numbers."""
    if isinstance(value, dict):
        entries = cast("dict[str, object]", value)
        return {name: _numbers(each) for name, each in entries.items()}
    if isinstance(value, list):
        return [_numbers(each) for each in cast("list[object]", value)]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def finite(value: object, num_decimals: int | None = None) -> object:
    """Make ``value`` valid JSON: infinities and NaN as text, tuples as lists.

    Other floats are rounded to ``num_decimals`` if it is given.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return value if num_decimals is None else round(value, num_decimals)
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value)
        return {str(k): finite(v, num_decimals) for k, v in entries.items()}
    if isinstance(value, list | tuple):
        return [finite(each, num_decimals) for each in cast("list[object]", value)]
    return value


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """Times of single iterations; figures use each iteration's slowest rank."""

    rank_times_us: Sequence[Sequence[float]]  # indexed by rank and iteration
    num_skipped: int  # iterations that the figures leave out

    @property
    def times_us(self) -> list[float]:
        return [max(column) for column in zip(*self.rank_times_us, strict=True)]

    @property
    def kept_us(self) -> list[float]:
        return sorted(self.times_us[self.num_skipped :])

    @property
    def mean_us(self) -> float:
        return fmean(self.kept_us)

    @property
    def deviation_us(self) -> float:
        return pstdev(self.kept_us)

    @property
    def variation_percent(self) -> float:
        return 100 * self.deviation_us / self.mean_us if self.mean_us else 0.0

    def percentile_us(self, percent: int) -> float:
        times = self.kept_us
        return times[max(0, math.ceil(percent / 100 * len(times)) - 1)]


@dataclass(frozen=True, slots=True)
class Device:
    """The process and device of one rank."""

    rank: int  # in the world
    group: int
    pid: int
    host: str
    index: int  # the device's index on its host
    bus_id: str  # PCI domain, bus and device in hexadecimal; zeros for a CPU
    name: str


@dataclass(frozen=True, slots=True)
class Heading:
    """Facts that are shown before the first row."""

    options: Options
    engine: str
    devices: tuple[Device, ...]  # one for each rank
    size: int  # number of ranks in the shown group
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()
    shown_variables: tuple[str, ...] = ()  # environment variables without secrets
    limit: Limit | None = None  # the physical bound, if known
    call_overhead_us: float | None = None  # time of an operation on little data
    nccl_version: int = 0  # NCCL's version as one number; 0 without NCCL
    hosts: tuple[int, ...] = (1,)  # ranks on each host
    started_at: datetime = field(default_factory=datetime.now)


class Half(NamedTuple):
    """One half of a row, with the times of its iterations."""

    side: Side
    iterations: IterationTimes | None = None  # if each was timed
    num_failed: int = 0  # checks that failed


@dataclass(frozen=True, slots=True)
class Measured:
    """A row as measured, before it is shown or recorded."""

    row: Row
    out_of_place: Half
    in_place: Half
    cycle: int  # number of the sweep, from 0
    at: datetime  # local time of the row's end


class Reason(IntEnum):
    """Reason for the end of a run. If ranks have different ones, the largest counts."""

    COMPLETE = 0
    DURATION = 1  # --duration has passed
    STOPPED = 2  # by the user


@dataclass(slots=True)
class Totals:
    """Sums over all rows, so that an endless run need not store rows."""

    num_rows: int = 0
    num_busbw: int = 0  # number of bandwidths in the sum
    sum_busbw_gb_per_s: float = 0.0  # sum over all rows and halves
    peak_busbw_gb_per_s: float = 0.0
    peak_size_bytes: int = 0
    num_failed: int = 0  # checks that failed
    num_wrong: float | None = None  # None if nothing was checked

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
                self.num_wrong = (self.num_wrong or 0.0) + half.side.num_wrong

    @property
    def average_busbw_gb_per_s(self) -> float:
        return self.sum_busbw_gb_per_s / self.num_busbw if self.num_busbw else 0.0


@dataclass(frozen=True, slots=True)
class Ending:
    """Facts that are shown after the last row."""

    totals: Totals
    least_busbw_gb_per_s: float | None = None  # the average must reach 0.9 of it
    memory: str = ""  # the memory line, or empty
    errors: tuple[str, ...] = ()  # one sentence each
    reason: Reason = Reason.COMPLETE
    fit: Mapping[str, Any] | None = None  # a record's, as of a ring
    ended_at: datetime = field(default_factory=datetime.now)

    @property
    def is_fast_enough(self) -> bool | None:
        if self.least_busbw_gb_per_s is None:
            return None
        average = self.totals.average_busbw_gb_per_s
        return average >= 0.9 * self.least_busbw_gb_per_s

    @property
    def failures(self) -> tuple[str, ...]:
        found = list(self.errors)
        if self.totals.num_failed:
            found.append(f"checks that failed: {self.totals.num_failed}")
        if self.is_fast_enough is False:
            found.append("the average busbw is below 0.9 of NCCL_TESTS_MIN_BW")
        return tuple(found)
