"""What is said of engines that are set side by side, as values; torch-free."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ronde.bench.rows import Row, Side


@dataclass(frozen=True, slots=True)
class Compared:
    """One row on every engine.

    Attributes:
        rows: By engine, in the order of asking; each has one half, the other is None.
    """

    rows: Mapping[str, Row]

    def side(self, engine: str) -> Side:
        """Return what was measured of an engine."""
        row = self.rows[engine]
        side = row.in_place or row.out_of_place
        if side is None:
            raise AssertionError("a compared row has one half")
        return side

    def ratio(self, engine: str) -> float:
        """Return how many times as fast an engine is as the first."""
        first = self.side(next(iter(self.rows)))
        return (first.time_us or 0.0) / (self.side(engine).time_us or math.inf)


@dataclass(slots=True)
class Ratios:
    """What is kept of all rows.

    Attributes:
        logarithms: Sum of the logarithms of each engine's ratios.
        num_rows: Rows in the sums.
        num_wrong: Wrong elements of each engine.
    """

    logarithms: dict[str, float] = field(default_factory=dict[str, float])
    num_rows: int = 0
    num_wrong: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, compared: Compared) -> None:
        """Take a row in."""
        self.num_rows += 1
        for engine in compared.rows:
            ratio = math.log(compared.ratio(engine) or 1.0)
            self.logarithms[engine] = self.logarithms.get(engine, 0.0) + ratio
            wrong = compared.side(engine).num_wrong or 0.0
            self.num_wrong[engine] = self.num_wrong.get(engine, 0.0) + wrong

    def mean(self, engine: str) -> float:
        """Return the geometric mean of an engine's ratios."""
        return math.exp(self.logarithms[engine] / max(1, self.num_rows))
