"""Schedules of pipelines have the known idle time; stages are cut evenly."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, strategies as st

from ronde.errors import UsageError
from ronde.parallel import Pipeline, ScheduleName, cut_evenly

GPIPE, ONE_F_ONE_B, INTERLEAVED = ScheduleName


# Simulated once with torch's own lists of actions, but for 1F1B.
@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "idle", "interleaved_idle"),
    [(2, 4, 0.200, 0.111), (4, 8, 0.273, 0.158), (8, 32, 0.179, 0.099)],
)
def test_known_figures(
    num_ranks: int, num_microbatches: int, idle: float, interleaved_idle: float
) -> None:
    shares = (idle, idle, interleaved_idle)
    for name, share in zip(ScheduleName, shares, strict=True):
        num_chunks = 2 if name is INTERLEAVED else 1
        plan = Pipeline(name, num_ranks, num_microbatches, num_chunks)
        assert round(plan.idle_share, 3) == share


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ((GPIPE, 0, 4), r"^num_ranks must be at least 1, got 0"),
        (
            (ONE_F_ONE_B, 2, 4, 2),
            r"^num_chunks must be 1 with schedule 1F1B, got 2\. Use",
        ),
        ((INTERLEAVED, 4, 6, 2), r"^num_microbatches must be a multiple of num_ranks,"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    pipeline: tuple[ScheduleName, int, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Pipeline(*pipeline)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_cuts_are_the_evenest_that_there_are(
    costs: list[int], data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    stages = cut_evenly(costs, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert len(stages) == num_stages
    assert all(stages)
    every = (
        pairwise((0, *cuts, len(costs)))
        for cuts in combinations(range(1, len(costs)), num_stages - 1)
    )
    best = min(max(sum(costs[a:b]) for a, b in each) for each in every)
    assert max(sum(costs[layer] for layer in stage) for stage in stages) == best


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^each stage needs at least one layer, got"):
        cut_evenly([1.0, 1.0], 3)
