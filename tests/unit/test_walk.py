"""The walk over buckets, against a simulation in ticks and known results."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ronde.plan import walk

TICKS = st.integers(0, 12)
BUCKETS = st.lists(st.tuples(TICKS, TICKS), max_size=8)  # ready and cost


def simulate(buckets, backward):
    """Return the exposed, last and overlapped ticks of a line that serves in order."""
    waiting = [list(bucket) for bucket in buckets]
    now = last = overlapped = 0
    while waiting:
        ready, left = waiting[0]
        if ready <= now and not left:
            waiting.pop(0)
            last = now
            continue
        if ready <= now:
            waiting[0][1] -= 1
            overlapped += now < backward
        now += 1
    return max(0, last - backward), last, overlapped


@given(BUCKETS, TICKS)
def test_it_is_a_line_that_serves_one_bucket_at_a_time(buckets, backward):
    ready, cost = zip(*buckets, strict=True) if buckets else ((), ())
    assert walk(ready, cost, backward) == simulate(buckets, backward)


@given(BUCKETS, TICKS, st.floats(0, 0.5))
def test_transfers_slow_what_they_overlap_with(buckets, backward, interference):
    ready, cost = zip(*buckets, strict=True) if buckets else ((), ())
    alone = walk(ready, cost, backward)
    slowed = walk(ready, cost, backward, interference)
    stretched = backward + interference * alone.overlapped_s
    assert slowed.exposed_s == max(0, alone.end_s - stretched)
    assert slowed[1:] == alone[1:]
    assert stretched + slowed.exposed_s >= backward + alone.exposed_s


def test_known_results():
    ready, backward = [2.0, 5.0, 10.0], 10.0
    assert walk(ready, [0.0] * 3, backward) == (0.0, 10.0, 0.0)  # no communication
    assert walk([backward] * 3, [1, 2, 3], backward) == (6.0, 16.0, 0.0)  # no overlap
    assert walk([backward], [4.0], backward) == (4.0, 14.0, 0.0)  # one bucket
    assert walk(ready, [1.0, 1.0, 0.5], backward) == (0.5, 10.5, 2.0)  # only the last
    assert walk(ready, [9.0] * 3, backward) == (19.0, 29.0, 8.0)  # the line is busy
    assert walk([], [], backward) == (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="argument"):
        walk(ready, [1.0], backward)


def test_costs_may_be_draws():
    rng = np.random.default_rng(3)
    cost = rng.uniform(0, 4, (5, 1, 7))
    backward = rng.uniform(5, 9, (4, 1))
    ready = np.multiply.outer(np.array([0.1, 0.3, 0.5, 0.8, 1.0]), backward)
    both = walk(ready, cost, backward)
    for row in range(4):
        for draw in range(7):
            one = walk(ready[:, row, 0], cost[:, 0, draw], backward[row, 0])
            assert [each[row, draw] for each in both] == pytest.approx(list(one))
