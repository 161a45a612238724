"""A run while its log is being read, and what follows from all of it together."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from ronde.bench.catalog import COLLECTIVES
from ronde.bench.log_columns import Columns
from ronde.bench.log_ranks import agrees, infer_ranks, infer_tests
from ronde.bench.rows import Row
from ronde.bench.runs import Extra, RankCount, RankSource, Run
from ronde.errors import UsageError

AVERAGE = "Avg bus bandwidth"
OUT_OF_BOUNDS = "Out of bounds values"

_DEVICE = re.compile(
    r"Rank\s+(?P<rank>\d+)\s+(?:Group\s+(?P<group>\d+)\s+)?Pid\s+\d+\s+on\s+"
    r"(?P<host>\S+)\s+device\s+\d+\s*(?:\[[^\]]*\])?\s*(?P<name>.*)"
)
_NUMBER = re.compile(r"[-+0-9.e]+|-?inf|-?nan")
_MAX_LISTED = 3


@dataclass(slots=True)
class Device:
    """One line of the list of devices."""

    rank: int
    group: int
    host: str
    name: str


@dataclass(slots=True)
class Draft:
    """What is known of a run so far.

    Attributes:
        source: The log's name, for messages and as a hint of the test.
        first_line: Where the run begins.
        banners: Kinds of opening lines seen; each comes once a run.
        title: The test's name as the run itself stated it.
        mention: A name such as ``all_reduce_perf`` met before the table.
        columns: The table's, once its header was read; None for JSON, which has none.
        has_table: Whether the results have begun.
        given: The number of ranks, where it need not be counted or inferred.
        is_over: Whether the footer was read.
    """

    source: str
    first_line: int
    banners: set[str] = field(default_factory=set[str])
    title: str = ""
    mention: str = ""
    arguments: str = ""
    places: list[str] = field(default_factory=list[str])
    devices: list[Device] = field(default_factory=list[Device])
    is_list_cut: bool = False
    columns: Columns | None = None
    has_table: bool = False
    given: RankCount | None = None
    facts: dict[str, object] = field(default_factory=dict[str, object])
    engine: str = ""
    rows: list[Row] = field(default_factory=list[Row])
    extras: list[Mapping[str, Extra]] = field(default_factory=list[Mapping[str, Extra]])
    footers: dict[str, str] = field(default_factory=dict[str, str])
    warnings: list[str] = field(default_factory=list[str])
    strays: list[str] = field(default_factory=list[str])
    has_gap: bool = False
    is_over: bool = False

    def add_device(self, comment: str) -> bool:
        """Take one line of the list of devices; say whether it was one."""
        found = _DEVICE.match(comment)
        if found is None:
            return False
        group = int(found["group"] or 0)
        device = Device(int(found["rank"]), group, found["host"], found["name"].strip())
        self.devices.append(device)
        return True

    def add_footer(self, name: str, value: str) -> None:
        """Take what stands below the table.

        Raises:
            UsageError: It should be a number and is none.
        """
        if name in (AVERAGE, OUT_OF_BOUNDS):
            word = value.split(maxsplit=1)[0] if value else ""
            is_number = _NUMBER.fullmatch(word) is not None
            try:
                float(word)
            except ValueError:
                is_number = False
            if not is_number:
                raise UsageError(f"{name} must be a number, got {value!r}.")
        self.footers[name] = value
        self.is_over = self.is_over or name == AVERAGE

    def finish(self, test: str = "") -> Run:
        """Return the run.

        Args:
            test: What the user says it is of; empty finds it out.
        """
        warnings = list(self.warnings)
        name = test or self._find_test(warnings)
        ranks = self._count_ranks(name, warnings)
        average = self._number(AVERAGE)
        is_complete = self.is_over and not self.has_gap
        if not self.has_table:
            warnings.append("ended before its table began")
        elif not self.is_over:
            warnings.append("has no footer: the run was aborted, or the log is cut")
        if self.strays:
            warnings.append(_describe_strays(self.strays))
        bounds = self._number(OUT_OF_BOUNDS)
        return Run(
            test=name,
            ranks=ranks,
            rows=tuple(self.rows),
            extras=tuple(self.extras) if any(self.extras) else (),
            footers=self.footers,
            average_busbw_gb_per_s=average,
            num_out_of_bounds=None if bounds is None else int(bounds),
            is_complete=is_complete,
            warnings=(*warnings, *(self._check_average() if is_complete else ())),
            engine=self.engine,
            facts=self._facts(),
        )

    def _number(self, footer: str) -> float | None:
        text = self.footers.get(footer)
        return None if text is None else float(text.split()[0])

    def _facts(self) -> dict[str, object]:
        hosts = list(dict.fromkeys(each.host for each in self.devices))
        facts: dict[str, object] = {
            "source": self.source,
            "line": self.first_line,
            "arguments": self.arguments,
            "hosts": hosts,
            "devices": list(dict.fromkeys(each.name for each in self.devices)),
            **self.facts,
        }
        return {name: fact for name, fact in facts.items() if fact}

    def _listed(self) -> int | None:
        """Return the length of the list of devices, where it is whole."""
        if not self.devices:
            return None
        numbers = [each.rank for each in self.devices]
        if self.is_list_cut or sorted(numbers) != list(range(len(numbers))):
            return None
        # Split into groups, only the group of world rank 0 prints.
        group = min(self.devices, key=lambda each: each.rank).group
        return sum(each.group == group for each in self.devices)

    def _count_ranks(self, test: str, warnings: list[str]) -> RankCount:
        if self.given is not None:
            return self.given
        listed = self._listed()
        if listed is not None:
            if not agrees(test, listed, self.rows):
                warnings.append(
                    f"lists {listed} devices, which its ratio of busbw to algbw "
                    "contradicts"
                )
            return RankCount.exactly(listed, RankSource.DEVICES)
        if self.devices:
            warnings.append("its list of devices is cut")
        return infer_ranks(test, self.rows)

    def _find_test(self, warnings: list[str]) -> str:
        stated = self.title or self.mention
        if stated:
            return stated
        names = infer_tests(self.rows, self._listed())
        if len(names) == 1:
            return names[0]
        file_name = name_in(PurePath(self.source).name)
        if file_name and (file_name in names or not names):
            return file_name
        if names:
            warnings.append(f"its test is not named: {' or '.join(names)}")
        return ""

    def _check_average(self) -> list[str]:
        """Return what is odd about the average that the log states."""
        values = [
            side.busbw_gb_per_s
            for row in self.rows
            for side in (row.out_of_place, row.in_place)
            if side is not None and side.busbw_gb_per_s is not None
        ]
        stated = self._number(AVERAGE)
        if not values or stated is None or not all(map(math.isfinite, values)):
            return []
        mean = sum(values) / len(values)
        # Two decimals a row, fewer for four digits and more; six digits in the footer.
        slack = 0.006 + max(values) * 1e-4 + abs(stated) * 1e-5
        if abs(mean - stated) <= slack:
            return []
        said = f"states an average of {stated:g} GB/s, its rows have {mean:g}"
        return [f"{said}: rows are missing or altered"]


def name_in(text: str) -> str:
    """Return the test that a file's or program's name speaks of, or nothing."""
    bare = text.lower().replace("_", "").replace("-", "")
    spelled = {name.replace("_", ""): name for name in COLLECTIVES}
    found = [each for each in spelled if each in bare]
    return spelled[max(found, key=len)] if found else ""


def _describe_strays(strays: list[str]) -> str:
    listed = "; ".join(strays[:_MAX_LISTED])
    more = len(strays) - _MAX_LISTED
    return f"passed over what is no row: {listed}" + (
        f" and {more} more" if more > 0 else ""
    )
