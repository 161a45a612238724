"""One loss among 100 simulated ranks, by the benchmark's controller."""

import pytest
from benchmarks.elastic_scale import lose_one

RANKS, SLOTS = 100, 8
HOSTS = 13


@pytest.mark.parametrize("num_spares", [0, 1])
def test_one_loss_is_three_frames_a_host(num_spares):
    cost, members = lose_one(RANKS, num_spares, SLOTS)
    numbers = [worker.id for worker in members]
    if num_spares:
        expected = list(range(RANKS))
        expected[RANKS // 2] = RANKS  # the spare has the lost rank
        assert numbers == expected
    else:
        assert numbers == [n for n in range(RANKS) if n != RANKS // 2]
    # Exited; ViewEnded, Settled, ViewBegins a host; the whole view to the spare.
    assert cost.num_frames == 1 + 3 * HOSTS + num_spares
    # Nobody but a newcomer gets the whole view.
    assert cost.bytes_sent < HOSTS * 600 + num_spares * RANKS * 50
