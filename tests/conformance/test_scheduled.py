"""What the engine ``scheduled`` does beyond the suite: pieces, deaths, leftovers."""

import os
import signal
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from tests.ranks import hosted_store
from tests.resources import least_resources
from torch.distributed import TCPStore

from ronde.collectives import ALGORITHMS, ReduceOp, connect
from ronde.errors import CollectiveError, PeerLostError, UsageError

SOON_S = 20.0
"""Far below the collectives' own limit of 60 s, far above what a busy machine takes."""
NUMEL = 1_300_007
"""Some pieces for each rank, and a rest."""


def by(algorithm):
    def connecting(claim):
        return connect(claim, timeout_s=60.0, engine="scheduled", algorithm=algorithm)

    return connecting


def move_much(communicator):
    """Sums of small whole numbers are exact in float32, and in 16 bits."""
    rank, size = communicator.rank, communicator.size
    pattern = torch.arange(NUMEL) % 7
    tensors = [(pattern + r).float() for r in range(size)]
    total = sum(tensors)
    works = [
        communicator.all_reduce(tensors[rank].clone()),
        communicator.all_reduce(tensors[rank].bfloat16()),
        communicator.all_reduce(tensors[rank].clone(), ReduceOp.MAX),
        communicator.reduce_scatter(tensors[rank]),
        communicator.broadcast(tensors[rank].clone(), size - 1),
        communicator.all_gather(pattern[: 400_000 * rank] + rank),
    ]
    reduced, narrow, largest, own, copied, gathered = [w.wait() for w in works]
    assert torch.equal(reduced, total)
    assert torch.equal(narrow, total.bfloat16())
    assert torch.equal(largest, tensors[-1])
    first = sum(t.numel() for t in torch.tensor_split(total, size)[:rank])
    assert torch.equal(own, total[first : first + own.numel()])
    assert torch.equal(copied, tensors[-1])
    parts = [pattern[: 400_000 * r] + r for r in range(size)]
    assert torch.equal(gathered, torch.cat(parts))
    return communicator.engine, communicator.algorithm


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("size", [2, 3])
def test_long_tensors_travel_in_pieces(run_ranks, algorithm, size):
    told = run_ranks(size, move_much, connecting=by(algorithm))
    assert told == [("scheduled", algorithm)] * size


def call_all(communicator, name):
    tensor = torch.ones(600_000, 2)
    return {
        "all_reduce": lambda: communicator.all_reduce(tensor).wait(),
        "all_gather": lambda: communicator.all_gather(tensor).wait(),
        "reduce_scatter": lambda: communicator.reduce_scatter(tensor).wait(),
        "broadcast": lambda: communicator.broadcast(tensor, 1).wait(),
        "all_to_all": lambda: communicator.all_to_all(tensor, [1] * 4).wait(),
    }[name]()


def lose_rank_one(communicator, name, port):
    """Return how long this rank took to learn that rank 1 is gone.

    No rank leaves before all know: it is not by their end that they learn it.
    """
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    communicator.all_reduce(torch.ones(2)).wait()
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PeerLostError, match="needs every rank, but one is gone") as e:
        call_all(communicator, name)
    assert f"on rank {communicator.rank} of 4" in str(e.value)
    took_s = time.monotonic() - start
    store.set(f"told {communicator.rank}", "")
    store.wait(["told 0", "told 2", "told 3"], timedelta(seconds=SOON_S))
    with pytest.raises(CollectiveError):
        communicator.all_reduce(torch.ones(2)).wait()
    return took_s


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("all_reduce", "ring"),
        ("all_reduce", "tree"),
        ("all_reduce", "halving_doubling"),
        ("broadcast", "ring"),
        ("reduce_scatter", "ring"),
        ("all_gather", "ring"),
        ("all_to_all", "ring"),
    ],
)
def test_a_dead_rank_is_noticed_by_all(run_ranks, name, algorithm):
    """Rank 3 gets nothing from rank 1 in a ring: the others let it know."""
    store = hosted_store()
    lost = run_ranks(
        4, lose_rank_one, name, store.port, dying={1}, connecting=by(algorithm)
    )
    assert lost.pop(1) is None
    assert max(lost) < SOON_S


def stop_under_way(communicator):
    """Rank 0 closes while its sum waits for rank 1, which never calls."""
    if communicator.rank == 1:
        with pytest.raises(PeerLostError):
            communicator.recv(torch.ones(1), 0).wait()
        return "told"
    works = [communicator.all_reduce(torch.ones(9)) for _ in range(3)]
    communicator.close()
    for work in works:
        with pytest.raises(CollectiveError):
            work.wait()
    return "told"


def test_closing_fails_what_is_under_way(run_ranks):
    assert run_ranks(2, stop_under_way, connecting=by("ring")) == ["told"] * 2


def refuse_devices(communicator):
    with pytest.raises(UsageError, match="device must be cpu for engine scheduled"):
        communicator.all_reduce(torch.ones(3, device="meta"))
    return communicator.all_reduce(torch.ones(3)).wait().tolist()


def test_other_devices_are_refused(run_ranks):
    assert run_ranks(2, refuse_devices, connecting=by("ring")) == [[2.0] * 3] * 2


def name_no_algorithm(claim):
    with pytest.raises(UsageError, match=r"one of ring, tree, halving_doubling, got"):
        connect(claim, engine="scheduled", algorithm="butterfly")
    wanting = replace(claim, engine="scheduled", algorithm="tree")
    communicator = connect(wanting, timeout_s=60.0)
    name = communicator.algorithm
    communicator.close()
    return name


def test_the_claim_names_the_algorithm(run_ranks_bare):
    assert run_ranks_bare(2, name_no_algorithm) == ["tree"] * 2


def connect_often(claim, times):
    early = None
    for cycle in range(times):
        communicator = by("ring")(claim)
        work = communicator.all_reduce(torch.ones(3, dtype=torch.bfloat16))
        assert work.wait().tolist() == [3.0] * 3
        communicator.close()
        if cycle == 4:
            early = least_resources()
    return early, least_resources()


def test_connections_leave_nothing(run_ranks_bare):
    for early, late in run_ranks_bare(3, connect_often, 20, timeout_s=90.0):
        assert early == late
