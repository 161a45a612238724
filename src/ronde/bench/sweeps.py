"""Measurement of rows, sweeps and comparisons of engines."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import count, islice, product
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor

from ronde.bench import catalog, results
from ronde.bench.checking import ReductionInputs, count_wrong, prepare, random_bytes
from ronde.bench.comparison import Compared
from ronde.bench.operations import Buffers, CallSpec, Operation, make_operation
from ronde.bench.options import Options, TimingLoop, UnsupportedError
from ronde.bench.ranks import Ranks
from ronde.bench.timing import Clock, Elapsed, Watchdog, combine
from ronde.collectives import Communicator
from ronde.errors import UsageError

_TILE_BYTES = 1 << 17


class Case(NamedTuple):
    """Collective, type, operation, root and size of one row."""

    test: catalog.Collective
    dtype: catalog.DType
    op: str  # the reduction, or the text for its cell
    root: int  # -1 without a root
    size_bytes: int  # nominal; shares are rounded down

    def __str__(self) -> str:
        return (
            f"{self.test.name} of {self.size_bytes} bytes, "
            f"{self.dtype.name} {self.op}, root {self.root}"
        )


@dataclass(frozen=True, slots=True)
class RowBench:
    """Measures rows on one communicator."""

    ranks: Ranks
    communicator: Communicator
    buffers: Buffers
    clock: Clock
    loop: TimingLoop
    watchdog: Watchdog

    def spec(self, case: Case) -> CallSpec:
        group, width, matrix = self.communicator, case.dtype.num_bytes, ()
        size = group.size
        shape = catalog.shape_of(case.test, case.size_bytes, width, size)
        if case.test.spread is catalog.Spread.MATRIX:
            num_bytes = catalog.traffic_matrix(shape.count * width * size, size)
            shape = catalog.shape_of_matrix(num_bytes, width, shape.count)
            matrix = catalog.in_elements(num_bytes, width)
        call = (case.test, case.dtype, case.op, shape)
        return CallSpec(*call, group.rank, size, case.root, matrix)

    def operations(self, case: Case, *, is_in_place: bool) -> list[Operation]:
        spec = self.spec(case)
        count = self.loop.iterations * self.loop.aggregated
        views = islice(self.buffers.moving_views(spec, is_in_place=is_in_place), count)
        return [make_operation(spec, self.communicator, each) for each in views]

    def warm_up(self, case: Case) -> None:
        with self.watchdog.watching(f"warm-up of {case}"):
            operations = self.operations(case, is_in_place=False)
            for number in range(self.loop.warmup):
                operations[number % len(operations)]()
            self.clock.synchronize()

    def measure(self, case: Case, cycle: int) -> results.Measured:
        halves = [self._half(case, cycle, is_in_place=each) for each in (False, True)]
        return results.Measured(
            self.row(case, *(half.side for half in halves)),
            *halves,
            cycle=cycle,
            at=datetime.now(),  # noqa: DTZ005  local, as nccl-tests prints it
        )

    def row(
        self,
        case: Case,
        out_of_place: results.Side | None,
        in_place: results.Side | None,
    ) -> results.Row:
        shape, dtype = self.spec(case).shape, case.dtype
        call = (dtype.name, case.op, case.root)
        size_bytes = shape.span * dtype.num_bytes
        return results.Row(size_bytes, shape.count, *call, out_of_place, in_place)

    def time(self, case: Case, *, is_in_place: bool) -> list[Elapsed]:
        if self.loop.checks:
            self._fill(case)
        operations = self.operations(case, is_in_place=is_in_place)
        with self.watchdog.watching(str(case)):
            operations[0]()
            self.clock.synchronize()
            self.clock.barrier()
            own = self.clock.time(operations, self.loop)
            times = self.ranks.exchange([own.total_s, own.called_s, *own.iterations_s])
        return [Elapsed(each[0], each[1], tuple(each[2:])) for each in times]

    def combined_us(self, times_s: list[float]) -> float:
        count = self.loop.iterations * self.loop.aggregated
        return combine(times_s, self.loop.average) / count * 1e6

    def check(self, case: Case, cycle: int, *, is_in_place: bool) -> list[float]:
        if not self.loop.checks or (is_in_place and not case.test.is_in_place_checked):
            return []
        spec = self.spec(case)
        views = self.buffers.views(spec, is_in_place=is_in_place)
        canaries = self.buffers.canaries(spec, is_in_place=is_in_place)
        operation = make_operation(spec, self.communicator, views)
        totals: list[float] = []
        for number in range(self.loop.checks):
            inputs = self._inputs(case, cycle * self.loop.checks + number)
            expected = prepare(spec, inputs, views, canaries)
            with self.watchdog.watching(f"check of {case}"):
                self.clock.synchronize()
                self.clock.barrier()
                operation()
                self.clock.synchronize()
                tolerance = inputs.tolerance if case.test.has_op else 0
                wrong = count_wrong(canaries, expected, tolerance)
                totals.append(sum(each[0] for each in self.ranks.exchange([wrong])))
        return totals

    def side(
        self,
        case: Case,
        time_us: float,
        counts: Sequence[float],
        called_us: float | None = None,
    ) -> results.Side:
        """Compute one half of a row; ``called_us`` replaces the time that is shown."""
        size, width = self.communicator.size, case.dtype.num_bytes
        moved = catalog.base_bytes(case.test, self.spec(case).shape, width, size)
        algbw = moved / time_us / 1e3 if time_us else 0.0
        busbw = algbw * case.test.factor.value_for(size)
        shown_us = time_us if called_us is None else called_us
        return results.Side(shown_us, algbw, busbw, sum(counts) if counts else None)

    def _half(self, case: Case, cycle: int, *, is_in_place: bool) -> results.Half:
        elapsed = self.time(case, is_in_place=is_in_place)
        time_us = self.combined_us([each.total_s for each in elapsed])
        called_us = iterations = None
        if self.loop.is_cpu_time:
            called_us = self.combined_us([each.called_s for each in elapsed])
        counts = self.check(case, cycle, is_in_place=is_in_place)
        if self.loop.is_each_timed:
            times = [[t * 1e6 for t in each.iterations_s] for each in elapsed]
            iterations = results.IterationTimes(times, self.loop.skipped)
        side = self.side(case, time_us, counts, called_us)
        return results.Half(side, iterations, sum(count > 0 for count in counts))

    def _inputs(self, case: Case, seed: int) -> ReductionInputs:
        size, device = self.communicator.size, self.ranks.device
        return ReductionInputs(case.dtype, case.op, size, seed, device)

    def _fill(self, case: Case) -> None:
        count = self.loop.iterations * self.loop.aggregated
        inputs = self._inputs(case, 0) if case.test.has_op else None
        tile = _tile(inputs, self.communicator.rank, self.ranks.device)
        # Element sizes divide 8; unaligned buffers begin a few elements later.
        num_bytes = count * self.spec(case).shape.span * case.dtype.num_bytes
        self.buffers.fill(tile, num_bytes + 8 * self.loop.unaligned_by)


@lru_cache(maxsize=4)
def _tile(reduction: ReductionInputs | None, rank: int, device: torch.device) -> Tensor:
    if reduction is None:
        return random_bytes(0, rank, 0, _TILE_BYTES, device)
    count = _TILE_BYTES // reduction.dtype.num_bytes
    return reduction.input_of(rank, 0, count).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class SweepBench:
    """Measures all sweeps on one engine."""

    rows: RowBench
    options: Options
    is_stopped: Callable[[], bool]  # this rank's user has stopped the run

    def run(self, report: Callable[[results.Measured | str], None]) -> results.Reason:
        """Measure all rows and pass them, and remarks, to ``report``; collective."""
        test, size = self.options.test, self.rows.communicator.size
        if not catalog.is_possible(test, size):
            report(f"nRanks {size} is not a power of 2, skipping")
            return results.Reason.COMPLETE
        pairs, skipped = self.possible()
        for text in skipped:
            report(text)
        started = monotonic()
        cycles = self.options.loop.cycles
        for cycle in range(cycles) if cycles else count():
            for case in self.cases(pairs):
                report(self.rows.measure(case, cycle))
                reason = self.agree_to_stop(started)
                if reason:
                    return reason
        return results.Reason.COMPLETE

    def cases(self, pairs: list[tuple[catalog.DType, str]]) -> Iterator[Case]:
        """Yield the cases of one sweep; warm up each type, operation and root first."""
        test, sweep = self.options.test, self.options.sweep
        for dtype, op in pairs:
            for root in sweep.roots(test, self.rows.communicator.size):
                sizes = list(sweep.sizes())
                cases = [Case(test, dtype, op, root, size) for size in sizes]
                if self.options.loop.warmup:
                    for case in cases:
                        self.rows.warm_up(case)
                yield from cases

    def agree_to_stop(self, started_s: float) -> results.Reason:
        """Agree across ranks on a reason to stop; ``COMPLETE`` if there is none."""
        duration_s = self.options.loop.duration_s
        is_over = bool(duration_s) and monotonic() - started_s > duration_s
        own = results.Reason.DURATION if is_over else results.Reason.COMPLETE
        own = results.Reason.STOPPED if self.is_stopped() else own
        test = self.options.test.name
        with self.rows.watchdog.watching(f"{test}: the agreement to go on"):
            reasons = self.rows.ranks.exchange([float(own)])
        return results.Reason(int(max(each[0] for each in reasons)))

    def possible(self) -> tuple[list[tuple[catalog.DType, str]], list[str]]:
        """Return the supported types and operations, and notes on unsupported ones."""
        sweep, communicator = self.options.sweep, self.rows.communicator
        possible: list[tuple[catalog.DType, str]] = []
        skipped: list[str] = []
        for dtype, op in product(sweep.dtypes, sweep.ops):
            spec = self.rows.spec(Case(self.options.test, dtype, op, -1, 1))
            target = getattr(torch, dtype.torch_name)
            tensor = torch.zeros(1, dtype=target, device=self.rows.ranks.device)
            reduce_op, prescale = spec.reduce_op, spec.prescale
            try:
                if self.options.test.has_op:
                    communicator.all_reduce(tensor, reduce_op, prescale=prescale).wait()
                possible.append((dtype, op))
            except UsageError as error:
                if len(sweep.dtypes) == len(sweep.ops) == 1:
                    raise UnsupportedError(str(error)) from error
                skipped.append(f"skipped: {dtype.name} {op}: {error}")
        return possible, skipped


@dataclass(frozen=True, slots=True)
class EngineComparison:
    """Measures rows on several engines in turn, so that slow periods affect all."""

    benches: Mapping[str, RowBench]  # the first is the reference
    options: Options
    is_stopped: Callable[[], bool]

    def run(self, report: Callable[[Compared | str], None]) -> results.Reason:
        """Measure all rows and pass them, and remarks, to ``report``; collective."""
        sweeps = {
            name: SweepBench(bench, self.options, self.is_stopped)
            for name, bench in self.benches.items()
        }
        found: list[list[tuple[catalog.DType, str]]] = []
        for name, sweep in sweeps.items():
            try:
                pairs, skipped = sweep.possible()
            except UnsupportedError as error:
                raise UnsupportedError(f"engine {name}: {error}") from error
            found.append(pairs)
            for text in skipped:
                report(f"{name}: {text}")
        common = [pair for pair in found[0] if all(pair in each for each in found)]
        started = monotonic()
        all_cases = (sweep.cases(common) for sweep in sweeps.values())
        for case, *_ in zip(*all_cases, strict=True):
            report(self._compare(case))
            reason = next(iter(sweeps.values())).agree_to_stop(started)
            if reason:
                return reason
        return results.Reason.COMPLETE

    def _compare(self, case: Case) -> Compared:
        is_in_place = case.test.is_in_place_checked
        times: dict[str, list[float]] = {name: [] for name in self.benches}
        for _ in range(self.options.engines.rounds):
            for name, bench in self.benches.items():
                elapsed = bench.time(case, is_in_place=is_in_place)
                time_us = bench.combined_us([each.total_s for each in elapsed])
                times[name].append(time_us)
        rows: dict[str, results.Row] = {}
        for name, bench in self.benches.items():
            counts = bench.check(case, 0, is_in_place=is_in_place)
            side = bench.side(case, statistics.median(times[name]), counts)
            sides = (None, side) if is_in_place else (side, None)
            rows[name] = bench.row(case, *sides)
        return Compared(rows)
