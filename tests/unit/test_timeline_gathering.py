"""Ranks compare clocks and hand in their records; nobody hangs for who is missing."""

import threading
import time

import pytest
import torch.distributed
from torch.distributed import PrefixStore, TCPStore

from ronde.timeline import CHUNK_BYTES, Gathering, gathering


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Rank:
    """One rank's end, in a thread."""

    def __init__(self, store, rank, size, clock="a", ahead_ns=0):
        self.bounds = []
        own = PrefixStore("timeline", store.clone())
        self.ahead_ns = ahead_ns
        self.gathering = Gathering(
            own,
            rank,
            size,
            clock=clock,
            on_bound=self.bounds.append,
            now_ns=lambda: time.monotonic_ns() + ahead_ns,
        )
        self.gathering.start()


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
    deadline = time.monotonic() + 20
    while not any(rank.bounds for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    together(*(rank.gathering.compare_again for rank in ranks))
    # One of the two measured for both.
    assert sorted(len(rank.bounds) for rank in ranks) == [0, 0, 2]
    assert not ranks[0].bounds
    for bound in (bound for rank in ranks for bound in rank.bounds):
        assert bound.low_ns <= -ahead_ns <= bound.high_ns
        assert bound.high_ns - bound.low_ns < 50_000_000


def test_a_rank_that_records_nothing_is_not_waited_for(store):
    rank = Rank(store, 0, 2)
    start = time.monotonic()
    rank.gathering.compare_again()
    assert rank.gathering.collect() == ({}, [])
    assert time.monotonic() - start < 2


def test_a_rank_that_is_gone_is_waited_for_a_while(store, monkeypatch):
    monkeypatch.setattr(gathering, "END_PATIENCE_S", 0.2)
    monkeypatch.setattr(gathering, "TAKE_S", 60.0)
    ranks = [Rank(store, rank, 3) for rank in range(3)]
    ranks[1].gathering.compare_again()

    def collect():
        ranks[0].gathering.compare_again()
        # Who is there is not waited for.
        while not ranks[0].gathering._store.check(["part/1"]):
            time.sleep(0.005)
        return ranks[0].gathering.collect()

    got, is_taken = together(collect, lambda: ranks[1].gathering.hand_in(b"x"))
    assert got == ({1: b"x"}, [2])
    assert is_taken
    monkeypatch.setattr(gathering, "TAKE_S", 0.2)
    ranks[2].gathering.compare_again()
    assert not ranks[2].gathering.hand_in(b"late")


def test_a_foreign_clock_that_is_gone_is_waited_for_a_while(store, monkeypatch):
    monkeypatch.setattr(gathering, "END_PATIENCE_S", 0.2)
    monkeypatch.setattr(gathering, "START_PATIENCE_S", 0.2)
    first, other = Rank(store, 0, 2), Rank(store, 1, 2, clock="b")
    other.gathering._closing.set()
    other.gathering._thread.join()
    first.gathering.compare_again()
    assert first.gathering.collect() == ({}, [1])


def test_a_store_that_is_gone_is_told():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = Rank(store, 1, 2)
    del store
    rank.gathering.compare_again()
    with pytest.raises(torch.distributed.DistError):
        rank.gathering.hand_in(b"x")
