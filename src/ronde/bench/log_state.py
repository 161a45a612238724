"""State of the log parsers; inference of a log's test and number of ranks.

busbw is algbw times a factor that depends only on the collective and the number of
ranks. So both can often be inferred from a log that names neither.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePath
from typing import NamedTuple

from ronde.bench.catalog import COLLECTIVES, Factor
from ronde.bench.results import RankCount, RankSource, Row, Run
from ronde.errors import UsageError


class _Interval(NamedTuple):
    """The range of busbw / algbw that is consistent with one printed pair of values."""

    low: float
    high: float
    middle: float

    def allows(self, ratio: float) -> bool:
        return self.low - 1e-9 <= ratio <= self.high + 1e-9

    def num_ranks(self, factor: Factor) -> tuple[float, float, float]:
        """Return the least, greatest and likeliest number of ranks for this range."""
        limit = 2.0 if factor is Factor.REDUCED else 1.0
        low, high, middle = (
            limit / (limit - ratio) if ratio < limit else math.inf
            for ratio in (max(self.low, 0.0), self.high, self.middle)
        )
        return low, high, middle

    def could_be(self, factor: Factor, num_ranks: int | None) -> bool:
        if num_ranks is not None or factor is Factor.ONE:
            return self.allows(factor.value_for(num_ranks or 1))
        low, high, _ = self.num_ranks(factor)
        return math.isfinite(low) and high >= max(2, math.ceil(low))


def infer_ranks(test: str, rows: Sequence[Row]) -> RankCount:
    """Return the numbers of ranks that are consistent with a test's rounded figures.

    The number is unknown if the factor hardly depends on it.
    """
    known, intervals = COLLECTIVES.get(test), _intervals(rows)
    if known is None or known.factor is Factor.ONE or not intervals:
        return RankCount()
    bounds = [each.num_ranks(known.factor) for each in intervals]
    low, high = max(each[0] for each in bounds), min(each[1] for each in bounds)
    if low > high:
        # Rows of runs with different sizes, or a release that rounds differently.
        low, high, _ = bounds[0]
    middle = bounds[0][2]
    if not math.isfinite(low):
        return RankCount()  # no number of ranks has such a ratio
    first = math.ceil(low - 1e-9)
    if not math.isfinite(high) or not math.isfinite(middle):
        return RankCount(low=max(first, 1))
    last = math.floor(high + 1e-9)
    if first > last:
        return RankCount()
    value = min(max(round(middle), first), last)
    return RankCount(value, RankSource.RATIO, first, last)


def agrees(test: str, num_ranks: int, rows: Sequence[Row]) -> bool:
    known, intervals = COLLECTIVES.get(test), _intervals(rows)
    if known is None or not intervals or num_ranks == 1:
        return True
    return intervals[0].allows(known.factor.value_for(num_ranks))


def infer_tests(rows: Sequence[Row], num_ranks: int | None) -> list[str]:
    intervals = _intervals(rows)
    if not intervals or num_ranks == 1:
        return []
    best, row = intervals[0], max(rows, key=lambda each: each.size_bytes)
    has_operation = row.redop not in ("", "none")
    has_root = row.root is not None and row.root >= 0
    names = [
        name
        for name, known in COLLECTIVES.items()
        # sendrecv reduces nothing, but nccl-tests prints an operation.
        if name == "sendrecv" or known.has_op == has_operation
        if known.has_root == has_root or row.root is None
        if best.could_be(known.factor, num_ranks)
    ]
    # In tables with roots, only hypercube leaves the operation blank.
    if "hypercube" in names and row.root is not None and row.redop == "":
        return ["hypercube"]
    return [name for name in names if name != "hypercube" or row.redop != "none"]


def _intervals(rows: Sequence[Row]) -> list[_Interval]:
    """Return the interval of each printed pair, the largest row's first."""
    found: list[_Interval] = []
    for row in sorted(rows, key=lambda each: each.size_bytes, reverse=True):
        for side in row.sides():
            algbw, busbw = side.algbw_gb_per_s or 0.0, side.busbw_gb_per_s
            if busbw is None or not (0.1 < algbw < math.inf and 0 <= busbw < math.inf):
                continue
            # The rounding errors of figures printed with six characters.
            a, b = (
                0.005 if x < 1e3 else 0.05 if x < 1e4 else 0.5 for x in (algbw, busbw)
            )
            low, high = (busbw - b) / (algbw + a), (busbw + b) / (algbw - a)
            found.append(_Interval(low, high, busbw / algbw))
    return found


AVERAGE = "Avg bus bandwidth"
OUT_OF_BOUNDS = "Out of bounds values"
CONCLUDED = "Collective test concluded"
WITHOUT_MPI = "if one job was started, its test was built without MPI: make MPI=1"

_DEVICE = re.compile(
    r"Rank\s+(?P<rank>\d+)\s+(?:Group\s+(?P<group>\d+)\s+)?Pid\s+\d+\s+on\s+"
    r"(?P<host>\S+)\s+device\s+\d+\s*(?:\[[^\]]*\])?\s*(?P<name>.*)"
)
_NUMBER = re.compile(r"(?:[-+0-9.e]+|-?inf|-?nan|N/A)(?!\S)")
_MAX_SIGNS = 3


class Log(NamedTuple):
    """The runs of one file, and messages about its damaged parts."""

    runs: list[Run]
    damage: list[str]  # unreadable parts
    cuts: list[str]  # runs without an end or a sign of failure


class ListedDevice(NamedTuple):
    """One line of a log's list of devices."""

    rank: int
    group: int
    host: str
    name: str


@dataclass
class DeviceList:
    """The devices that are listed before a table, and apply to all later tables."""

    devices: list[ListedDevice] = field(default_factory=list[ListedDevice])
    is_cut: bool = False
    num_each: int = 1  # ranks per process; nccl-tests' JSON lists the first

    @cached_property
    def num_ranks(self) -> int | None:
        """Size of the group of rank 0, which prints; None if the list is incomplete."""
        numbers = sorted(device.rank for device in self.devices)
        each = 1 if any(rank % self.num_each for rank in numbers) else self.num_each
        whole = list(range(0, len(numbers) * each, each))
        if self.is_cut or not numbers or numbers != whole:
            return None
        group = min(self.devices).group
        return each * sum(device.group == group for device in self.devices)

    @cached_property
    def facts(self) -> dict[str, object]:
        hosts = dict.fromkeys(device.host for device in self.devices)
        names = dict.fromkeys(device.name for device in self.devices)
        return {"hosts": list(hosts), "devices": list(names)}


@dataclass(slots=True)
class ParserState:
    """State of the run that is being parsed.

    A position is a line of text, or in JSON the index of a result, -1 outside results.
    """

    source: str  # the log's name, for messages and as a hint of the test
    first_line: int  # first line of the run
    is_json: bool = False
    banners: set[str] = field(default_factory=set[str])
    title: str = ""  # the test's name as the run states it
    mention: str = ""  # a name such as ``all_reduce_perf`` above the table
    halves: list[str] = field(default_factory=list[str])
    listed: DeviceList = field(default_factory=DeviceList)
    has_table: bool = False
    given: RankCount | None = None  # if ranks need not be counted or inferred
    facts: dict[str, object] = field(default_factory=dict[str, object])
    engine: str = ""
    rows: list[Row] = field(default_factory=list[Row])
    footers: dict[str, str] = field(default_factory=dict[str, str])
    positions: list[int] = field(default_factory=list[int])  # of each row
    warnings: list[str] = field(default_factory=list[str])
    failures: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    # Lines that show that the run failed, in order.
    signs: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    stray: tuple[int, str] | None = None  # a killed process, perhaps of another program
    nccl_warning: tuple[int, str] | None = None
    has_gap: bool = False
    has_errors: bool = False  # rows have ``error``, not ``#wrong``

    @property
    def is_over(self) -> bool:
        return AVERAGE in self.footers

    @property
    def has_failed(self) -> bool:
        return bool(self.signs or self.stray)

    def add_device(self, comment: str) -> bool:
        """Read a line of the list of devices; return False for any other line."""
        if found := _DEVICE.match(comment):
            rank, group = int(found["rank"]), int(found["group"] or 0)
            name = found["name"].strip()
            self.listed.devices.append(ListedDevice(rank, group, found["host"], name))
        return found is not None

    def add_footer(self, name: str, value: str, position: int) -> None:
        if name in (AVERAGE, OUT_OF_BOUNDS):
            word = _NUMBER.match(value)
            try:
                number = float(word[0].replace("N/A", "nan") if word else "")
            except ValueError:
                raise UsageError(f"{name} must be a number, got {value!r}.") from None
            is_good = number == 0 if name == OUT_OF_BOUNDS else 0 <= number < math.inf
            if "FAILED" in value or not is_good:
                self.failures.append((position, f"{name} : {value}"))
        self.footers[name] = value

    def missing(self) -> list[str]:
        """Return messages about a run that neither ended nor failed visibly."""
        if self.is_over or self.has_failed:
            return []
        if self.has_table:
            return ["has no footer: the run was aborted, or the log is cut"]
        return ["ended before its table began"]

    def finish(self, test: str = "") -> Run:
        ending = self._ending()
        # A warning quoted as the cause is not reported twice.
        quoted = "; ".join(text for _, text in ending)
        warnings = [w for w in self.warnings if w.split(": ", 1)[-1] not in quoted]
        listed = self.listed
        name = test or self._find_test(listed.num_ranks, warnings)
        ranks = self._count_ranks(name, listed.num_ranks, warnings)
        is_complete = self.is_over and not self.has_gap
        facts = {"source": self.source, "line": self.first_line}
        facts |= {**listed.facts, **self.facts}
        bounds = self._number(OUT_OF_BOUNDS)
        sides = [side for row in self.rows for side in row.sides()]
        is_checked = self.has_errors or any(s.num_wrong is not None for s in sides)
        if not (bounds or is_checked):
            bounds = None  # 0 because nothing was checked
        run = Run(
            test=name,
            ranks=ranks,
            rows=tuple(self.rows),
            average_busbw_gb_per_s=self._number(AVERAGE),
            num_out_of_bounds=None if bounds is None else int(bounds),
            is_complete=is_complete,
            warnings=tuple(warnings),
            engine=self.engine,
            facts={name: fact for name, fact in facts.items() if fact},
        )
        odd = _odd_average(run) if is_complete else ""
        warnings += [odd] if odd else []
        bad = [(self.positions[index], text) for index, text in run.bad_values()]
        found = sorted([*bad, *self.failures, *ending])
        failures = tuple(self.locate(position, text) for position, text in found)
        return replace(run, warnings=tuple(warnings), failures=failures)

    def locate(self, position: int, text: str) -> str:
        if not self.is_json:
            return f"{self.source}:{position}: {text}"
        result = f"result {position}: " if position >= 0 else ""
        return f"{self.source}: {result}{text}"

    def _number(self, footer: str) -> float | None:
        text = self.footers.get(footer, "N/A")
        return None if text.startswith("N/A") else float(text.split()[0])

    def _ending(self) -> list[tuple[int, str]]:
        """Return the failure that ended the run early, with its line; empty if none."""
        signs = self.signs[:_MAX_SIGNS]
        if self.stray and self.is_over:
            line, text = self.stray
            self.warnings.append(f"line {line}: {text}")
        elif self.stray and not signs:
            signs = [self.stray]
        if not signs:
            return []
        if self.nccl_warning and self.nccl_warning < signs[0]:
            signs.insert(0, self.nccl_warning)
        (first, text), *others = signs
        more = "".join(f"; line {line}: {other}" for line, other in others)
        return [(first, f"the run failed: {text}{more}")]

    def _count_ranks(
        self, test: str, listed: int | None, warnings: list[str]
    ) -> RankCount:
        if self.given is not None:
            return self.given
        if listed is None:
            num_first = sum(device.rank == 0 for device in self.listed.devices)
            if num_first > 1:
                warnings.append(f"lists rank 0 {num_first} times: {WITHOUT_MPI}")
            elif self.listed.devices:
                warnings.append("its list of devices is cut")
            return infer_ranks(test, self.rows)
        if not agrees(test, listed, self.rows):
            warnings.append(
                f"lists {listed} devices, but its ratio of busbw to algbw differs"
            )
        return RankCount.exactly(listed, RankSource.DEVICES)

    def _find_test(self, listed: int | None, warnings: list[str]) -> str:
        last = name_in(self.footers.get(CONCLUDED, ""))
        stated = self.title or last or self.mention
        names = [] if stated else infer_tests(self.rows, listed)
        if stated or len(names) == 1:
            return stated or names[0]
        file_name = name_in(PurePath(self.source).name)
        if file_name and (file_name in names or not names):
            return file_name
        if names:
            warnings.append(f"its test is not named: {' or '.join(names)}")
        return ""


def _odd_average(run: Run) -> str:
    """Return a warning if a log's average is not its rows' average, else ""."""
    values, stated = run.all_busbw_gb_per_s(), run.average_busbw_gb_per_s
    if not values or stated is None or not all(map(math.isfinite, values)):
        return ""
    mean = sum(values) / len(values)
    # Rows have two decimals, or fewer from 1000 on; the footer has six digits.
    if abs(mean - stated) <= 0.006 + max(values) * 1e-4 + abs(stated) * 1e-5:
        return ""
    figures = f"states an average of {stated:g} GB/s, its rows have {mean:g}"
    return f"{figures}: rows are missing or altered"


def name_in(text: str) -> str:
    """Return the test that the name of a file or program contains, or ""."""
    bare = text.lower().replace("_", "").replace("-", "")
    spelled = {name.replace("_", ""): name for name in COLLECTIVES}
    found = [each for each in spelled if each in bare]
    return spelled[max(found, key=len)] if found else ""
