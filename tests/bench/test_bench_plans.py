"""What is moved, timed and fits: pure parts of the benchmark."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from tests.bench.rank_benches import row_bench

from ronde.bench import (
    COLLECTIVES,
    DTYPES,
    Buffers,
    CallSpec,
    Clock,
    IterationTimes,
    TimingLoop,
    base_bytes,
    combine,
    in_elements,
    largest_row,
    pieces_of,
    require_room,
    shape_of,
    traffic_matrix,
)
from ronde.collectives import Communicator, SoloEngine
from ronde.errors import UsageError
from ronde.memory import AvailableMemory, available_memory

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "count", "size_bytes", "base", "busbw"),
    [
        # name, count, bytes of the row, bytes of algbw, busbw of 1 GB/s; n = 8, 1 MiB
        ("all_reduce", 262144, 1 << 20, 1 << 20, 1.75),
        ("reduce", 262144, 1 << 20, 1 << 20, 1.0),
        ("broadcast", 262144, 1 << 20, 1 << 20, 1.0),
        ("all_gather", 32768, 1 << 20, 1 << 20, 0.875),
        ("reduce_scatter", 32768, 1 << 20, 1 << 20, 0.875),
        ("alltoall", 32768, 1 << 20, 1 << 20, 0.875),
        ("gather", 32768, 1 << 20, 1 << 20, 0.875),
        ("scatter", 32768, 1 << 20, 1 << 20, 0.875),
        ("sendrecv", 262144, 1 << 20, 1 << 20, 1.0),
        ("hypercube", 32768, 1 << 20, 7 << 17, 1.0),
    ],
)
def test_shapes_and_factors_are_theirs(name, count, size_bytes, base, busbw):
    test = COLLECTIVES[name]
    shape = shape_of(test, 1 << 20, 4, 8)
    assert (shape.count, shape.span * 4) == (count, size_bytes)
    assert base_bytes(test, shape, 4, 8) == base
    assert test.factor.value_for(8) == busbw


def test_small_shares_are_rounded_down_to_nothing():
    """Eight float ranks: below 128 bytes there is no share of 16."""
    gathered = COLLECTIVES["all_gather"]
    counts = [shape_of(gathered, b, 4, 8).count for b in (4, 64, 127, 128, 255, 256)]
    assert counts == [0, 0, 0, 4, 4, 8]
    assert shape_of(gathered, 1000, 1, 3).count == 320
    assert shape_of(gathered, 1000, 8, 3).count == 40


@given(st.integers(1, 20), st.integers(0, 1 << 20))
def test_traffic_is_balanced(size, total):
    matrix = traffic_matrix(total, size)
    sums = {sum(row) for row in matrix} | {sum(c) for c in zip(*matrix, strict=True)}
    assert len(sums) == 1
    assert all(count % 16 == 0 for row in matrix for count in row)
    assert total - 16 * size < sums.pop() <= total


def test_traffic_grows_with_distance():
    matrix = traffic_matrix(6 << 10, 4)
    assert matrix[:2] == ((0, 1024, 2048, 3072), (3072, 0, 1024, 2048))


@given(st.sampled_from(sorted(COLLECTIVES)), st.integers(1, 8), st.integers(0, 4096))
def test_results_are_covered_once(name, size, num_bytes):
    """Pieces follow one another, and no input is read beyond its end."""
    test = COLLECTIVES[name]
    shape = shape_of(test, num_bytes, 4, size)
    matrix = in_elements(traffic_matrix(num_bytes, size), 4)
    for rank in range(size):
        used = matrix if name == "alltoallv" else ()
        place = (rank, size, size - 1, used)
        pieces = pieces_of(CallSpec(test, DTYPES["float"], "sum", shape, *place))
        for one, following in pairwise(pieces):
            assert one.start + one.count == following.start
        for piece in pieces:
            sends = shape.send if piece.source >= 0 else shape.span
            if name != "alltoallv":
                assert piece.source_start + piece.count <= sends
        if pieces:
            assert pieces[0].start == 0


def test_small_rows_move_through_the_buffer_and_large_ones_stay():
    buffers = Buffers(lambda n: torch.zeros(n, dtype=torch.uint8), 1024, 1)
    test = COLLECTIVES["all_reduce"]

    def spec(num_bytes):
        shape = shape_of(test, num_bytes, 4, 2)
        return CallSpec(test, DTYPES["float"], "sum", shape, 0, 2)

    def starts(num_bytes):
        views = buffers.moving_views(spec(num_bytes), is_in_place=False)
        return [view.receive.data_ptr() for view in views]

    small = starts(256)
    assert [b - a for a, b in pairwise(small)] == [256] * 3
    assert len(starts(1024)) == len(starts(600)) == 1
    assert len(starts(0)) == 1
    before, _ = buffers.canaries(spec(1024), is_in_place=False)
    assert starts(1024)[0] - before.data_ptr() == 256


def test_times_are_combined_as_asked():
    times = [4.0, 1.0, 7.0]
    assert [combine(times, a) for a in range(4)] == [4.0, 4.0, 1.0, 7.0]


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (TimingLoop(iterations=2, aggregated=2), "oooos"),
        (TimingLoop(iterations=2, aggregated=2, blocking=1), "osbosbosbosbs"),
        (TimingLoop(iterations=2, aggregated=2, blocking=2), "ososososs"),
        (TimingLoop(iterations=2, aggregated=2, blocking=3), "oosboosbs"),
        (TimingLoop(iterations=2, is_each_timed=True), "oos"),
    ],
)
def test_what_happens_between_operations(loop, expected):
    seen = []
    clock = Clock(lambda: seen.append("s"), lambda: seen.append("b"))
    elapsed = clock.time([lambda: seen.append("o")], loop)
    assert "".join(seen) == expected
    assert 0 <= elapsed.called_s <= elapsed.total_s
    assert len(elapsed.iterations_s) == (2 if loop.is_each_timed else 0)


def test_a_time_is_that_of_one_operation():
    loop = TimingLoop(iterations=5, aggregated=4)
    bench = row_bench(Communicator(SoloEngine()), loop=loop)
    assert bench.combined_us([2.0]) == 100_000.0


def test_iterations_are_summed_up_without_those_skipped():
    ranks = [[100.0, *range(1, 101)], [0.0, *[0.5] * 100]]
    times = IterationTimes(ranks, 1)
    assert times.kept_us == list(range(1, 101))
    assert times.mean_us == 50.5
    percents = [1, 50, 95, 99, 100]
    assert [times.percentile_us(p) for p in percents] == percents
    assert times.deviation_us == pytest.approx((9999 / 12) ** 0.5)
    assert times.variation_percent == pytest.approx(100 * (9999 / 12) ** 0.5 / 50.5)
    assert times.times_us[0] == 100.0


def host(root: Path, *, available_kib: int, groups: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 99 kB\nMemAvailable: {available_kib} kB\n"
    )
    (root / "proc/self/cgroup").write_text("0::/job/step\n")
    for name, text in groups.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_scarcest_memory_counts(tmp_path):
    plain = host(tmp_path / "a", available_kib=4096, groups={})
    assert available_memory(plain).num_bytes == 4 << 20
    limited = host(
        tmp_path / "b",
        available_kib=4096,
        groups={
            "job/memory.max": "3000000",
            "job/memory.current": "2000000",
            "job/memory.stat": "anon 5\ninactive_file 500\n",
            "job/step/memory.max": "max",
            "job/step/memory.current": "1000",
        },
    )
    memory = available_memory(limited)
    assert memory.num_bytes == 1000500
    assert "control group" in memory.source


def test_a_reserve_is_kept():
    assert largest_row(64 * GIB, 1, is_checked=True) == (64 - 5) * GIB // 3
    assert largest_row(16 * GIB, 2, is_checked=False) == (16 - 2) * GIB // 4
    assert largest_row(17 * GIB, 1, is_checked=False) == (17 - 3) * GIB // 2
    assert largest_row(2 * GIB, 1, is_checked=False) == GIB // 2


def test_what_does_not_fit_is_refused_with_what_would():
    memory = AvailableMemory(200, "the memory", "")
    with pytest.raises(
        UsageError, match=r"-b must be at most 100 .*got 101: .*Give -b"
    ):
        require_room(101, 100, memory)
    require_room(100, 100, memory)
