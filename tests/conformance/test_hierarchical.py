"""What the engine ``hierarchical`` does beyond the suite: pieces, deaths, places."""

import os
import signal

import pytest
import torch
from tests.limits import HANG_S
from tests.ranks import job_store

from ronde.collectives import (
    Communicator,
    EngineConfig,
    HostGroups,
    connect,
    store_at,
    two_levels,
)
from ronde.errors import CollectiveError, PeerLostError, UsageError

NEVER_S = 5 * HANG_S
NUMEL = 1_300_007
"""Some pieces, and a rest that ranks do not share evenly."""


def on(hosts, algorithm=""):
    def connecting(claim):
        config = EngineConfig(claim, NEVER_S, algorithm)
        return Communicator(two_levels(config, hosts[claim.rank]))

    return connecting


def move_much(communicator):
    """Sums of small whole numbers are exact in float32, and in 16 bits."""
    rank, size = communicator.rank, communicator.size
    pattern = torch.arange(NUMEL) % 7
    tensors = [(pattern + r).float() for r in range(size)]
    total = sum(tensors)
    shared = communicator.allocate(NUMEL, torch.float32).copy_(tensors[rank])
    works = [
        communicator.all_reduce(tensors[rank].clone()),
        communicator.all_reduce(shared),
        communicator.all_reduce(tensors[rank].bfloat16()),
        communicator.reduce_scatter(tensors[rank]),
        communicator.broadcast(tensors[rank].clone(), size - 1),
        communicator.all_gather(pattern[: 300_000 + rank] + rank),
        communicator.all_gather(pattern[: 300_000 * rank] + rank),
    ]
    reduced, in_place, narrow, own, copied, even, uneven = [w.wait() for w in works]
    assert torch.equal(reduced, total)
    assert in_place is shared
    assert torch.equal(shared, total)
    assert torch.equal(narrow, total.bfloat16())
    first = sum(t.numel() for t in torch.tensor_split(total, size)[:rank])
    assert torch.equal(own, total[first : first + own.numel()])
    assert torch.equal(copied, tensors[-1])
    assert torch.equal(
        even, torch.cat([pattern[: 300_000 + r] + r for r in range(size)])
    )
    assert torch.equal(
        uneven, torch.cat([pattern[: 300_000 * r] + r for r in range(size)])
    )
    return communicator.engine


@pytest.mark.parametrize(
    ("hosts", "algorithm"),
    [
        *(("abab", "ring"), ("aab", ""), ("ab", "")),
        pytest.param("aabb", "", marks=pytest.mark.long),
    ],
)
def test_long_tensors_travel_in_pieces(run_ranks, hosts, algorithm):
    size = len(hosts)
    told = run_ranks(size, move_much, connecting=on(hosts, algorithm))
    assert told == ["hierarchical"] * size


def lose_rank_one(communicator, path):
    """Return what this rank is told when rank 1 is gone.

    No rank leaves before all know: it is not by their end that they learn it.
    """
    store = store_at(path, HANG_S)
    tensor = torch.ones(NUMEL)
    communicator.all_reduce(tensor).wait()
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        communicator.all_reduce(tensor).wait()
    store.set(f"told {communicator.rank}", "")
    store.wait(["told 0", "told 2", "told 3"])
    with pytest.raises(CollectiveError):
        communicator.all_reduce(tensor).wait()
    return str(caught.value)


def test_a_dead_rank_is_noticed_on_every_host(run_ranks):
    with job_store() as path:
        told = run_ranks(4, lose_rank_one, path, dying={1}, connecting=on("aabb"))
    assert told.pop(1) is None
    for rank, text in zip((0, 2, 3), told, strict=True):
        assert f"all_reduce on rank {rank} of 4" in text


def connect_as_told(claim):
    with pytest.raises(UsageError, match=r"one of ring, tree, halving_doubling, got"):
        connect(claim, engine="hierarchical", algorithm="butterfly")
    communicator = connect(claim, engine="hierarchical", timeout_s=NEVER_S)
    total = communicator.all_reduce(torch.ones(5)).wait().tolist()
    communicator.close()
    return communicator.engine, total


def test_one_host_needs_no_network(run_ranks_bare):
    assert run_ranks_bare(2, connect_as_told) == [("hierarchical", [2.0] * 5)] * 2


def test_places_follow_the_lowest_ranks():
    places = HostGroups.from_hosts(["b", "a", "b", "a", "c"])
    assert places.ranks == ((0, 2), (1, 3), (4,))
    assert [places.of(rank) for rank in range(5)] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
        (2, 0),
    ]
    assert not places.is_even
    assert HostGroups.from_hosts(["x", "y", "x", "y"]).is_even
