"""What the engine ``scheduled`` does beyond the suite: pieces, deaths, leftovers."""

import os
import signal

import pytest
import torch
from tests.combinations import all_on_three_ranks
from tests.limits import HANG_S
from tests.ranks import job_store
from tests.resources import least_resources

from ronde.collectives import ALGORITHMS, ReduceOp, connect, store_at
from ronde.errors import CollectiveError, PeerLostError, UsageError

NEVER_S = 5 * HANG_S
NUMEL = 1_300_007
"""Some pieces for each rank, and a rest."""


def by(algorithm):
    def connecting(claim):
        return connect(
            claim, timeout_s=NEVER_S, engine="scheduled", algorithm=algorithm
        )

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


@pytest.mark.parametrize(
    ("size", "algorithm"), all_on_three_ranks([2, 3], sorted(ALGORITHMS))
)
def test_long_tensors_travel_in_pieces(run_ranks, algorithm, size):
    told = run_ranks(size, move_much, connecting=by(algorithm))
    assert told == [("scheduled", algorithm)] * size


CALLS = {
    "all_reduce": lambda c, tensor: c.all_reduce(tensor),
    "broadcast": lambda c, tensor: c.broadcast(tensor, 1),
    "reduce_scatter": lambda c, tensor: c.reduce_scatter(tensor),
    "all_gather": lambda c, tensor: c.all_gather(tensor),
    "all_to_all": lambda c, tensor: c.all_to_all(tensor, [1] * 4),
}
DYING = [("all_reduce", "tree"), ("all_reduce", "halving_doubling")]
DYING += [(name, "ring") for name in CALLS]


def lose_rank_one(claim, path):
    """Return what each call says, on a communicator of its own, as rank 1 is gone.

    No rank leaves before all know: it is not by their end that they learn it.
    """
    store = store_at(path, HANG_S)
    communicators = [by(algorithm)(claim) for _, algorithm in DYING]
    for each in communicators:
        each.all_reduce(torch.ones(2)).wait()
    communicators[0].barrier().wait()
    if claim.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    texts = []
    for case, communicator in zip(DYING, communicators, strict=True):
        with pytest.raises(PeerLostError) as caught:
            CALLS[case[0]](communicator, torch.ones(600_000, 2)).wait()
        texts.append(str(caught.value))
        store.set(f"told {case} {claim.rank}", "")
        store.wait([f"told {case} {rank}" for rank in (0, 2, 3)])
        with pytest.raises(CollectiveError):
            communicator.all_reduce(torch.ones(2)).wait()
    return texts


def test_a_dead_rank_is_noticed_by_all(run_ranks_bare):
    """Rank 3 gets nothing from rank 1 in a ring: the others let it know."""
    with job_store() as path:
        told = run_ranks_bare(4, lose_rank_one, path, dying={1})
    assert told.pop(1) is None
    for rank, texts in zip((0, 2, 3), told, strict=True):
        assert len(texts) == len(DYING)
        for text in texts:
            assert "needs every rank, but one is gone" in text
            assert f"on rank {rank} of 4" in text


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
    wanting = claim._replace(engine="scheduled", algorithm="tree")
    communicator = connect(wanting, timeout_s=NEVER_S)
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
    for early, late in run_ranks_bare(3, connect_often, 20):
        assert early == late
