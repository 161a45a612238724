"""The rounds, loads and costs of every schedule, for 1 to 64 ranks and any length."""

import math

import pytest
from hypothesis import given, strategies as st
from tests.unit.interpreter import crossings, heaviest, num_sent

from ronde.collectives import (
    ALGORITHMS,
    Action,
    Chunks,
    LinkCost,
    LinkCosts,
    Schedule,
    find_algorithm,
    price,
)
from ronde.errors import UsageError
from ronde.topology import RankLayout

sizes = st.integers(1, 64)
numels = st.one_of(st.integers(0, 70), st.integers(0, 2000))
names = st.sampled_from(sorted(ALGORITHMS))


def every(name: str, size: int, numel: int) -> list[Schedule]:
    algorithm = ALGORITHMS[name]
    chunks = Chunks(size, numel)
    return [
        algorithm.all_reduce(size, numel),
        algorithm.reduce_scatter(chunks),
        algorithm.all_gather(chunks),
        algorithm.broadcast(size, numel, size // 2),
    ]


@given(names, sizes, numels)
def test_loads_are_what_the_busiest_rank_does(name, size, numel):
    for schedule in every(name, size, numel):
        loads = [load.numel for load in schedule.loads for _ in range(load.num_rounds)]
        assert loads == heaviest(schedule), schedule.name


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
        assert [s.num_rounds for s in every(name, size, 129)] == nums


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


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_world_of_many_is_priced_at_once(name):
    """27,600 ranks: the loads need no rank's part, and a part no other rank's."""
    size, numel = 27_600, 25_600_000
    schedule = ALGORITHMS[name].all_reduce(size, numel)
    link = LinkCost(alpha_s=5e-6, beta_s_per_byte=1 / 10e9)
    layout = RankLayout(size, size, 1)
    assert 0.002 < price(schedule, layout, LinkCosts(link, link)) < 1.0
    part = list(schedule.of_rank(size - 1))
    assert len(part) == schedule.num_rounds


@given(names, sizes, numels)
def test_rounds_that_reduce_are_marked(name, size, numel):
    for schedule in every(name, size, numel):
        found = [False] * schedule.num_rounds
        for rank in range(size):
            for index, steps in enumerate(schedule.of_rank(rank)):
                found[index] |= any(step.action is Action.REDUCE for step in steps)
        marks = [load.is_reduced for load in schedule.loads for _ in range(load[0])]
        assert marks == found, schedule.name


@pytest.mark.parametrize("size", range(2, 40))
def test_overlapping_rounds_are_all_that_a_rank_does(size):
    """It is exact from 4 ranks on, and a bound below."""
    for name in ("ring", "tree"):
        all_reduce, _, _, broadcast = every(name, size, 128)
        for schedule in (all_reduce, broadcast):
            if schedule.overlapping:
                busiest = max(num_sent(schedule, rank) for rank in range(size))
                total = sum(load.numel for load in schedule.overlapping)
                assert busiest == total if size > 3 else busiest <= total


# The even numbers of ranks on a node, and of nodes.
LAYOUTS = [(g, num_nodes) for g in range(1, 9) for num_nodes in range(2, 9)]


@pytest.mark.parametrize(("g", "num_nodes"), LAYOUTS)
def test_loads_cross_the_borders_of_nodes_as_counted(g, num_nodes):
    size = g * num_nodes
    is_square = size & (size - 1) == 0
    for name, algorithm in ALGORITHMS.items():
        schedule = algorithm.all_reduce(size, 2 * size)
        totals = crossings(schedule, g)
        crossing = [max(map(max, groups)) for groups in totals]
        loads = [load for load in schedule.loads for _ in range(load.num_rounds)]
        counted = [load.num_crossing(g) * load.numel for load in loads]
        if name == "ring":
            assert counted == crossing
        if name != "tree" or is_square:
            assert all(map(int.__ge__, counted, crossing))
        assert all(2 * ours >= n for ours, n in zip(counted, crossing, strict=True))
        # Each of two nodes has one border instead of two.
        assert max(counted) <= max(crossing) * (4 if num_nodes == 2 else 2)
        if schedule.overlapping:
            of_nodes = [
                map(sum, zip(*each, strict=True)) for each in zip(*totals, strict=True)
            ]
            busiest = max(map(max, of_nodes))
            roles = 3 / 2 if g > 1 else 1  # as in ``pricing``
            over = [load.numel * load.num_crossing(g) for load in schedule.overlapping]
            assert busiest <= roles * sum(over) * 4 / 3
            if is_square and num_nodes > 2:
                assert busiest == roles * sum(over)


@given(sizes, st.integers(0, 500))
def test_chunks_are_the_rows_that_ranks_keep(size, numel):
    """As ``rows()`` splits them: the first ones take the rest."""
    chunks = Chunks(size, numel)
    lengths = [stop - start for start, stop in map(chunks.span, range(size))]
    base, extra = divmod(numel, size)
    assert lengths == [base + 1] * extra + [base] * (size - extra)
    assert chunks.start(size) == numel
    assert chunks.largest() == max(lengths)


def test_unknown_algorithms_are_refused():
    with pytest.raises(UsageError, match=r"one of ring, tree, halving_doubling, got"):
        find_algorithm("butterfly")
