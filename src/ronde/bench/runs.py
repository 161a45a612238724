"""One run of a benchmark: what was measured, of how many ranks, and how far it came."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ronde.bench.rows import Row

Extra = float | str
"""A cell that only some logs have."""


class RankSource(StrEnum):
    """What tells how many ranks took part."""

    GIVEN = "given"
    """Whoever measured wrote it down as a number."""
    DEVICES = "devices"
    """The list of devices, one line a rank."""
    RATIO = "ratio"
    """busbw by algbw, which is a function of it; see ``RankCount.low``."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class RankCount:
    """How many ranks took part, and how sure that is.

    Attributes:
        value: The number; None where nothing tells.
        source: What tells.
        low: The least number that agrees with what was printed; ``value`` where the
            source is exact.
        high: The largest such number.
    """

    value: int | None = None
    source: RankSource = RankSource.UNKNOWN
    low: int | None = None
    high: int | None = None

    @classmethod
    def exactly(cls, value: int, source: RankSource) -> "RankCount":
        """Return a count that is not in doubt."""
        return cls(value, source, value, value)


@dataclass(frozen=True, slots=True)
class Run:
    """One benchmark of one collective.

    Attributes:
        test: The collective as ``ronde bench`` spells it, such as ``all_reduce``; empty
            where nothing tells.
        ranks: How many took part, and how that is known.
        rows: In the order of measuring. Sizes repeat: with several dtypes, operations,
            roots or cycles, and where rounding made them 0.
        extras: One mapping a row, or none at all: cells beyond a ``Row``, such as
            ``out_of_place.cputime_us``, ``in_place.i_p99_us`` or ``timestamp``.
        footers: What followed the rows, such as ``Avg bus bandwidth``, as printed.
        average_busbw_gb_per_s: The mean of all busbw that the run stated itself.
        num_out_of_bounds: Failed checks that the run stated itself.
        is_complete: Whether it ran to its end and all rows are here.
        warnings: What is odd about it, one sentence each.
        engine: What moved the bytes; empty where nothing tells.
        facts: Anything else worth keeping, JSON's types only.
    """

    test: str
    ranks: RankCount
    rows: tuple[Row, ...]
    extras: tuple[Mapping[str, Extra], ...] = ()
    footers: Mapping[str, str] = field(default_factory=dict[str, str])
    average_busbw_gb_per_s: float | None = None
    num_out_of_bounds: int | None = None
    is_complete: bool = True
    warnings: tuple[str, ...] = ()
    engine: str = ""
    facts: Mapping[str, object] = field(default_factory=dict[str, object])

    def all_busbw_gb_per_s(self) -> list[float]:
        """Return every busbw of the rows, out of place before in place."""
        sides = [
            side
            for row in self.rows
            for side in (row.out_of_place, row.in_place)
            if side is not None
        ]
        return [s.busbw_gb_per_s for s in sides if s.busbw_gb_per_s is not None]

    def num_wrong(self) -> float | None:
        """Return the wrong elements of all rows; None where nothing was checked."""
        counts = [
            side.num_wrong
            for row in self.rows
            for side in (row.out_of_place, row.in_place)
            if side is not None and side.num_wrong is not None
        ]
        return sum(counts) if counts else None
