"""The engine that ``auto`` takes, by hosts and size."""

import pytest

from ronde.collectives import choose_engine
from ronde.world import ENGINES

SIZES = [None, 0, 4 << 10, 4097, 4 << 20, 1 << 40]


@pytest.mark.parametrize(
    ("ranks_per_host", "engines"),
    [
        ([4], ["shared_memory"] * 6),
        ([1], ["shared_memory"] * 6),
        ([1, 1], ["gloo"] * 6),
        ([2, 2], ["gloo"] * 3 + ["hierarchical"] * 3),
        ([3, 1], ["gloo"] * 3 + ["hierarchical"] * 3),
    ],
)
def test_the_engine_by_hosts_and_size(ranks_per_host, engines):
    def choose(call, device):
        return [choose_engine(ranks_per_host, call, size, device) for size in SIZES]

    assert choose("all_reduce", "cpu") == engines
    is_spread = ranks_per_host == [1, 1]
    last = "scheduled" if is_spread else engines[-1]
    assert choose("reduce_scatter", "cpu") == [*engines[:-1], last]
    assert set(choose("all_reduce", "cuda")) == {"nccl"}
    assert {*engines, last} <= set(ENGINES)
