"""Every schedule, for 1 to 64 ranks and any length: results, rounds and bytes sent."""

import math

import pytest
from hypothesis import given, strategies as st
from tests.unit.interpreter import num_sent, run

from ronde.collectives import ALGORITHMS, Chunks, Schedule, find_algorithm
from ronde.errors import UsageError
from ronde.world import ALGORITHMS as NAMES

sizes = st.integers(1, 64)
numels = st.one_of(st.integers(0, 70), st.integers(0, 2000))
names = st.sampled_from(sorted(ALGORITHMS))
shares = st.lists(st.integers(0, 9), min_size=1, max_size=64)


def own(size: int, numel: int) -> list[list[int]]:
    """Return one vector a rank, of that rank's contributions alone."""
    return [[1 << rank] * numel for rank in range(size)]


def all_of(size: int) -> int:
    return (1 << size) - 1


@given(names, sizes, numels)
def test_all_reduce_ends_with_every_contribution_once(name, size, numel):
    schedule = ALGORITHMS[name].all_reduce(size, numel)
    vectors = own(size, numel)
    run(schedule, vectors)
    assert vectors == [[all_of(size)] * numel] * size


@given(names, shares)
def test_reduce_scatter_leaves_each_rank_its_sum(name, counts):
    schedule = ALGORITHMS[name].reduce_scatter(Chunks.of_sizes(counts))
    size, numel = len(counts), sum(counts)
    vectors = own(size, numel)
    run(schedule, vectors)
    for rank, count in enumerate(counts):
        start, stop = schedule.chunks.span(rank)
        assert vectors[rank][start:stop] == [all_of(size)] * count


@given(names, shares)
def test_all_gather_brings_each_chunk_from_its_rank(name, counts):
    chunks = Chunks.of_sizes(counts)
    schedule = ALGORITHMS[name].all_gather(chunks)
    vectors = [[0] * sum(counts) for _ in counts]
    expected: list[int] = []
    for rank, count in enumerate(counts):
        start, stop = chunks.span(rank)
        vectors[rank][start:stop] = [1 << rank] * count
        expected += [1 << rank] * count
    run(schedule, vectors)
    assert vectors == [expected] * len(counts)


@given(names, sizes, numels, st.data())
def test_broadcast_brings_the_roots(name, size, numel, data):
    root = data.draw(st.integers(0, size - 1))
    vectors = own(size, numel)
    run(ALGORITHMS[name].broadcast(size, numel, root), vectors)
    assert vectors == [[1 << root] * numel] * size


def every(name: str, size: int, numel: int) -> list[Schedule]:
    algorithm = ALGORITHMS[name]
    chunks = Chunks(size, numel)
    return [
        algorithm.all_reduce(size, numel),
        algorithm.reduce_scatter(chunks),
        algorithm.all_gather(chunks),
        algorithm.broadcast(size, numel, size // 2),
    ]


@pytest.mark.parametrize("size", range(1, 65))
def test_rounds_are_as_many_as_the_formulas_say(size):
    up = math.ceil(math.log2(size))
    down = math.floor(math.log2(size))
    feeding = 1 + math.floor(math.log2(size - 1)) if size > 1 else 0
    expected = {
        "ring": [2 * (size - 1), size - 1, size - 1, size - 1],
        "tree": [2 * down, size - 1, size - 1, feeding],
        "halving_doubling": [2 * up, up, up, 2 * up],
    }
    for name, nums in expected.items():
        rounds = [list(each.of_rank(size // 2)) for each in every(name, size, 129)]
        assert [len(each) for each in rounds] == nums


@pytest.mark.parametrize("size", range(1, 65))
@pytest.mark.parametrize("name", ["ring", "halving_doubling"])
def test_no_rank_sends_more_than_it_must(name, size):
    """For lengths that all ranks share evenly: (n-1)/n of all, twice in all_reduce."""
    share = 3
    all_reduce, reduce_scatter, all_gather, _ = every(name, size, share * size)
    for rank in range(size):
        assert num_sent(all_reduce, rank) == 2 * (size - 1) * share
        assert num_sent(reduce_scatter, rank) == (size - 1) * share
        assert num_sent(all_gather, rank) == (size - 1) * share


@pytest.mark.parametrize("size", range(2, 65))
def test_two_trees_share_the_work(size):
    """All send about twice the vector in all, and none more than that."""
    half = 5
    schedule = ALGORITHMS["tree"].all_reduce(size, 2 * half)
    sent = [num_sent(schedule, rank) for rank in range(size)]
    assert max(sent) <= 4 * half
    assert sum(sent) == 4 * half * (size - 1)
    broadcast = ALGORITHMS["tree"].broadcast(size, 2 * half, 0)
    assert max(num_sent(broadcast, rank) for rank in range(size)) <= 2 * half


@given(sizes, st.integers(0, 500))
def test_chunks_are_the_rows_that_ranks_keep(size, numel):
    """As ``rows()`` splits them: the first ones take the rest."""
    chunks = Chunks(size, numel)
    lengths = [stop - start for start, stop in map(chunks.span, range(size))]
    base, extra = divmod(numel, size)
    assert lengths == [base + 1] * extra + [base] * (size - extra)
    assert chunks.start(size) == numel
    assert chunks.largest() == max(lengths)
    assert Chunks.of_sizes(lengths).largest() == max(lengths)


def test_unknown_algorithms_are_refused():
    with pytest.raises(UsageError, match=r"one of ring, tree, halving_doubling, got"):
        find_algorithm("butterfly")


def test_options_and_environment_know_the_same_names():
    assert tuple(ALGORITHMS) == NAMES
