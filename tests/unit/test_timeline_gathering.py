"""Ranks compare clocks and hand in their records; nobody hangs for who is missing."""

import itertools
import threading
from datetime import timedelta

import pytest
import torch.distributed
from tests.limits import HANG_S
from torch.distributed import PrefixStore, TCPStore

from ronde.timeline import CHUNK_BYTES, Gathering, GatheringOptions

LONG = GatheringOptions(*[HANG_S] * 4)
SHORT = GatheringOptions(*[0.2] * 4)
TICKS = itertools.count()
"""The time on all ranks: it goes on when somebody looks at it."""


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Rank:
    """One rank's end, in a thread."""

    def __init__(self, store, rank, size, clock="a", ahead_ns=0, options=LONG):
        self.bounds = []
        self.store = PrefixStore("timeline", store.clone())
        self.gathering = Gathering(
            self.store,
            rank,
            size,
            clock=clock,
            on_bound=self._take_bound,
            options=options._replace(now_ns=lambda: next(TICKS) + ahead_ns),
        )
        self.gathering.start()

    def _take_bound(self, bound):
        self.bounds.append(bound)
        self.store.set("bounds", b"")


def await_key(store, key):
    store.clone().wait([key], timedelta(seconds=HANG_S))


def together(*calls):
    """Call all at the same time; return their results."""
    results = [None] * len(calls)

    def call(index):
        results[index] = calls[index]()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_parts_of_any_size_reach_rank_0(store):
    ranks = [Rank(store, rank, 3) for rank in range(3)]
    parts = [b"", b"x" * 10, bytes(range(256)) * (3 * CHUNK_BYTES // 256)]

    def hand_in(rank):
        ranks[rank].gathering.compare_again()
        return ranks[rank].gathering.hand_in(parts[rank])

    def collect():
        ranks[0].gathering.compare_again()
        return ranks[0].gathering.collect()

    got, *are_taken = together(collect, lambda: hand_in(1), lambda: hand_in(2))
    assert got == ({1: parts[1], 2: parts[2]}, [])
    assert are_taken == [True, True]
    assert [rank.bounds for rank in ranks] == [[], [], []]


def test_a_foreign_clock_is_measured_at_both_ends(store):
    ahead_ns = 123_456_789_000
    ranks = [
        Rank(store, 0, 3),
        Rank(store, 1, 3, clock="b", ahead_ns=ahead_ns),
        Rank(store, 2, 3, clock="b", ahead_ns=ahead_ns),
    ]
    await_key(store, "timeline/bounds")
    together(*(rank.gathering.compare_again for rank in ranks))
    # One of the two measured for both.
    assert sorted(len(rank.bounds) for rank in ranks) == [0, 0, 2]
    assert not ranks[0].bounds
    for bound in (bound for rank in ranks for bound in rank.bounds):
        assert bound.low_ns <= -ahead_ns <= bound.high_ns
        assert bound.high_ns - bound.low_ns == 2


def test_a_rank_that_is_gone_is_waited_for_a_while(store):
    ranks = [
        Rank(store, rank, 3, options=options)
        for rank, options in enumerate((SHORT, LONG, SHORT))
    ]
    ranks[1].gathering.compare_again()

    def collect():
        ranks[0].gathering.compare_again()
        # The one that is there is not waited for.
        await_key(store, "timeline/part/1")
        return ranks[0].gathering.collect()

    got, is_taken = together(collect, lambda: ranks[1].gathering.hand_in(b"x"))
    assert got == ({1: b"x"}, [2])
    assert is_taken
    ranks[2].gathering.compare_again()
    assert not ranks[2].gathering.hand_in(b"late")


def test_a_store_that_is_gone_is_an_error():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = Rank(store, 1, 2)
    del store
    rank.gathering.compare_again()
    with pytest.raises(torch.distributed.DistError):
        rank.gathering.hand_in(b"x")
