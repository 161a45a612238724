"""Whole sweeps: every type, operation, root and size in nccl-tests' order."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import count
from time import monotonic

import torch

from ronde.bench.catalog import Spread, is_possible
from ronde.bench.dtypes import DType
from ronde.bench.exits import UnsupportedError
from ronde.bench.measured import Measured, Reason, Remark
from ronde.bench.operations import Maker
from ronde.bench.options import Options
from ronde.bench.row_bench import Case, RowBench
from ronde.bench.traffic import Matrix
from ronde.errors import UsageError

Event = Measured | Remark


@dataclass(frozen=True, slots=True)
class SweepBench:
    """Runs the sweeps that were asked for.

    Attributes:
        rows: Measures one row.
        options: Which rows there are.
        is_stopped: Whether the user of this rank wants an end.
        is_traffic_shown: Say of ``alltoallv`` what every rank sent.
    """

    rows: RowBench
    options: Options
    is_stopped: Callable[[], bool]
    is_traffic_shown: bool = False

    def run(self) -> Generator[Event, None, Reason]:
        """Yield rows as they are measured; collective.

        Returns:
            Why it ended, alike on all ranks.

        Raises:
            UnsupportedError: The engine cannot do what was asked for.
            CollectiveError: A collective failed.
        """
        test, size = self.options.test, self.rows.communicator.size
        if not is_possible(test, size):
            yield Remark(f"nRanks {size} is not a power of 2, skipping")
            return Reason.COMPLETE
        pairs, skipped = self.possible()
        yield from (Remark(text) for text in skipped)
        started = monotonic()
        for cycle in self._cycles():
            for case in self.cases(pairs):
                measured = self.rows.measure(case, cycle)
                yield measured
                if self.is_traffic_shown and test.spread is Spread.MATRIX:
                    yield from self._traffic(case, measured)
                reason = self.agree_to_stop(started)
                if reason:
                    return reason
        return Reason.COMPLETE

    def _cycles(self) -> Iterator[int]:
        cycles = self.options.loop.cycles
        return iter(range(cycles)) if cycles else count()

    def cases(self, pairs: list[tuple[DType, str]]) -> Iterator[Case]:
        """Yield the cases of one sweep; warms each type, operation and root up."""
        test, sweep = self.options.test, self.options.sweep
        for dtype, op in pairs:
            for root in sweep.roots(test, self.rows.communicator.size):
                sizes = list(sweep.sizes())
                cases = [Case(test, dtype, op, root, size) for size in sizes]
                if self.options.loop.warmup:
                    for case in cases:
                        self.rows.warm_up(case)
                yield from cases

    def agree_to_stop(self, started_s: float) -> Reason:
        """Say whether it is to end here, and why, alike on all ranks; collective."""
        duration_s = self.options.loop.duration_s
        is_over = bool(duration_s) and monotonic() - started_s > duration_s
        own = Reason.DURATION if is_over else Reason.COMPLETE
        own = Reason.STOPPED if self.is_stopped() else own
        test = self.options.test.name
        with self.rows.watchdog.watching(f"{test}: the agreement to go on"):
            told = self.rows.ranks.exchange([float(own)])
        return Reason(int(max(each[0] for each in told)))

    def _traffic(self, case: Case, measured: Measured) -> Iterator[Remark]:
        """Yield what every rank sent and received."""
        size, time_us = self.rows.communicator.size, measured.out_of_place.side.time_us
        factor = case.test.factor.value_for(size)
        matrix = self.rows.traffic.matrix(
            measured.row.count * case.dtype.num_bytes * size, size
        )
        for rank, row in enumerate(matrix):
            sent, received = sum(row), sum(line[rank] for line in matrix)
            algbw = max(sent, received) / (time_us or 1) / 1e3
            yield Remark(
                f"  rank={rank} send_bytes={sent} recv_bytes={received} "
                f"alg_bw={algbw:.2f} bus_bw={algbw * factor:.2f}"
            )

    def possible(self) -> tuple[list[tuple[DType, str]], list[str]]:
        """Return the types and operations that the engine has, and why not others."""
        sweep = self.options.sweep
        possible: list[tuple[DType, str]] = []
        skipped: list[str] = []
        is_one = len(sweep.dtypes) == len(sweep.ops) == 1
        for dtype in sweep.dtypes:
            for op in sweep.ops:
                problem = self._probe(dtype, op)
                if not problem:
                    possible.append((dtype, op))
                elif is_one:
                    raise UnsupportedError(problem)
                else:
                    skipped.append(f"skipped: {dtype.name} {op}: {problem}")
        return possible, skipped

    def _probe(self, dtype: DType, op: str) -> str:
        """Try one element; return why it cannot be done, or nothing."""
        if not self.options.test.has_op:
            return ""
        communicator, device = self.rows.communicator, self.rows.ranks.device
        target = getattr(torch, dtype.torch_name)
        tensor = torch.zeros(1, dtype=target, device=device)
        matrix: Matrix = ()
        place = self.rows.place(Case(self.options.test, dtype, op, -1, 1), matrix)
        maker = Maker(self.options.test, communicator, op, place)
        try:
            communicator.all_reduce(
                tensor, maker.reduce_op, prescale=maker.prescale
            ).wait()
        except UsageError as error:
            return str(error)
        return ""
