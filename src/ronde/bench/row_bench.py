"""One row: timed and verified, out of place and in place."""

from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor

from ronde.bench.buffers import Buffers
from ronde.bench.catalog import Collective, Shape, Spread, base_bytes, shape_of
from ronde.bench.checking import Checker
from ronde.bench.dtypes import DType
from ronde.bench.iterations import IterationTimes
from ronde.bench.measured import Half, Measured
from ronde.bench.movement import Place, in_elements
from ronde.bench.operations import Maker, Operation
from ronde.bench.options import Loop
from ronde.bench.patterns import Reduction, random_bytes
from ronde.bench.ranks import Ranks
from ronde.bench.rows import Row, Side
from ronde.bench.timing import Clock, Elapsed, combine
from ronde.bench.traffic import Matrix, Traffic, shape_of_matrix
from ronde.bench.watchdog import Watchdog
from ronde.collectives import Communicator

_TILE_BYTES = 1 << 17


@dataclass(frozen=True, slots=True)
class Case:
    """What one row is of.

    Attributes:
        test: The collective.
        dtype: Type of the elements.
        op: The reduction, or what the cell says.
        root: The root, or -1.
        size_bytes: What the sweep asks for.
    """

    test: Collective
    dtype: DType
    op: str
    root: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RowBench:
    """Measures rows on one communicator.

    Attributes:
        ranks: Everybody.
        communicator: Who moves the bytes.
        buffers: What they are moved in.
        clock: How the device is timed.
        loop: How often.
        traffic: Who sends how much in ``alltoallv``.
        watchdog: Notices what does not end.
    """

    ranks: Ranks
    communicator: Communicator
    buffers: Buffers
    clock: Clock
    loop: Loop
    traffic: Traffic
    watchdog: Watchdog

    def shape(self, case: Case) -> tuple[Shape, Matrix]:
        """Return the sizes of a case, and its matrix in elements if it has one."""
        size, width = self.communicator.size, case.dtype.num_bytes
        shape = shape_of(case.test, case.size_bytes, width, size)
        if case.test.spread is not Spread.MATRIX:
            return shape, ()
        matrix = self.traffic.matrix(shape.count * width * size, size)
        count = 0 if self.traffic.given else shape.count
        return shape_of_matrix(matrix, width, count), in_elements(matrix, width)

    def place(self, case: Case, matrix: Matrix) -> Place:
        """Return this rank's place in a case."""
        group = self.communicator
        return Place(group.rank, group.size, case.root, matrix)

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
        """Run a case's operations untimed, out of place."""
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
        """Return a row with one half."""
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
        """Return half a row.

        Args:
            case: What was measured.
            time_us: Of one operation.
            num_wrong: Wrong elements, or None.
            called_us: The time to show instead.
        """
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
        """Return the wrong elements of every check, over all ranks."""
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

    def _reduction(self, case: Case, seed: int) -> Reduction:
        return Reduction(
            case.dtype, case.op, self.communicator.size, seed, self.ranks.device
        )

    def _fill(self, case: Case) -> None:
        """Write numbers to time with, which are neither tiny nor NaN."""
        shape, _ = self.shape(case)
        count = self.loop.iterations * self.loop.aggregated
        reduction = self._reduction(case, 0) if case.test.has_op else None
        tile = _tile(reduction, self.communicator.rank, self.ranks.device)
        # Elements' widths divide 8; what is unaligned begins a little later.
        shifted = 8 * self.loop.unaligned_by
        self.buffers.fill(tile, count * shape.span * case.dtype.num_bytes + shifted)


@lru_cache(maxsize=4)
def _tile(reduction: Reduction | None, rank: int, device: torch.device) -> Tensor:
    if reduction is None:
        return random_bytes(0, rank, 0, _TILE_BYTES, device)
    count = _TILE_BYTES // reduction.dtype.num_bytes
    return reduction.input_of(rank, 0, count).view(torch.uint8)


def _name(case: Case) -> str:
    return (
        f"{case.test.name} of {case.size_bytes} bytes, {case.dtype.name} {case.op}, "
        f"root {case.root}"
    )
