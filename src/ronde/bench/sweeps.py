"""Rows, sweeps and engines side by side: timed and verified."""

import statistics
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import count, islice
from time import monotonic

import torch
from torch import Tensor

from ronde.bench.catalog import (
    Collective,
    DType,
    Matrix,
    Shape,
    Spread,
    Traffic,
    base_bytes,
    is_possible,
    shape_of,
    shape_of_matrix,
)
from ronde.bench.checking import Checker, ReductionInputs, in_elements, random_bytes
from ronde.bench.comparison import Compared
from ronde.bench.measured import Half, IterationTimes, Measured, Reason, Remark
from ronde.bench.operations import Buffers, Maker, Operation, Participant
from ronde.bench.options import Loop, Options, UnsupportedError
from ronde.bench.ranks import Ranks
from ronde.bench.results import Row, Side
from ronde.bench.timing import Clock, Elapsed, Watchdog, combine
from ronde.collectives import Communicator
from ronde.errors import UsageError

_TILE_BYTES = 1 << 17


@dataclass(frozen=True, slots=True)
class Case:
    """What one row is of."""

    test: Collective
    dtype: DType  # type of the elements
    op: str  # the reduction, or what the cell says
    root: int  # the root, or -1
    size_bytes: int  # what the sweep asks for


@dataclass(frozen=True, slots=True)
class RowBench:
    """Measures rows on one communicator."""

    ranks: Ranks
    communicator: Communicator  # who moves the bytes
    buffers: Buffers  # what they are moved in
    clock: Clock  # how the device is timed
    loop: Loop
    traffic: Traffic  # who sends how much in ``alltoallv``
    watchdog: Watchdog  # notices what does not end

    def shape(self, case: Case) -> tuple[Shape, Matrix]:
        """Return the sizes of a case, and its matrix in elements if it has one."""
        size, width = self.communicator.size, case.dtype.num_bytes
        shape = shape_of(case.test, case.size_bytes, width, size)
        if case.test.spread is not Spread.MATRIX:
            return shape, ()
        matrix = self.traffic.matrix(shape.count * width * size, size)
        count = 0 if self.traffic.given else shape.count
        return shape_of_matrix(matrix, width, count), in_elements(matrix, width)

    def place(self, case: Case, matrix: Matrix) -> Participant:
        group = self.communicator
        return Participant(group.rank, group.size, case.root, matrix)

    def operations(self, case: Case, *, is_in_place: bool) -> list[Operation]:
        """Return a timed loop's operations, each on memory of its own if it can."""
        shape, matrix = self.shape(case)
        place = self.place(case, matrix)
        maker = Maker(case.test, self.communicator, case.op, place)
        places = self.buffers.places(
            case.dtype, shape, place.rank, is_in_place=is_in_place
        )
        count = self.loop.iterations * self.loop.aggregated
        return [maker.make(views) for views in islice(places, count)]

    def warm_up(self, case: Case) -> None:
        with self.watchdog.watching(f"warm-up of {_name(case)}"):
            operations = self.operations(case, is_in_place=False)
            for number in range(self.loop.warmup):
                operations[number % len(operations)]()
            self.clock.synchronize()

    def measure(self, case: Case, cycle: int) -> Measured:
        """Measure and verify one row; collective over all ranks of the world."""
        out_of_place = self._half(case, cycle, is_in_place=False)
        in_place = self._half(case, cycle, is_in_place=True)
        row = self.row(case, out_of_place.side, is_in_place=False)
        return Measured(
            replace(row, in_place=in_place.side),
            out_of_place=out_of_place,
            in_place=in_place,
            cycle=cycle,
            num_iterations=self.loop.iterations,
            at=datetime.now(),  # noqa: DTZ005  local, as nccl-tests prints it
        )

    def row(self, case: Case, side: Side, *, is_in_place: bool) -> Row:
        shape, _ = self.shape(case)
        return Row(
            size_bytes=shape.span * case.dtype.num_bytes,
            count=shape.count,
            dtype=case.dtype.name,
            redop=case.op,
            root=case.root,
            out_of_place=None if is_in_place else side,
            in_place=side if is_in_place else None,
        )

    def time(self, case: Case, *, is_in_place: bool) -> list[Elapsed]:
        """Time one place of a case; return what every rank's clock says."""
        operations = self.operations(case, is_in_place=is_in_place)
        with self.watchdog.watching(_name(case)):
            operations[0]()
            self.clock.synchronize()
            self.clock.barrier()
            own = self.clock.time(operations, self.loop)
            told = self.ranks.exchange([own.total_s, own.called_s, *own.iterations_s])
        return [Elapsed(each[0], each[1], tuple(each[2:])) for each in told]

    def time_us(self, case: Case, *, is_in_place: bool) -> float:
        """Return the time of one operation, as ``-a`` combines the ranks'."""
        if self.loop.checks:
            self._fill(case)
        elapsed = self.time(case, is_in_place=is_in_place)
        return self._combined_us([each.total_s for each in elapsed])

    def count_wrong(self, case: Case, *, is_in_place: bool) -> float | None:
        """Return the wrong elements over all ranks; None where nothing is checked."""
        counts = self._check(case, 0, is_in_place=is_in_place)
        return sum(counts) if counts else None

    def side(
        self,
        case: Case,
        time_us: float,
        num_wrong: float | None,
        called_us: float | None = None,
    ) -> Side:
        shape, _ = self.shape(case)
        size = self.communicator.size
        moved = base_bytes(case.test, shape, case.dtype.num_bytes, size)
        algbw = moved / time_us / 1e3 if time_us else 0.0
        busbw = algbw * case.test.factor.value_for(size)
        shown_us = time_us if called_us is None else called_us
        return Side(shown_us, algbw, busbw, num_wrong)

    def _half(self, case: Case, cycle: int, *, is_in_place: bool) -> Half:
        if self.loop.checks:
            self._fill(case)
        elapsed = self.time(case, is_in_place=is_in_place)
        time_us = self._combined_us([each.total_s for each in elapsed])
        called_us = None
        if self.loop.is_cpu_time:
            called_us = self._combined_us([each.called_s for each in elapsed])
        counts = self._check(case, cycle, is_in_place=is_in_place)
        iterations = None
        if self.loop.is_each_timed:
            times = [[t * 1e6 for t in each.iterations_s] for each in elapsed]
            iterations = IterationTimes.of_ranks(times, self.loop.skipped)
        num_wrong = sum(counts) if counts else None
        num_failed = sum(count > 0 for count in counts)
        side = self.side(case, time_us, num_wrong, called_us)
        return Half(side, iterations, num_failed)

    def _combined_us(self, times_s: list[float]) -> float:
        count = self.loop.iterations * self.loop.aggregated
        return combine(times_s, self.loop.average) / count * 1e6

    def _check(self, case: Case, cycle: int, *, is_in_place: bool) -> list[float]:
        if not self.loop.checks or (is_in_place and not case.test.is_in_place_checked):
            return []
        shape, matrix = self.shape(case)
        place = self.place(case, matrix)
        views = self.buffers.views(
            case.dtype, shape, place.rank, is_in_place=is_in_place
        )
        canaries = self.buffers.canaries(case.dtype, shape, is_in_place=is_in_place)
        maker = Maker(case.test, self.communicator, case.op, place)
        operation = maker.make(views)
        checker = Checker(case.test, shape, place, self._reduction(case, 0))
        totals: list[float] = []
        for number in range(self.loop.checks):
            seed = cycle * self.loop.checks + number
            seeded = replace(checker, reduction=self._reduction(case, seed))
            expected = seeded.prepare(views, canaries)
            with self.watchdog.watching(f"check of {_name(case)}"):
                self.clock.synchronize()
                self.clock.barrier()
                operation()
                self.clock.synchronize()
                wrong = seeded.count_wrong(views, canaries, expected)
                totals.append(sum(each[0] for each in self.ranks.exchange([wrong])))
        return totals

    def _reduction(self, case: Case, seed: int) -> ReductionInputs:
        return ReductionInputs(
            case.dtype, case.op, self.communicator.size, seed, self.ranks.device
        )

    def _fill(self, case: Case) -> None:
        shape, _ = self.shape(case)
        count = self.loop.iterations * self.loop.aggregated
        reduction = self._reduction(case, 0) if case.test.has_op else None
        tile = _tile(reduction, self.communicator.rank, self.ranks.device)
        # Elements' widths divide 8; what is unaligned begins a little later.
        shifted = 8 * self.loop.unaligned_by
        self.buffers.fill(tile, count * shape.span * case.dtype.num_bytes + shifted)


@lru_cache(maxsize=4)
def _tile(reduction: ReductionInputs | None, rank: int, device: torch.device) -> Tensor:
    if reduction is None:
        return random_bytes(0, rank, 0, _TILE_BYTES, device)
    count = _TILE_BYTES // reduction.dtype.num_bytes
    return reduction.input_of(rank, 0, count).view(torch.uint8)


def _name(case: Case) -> str:
    return (
        f"{case.test.name} of {case.size_bytes} bytes, {case.dtype.name} {case.op}, "
        f"root {case.root}"
    )


Event = Measured | Remark


@dataclass(frozen=True, slots=True)
class SweepBench:
    """Runs the sweeps that were asked for."""

    rows: RowBench  # measures one row
    options: Options  # which rows there are
    is_stopped: Callable[[], bool]  # whether the user of this rank wants an end
    is_traffic_shown: bool = False  # say of ``alltoallv`` what every rank sent

    def run(self) -> Generator[Event, None, Reason]:
        """Yield rows as they are measured; collective."""
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


@dataclass(frozen=True, slots=True)
class EngineComparison:
    """Runs the same rows on several engines."""

    benches: Mapping[str, RowBench]
    options: Options  # which rows there are, and how many rounds
    is_stopped: Callable[[], bool]  # whether the user of this rank wants an end

    def run(self) -> Generator[Compared | Remark, None, Reason]:
        """Yield rows as they are measured; collective."""
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
