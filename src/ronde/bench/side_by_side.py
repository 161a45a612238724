"""Engines side by side: they take turns on every row, so that a slow minute hits all.

One process group an engine, all on the same ranks, all connected before the first row.
"""

import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from ronde.bench.compared import Compared
from ronde.bench.dtypes import DType
from ronde.bench.exits import UnsupportedError
from ronde.bench.measured import Reason, Remark
from ronde.bench.options import Options
from ronde.bench.row_bench import Case, RowBench
from ronde.bench.rows import Row
from ronde.bench.sweeping import SweepBench


@dataclass(frozen=True, slots=True)
class Contest:
    """Runs the same rows on several engines.

    Attributes:
        benches: By engine, the first the one that others are compared with.
        options: Which rows there are, and how many rounds.
        is_stopped: Whether the user of this rank wants an end.
    """

    benches: Mapping[str, RowBench]
    options: Options
    is_stopped: Callable[[], bool]

    def run(self) -> Generator[Compared | Remark, None, Reason]:
        """Yield rows as they are measured; collective.

        Returns:
            Why it ended, alike on all ranks.

        Raises:
            UnsupportedError: No engine, or not all, can do what was asked for.
            CollectiveError: A collective failed.
        """
        sweeps = {
            name: SweepBench(bench, self.options, self.is_stopped)
            for name, bench in self.benches.items()
        }
        pairs, skipped = _possible_on_all(sweeps)
        yield from (Remark(text) for text in skipped)
        first, *others = sweeps.values()
        started = monotonic()
        cases = zip(
            first.cases(pairs), *(each.cases(pairs) for each in others), strict=True
        )
        for case, *_ in cases:
            yield self._compare(case)
            reason = first.agree_to_stop(started)
            if reason:
                return reason
        return Reason.COMPLETE

    def _compare(self, case: Case) -> Compared:
        is_in_place = case.test.is_in_place_checked
        times: dict[str, list[float]] = {name: [] for name in self.benches}
        for _ in range(self.options.engines.rounds):
            for name, bench in self.benches.items():
                times[name].append(bench.time_us(case, is_in_place=is_in_place))
        rows: dict[str, Row] = {}
        for name, bench in self.benches.items():
            wrong = bench.count_wrong(case, is_in_place=is_in_place)
            side = bench.side(case, statistics.median(times[name]), wrong)
            rows[name] = bench.row(case, side, is_in_place=is_in_place)
        return Compared(rows)


def _possible_on_all(
    sweeps: Mapping[str, SweepBench],
) -> tuple[list[tuple[DType, str]], list[str]]:
    """Return the types and operations that every engine has."""
    found: list[Sequence[tuple[DType, str]]] = []
    skipped: list[str] = []
    for name, sweep in sweeps.items():
        try:
            pairs, without = sweep.possible()
        except UnsupportedError as error:
            raise UnsupportedError(f"engine {name}: {error}") from error
        found.append(pairs)
        skipped += [f"{name}: {text}" for text in without]
    common = [pair for pair in found[0] if all(pair in each for each in found)]
    return common, skipped
