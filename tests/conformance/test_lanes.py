"""The engines ``scheduled`` and ``hierarchical`` beyond the suite."""

import os
import signal

import pytest
import torch
from tests.combinations import all_on_three_ranks
from tests.limits import HANG_S
from tests.ranks import job_store

from ronde.collectives import (
    ALGORITHMS,
    Communicator,
    EngineConfig,
    PeerInfo,
    ReduceOp,
    connect,
    connect_auto,
    store_at,
    two_levels,
)
from ronde.errors import CollectiveError, PeerLostError, UsageError

NEVER_S = 5 * HANG_S
NUMEL = 1_300_007
"""Several pieces and a remainder; not divisible by the number of ranks."""
CALLS = {
    "all_reduce": lambda c, tensor: c.all_reduce(tensor),
    "broadcast": lambda c, tensor: c.broadcast(tensor, 1),
    "reduce_scatter": lambda c, tensor: c.reduce_scatter(tensor),
    "all_gather": lambda c, tensor: c.all_gather(tensor),
    "all_to_all": lambda c, tensor: c.all_to_all(tensor, [1] * 4),
}
DYING = [("all_reduce", "tree"), ("all_reduce", "halving_doubling")]
DYING += [(name, "ring") for name in CALLS]


def by(algorithm):
    def connecting(claim):
        return connect(
            claim, timeout_s=NEVER_S, engine="scheduled", algorithm=algorithm
        )

    return connecting


def on(hosts, algorithm=""):
    def connecting(claim):
        config = EngineConfig(claim, NEVER_S, algorithm)
        return Communicator(two_levels(config, hosts[claim.rank]))

    return connecting


def move_much(communicator):
    """Sums of small integers are exact in float32 and in 16 bits."""
    rank, size = communicator.rank, communicator.size
    pattern = torch.arange(NUMEL) % 7
    tensors = [(pattern + r).float() for r in range(size)]
    total = sum(tensors)
    shared = communicator.allocate(NUMEL, torch.float32).copy_(tensors[rank])
    works = [
        communicator.all_reduce(tensors[rank].clone()),
        communicator.all_reduce(shared),
        communicator.all_reduce(tensors[rank].bfloat16()),
        communicator.all_reduce(tensors[rank].clone(), ReduceOp.MAX),
        communicator.reduce_scatter(tensors[rank]),
        communicator.broadcast(tensors[rank].clone(), size - 1),
        communicator.all_gather(pattern[: 300_000 + rank] + rank),
        communicator.all_gather(pattern[: 300_000 * rank] + rank),
    ]
    reduced, in_place, narrow, largest, own, copied, even, uneven = [
        work.wait() for work in works
    ]
    assert torch.equal(reduced, total)
    assert in_place is shared
    assert torch.equal(shared, total)
    assert torch.equal(narrow, total.bfloat16())
    assert torch.equal(largest, tensors[-1])
    first = sum(t.numel() for t in torch.tensor_split(total, size)[:rank])
    assert torch.equal(own, total[first : first + own.numel()])
    assert torch.equal(copied, tensors[-1])
    parts = [pattern[: 300_000 + r] + r for r in range(size)]
    assert torch.equal(even, torch.cat(parts))
    parts = [pattern[: 300_000 * r] + r for r in range(size)]
    assert torch.equal(uneven, torch.cat(parts))
    return communicator.engine


@pytest.mark.parametrize(
    ("size", "algorithm"), all_on_three_ranks([2, 3], sorted(ALGORITHMS))
)
def test_long_tensors_by_schedules(run_ranks, algorithm, size):
    assert run_ranks(size, move_much, connecting=by(algorithm)) == ["scheduled"] * size


@pytest.mark.parametrize(
    ("hosts", "algorithm"), [("abab", "ring"), ("aab", ""), ("ab", "")]
)
def test_long_tensors_on_two_levels(run_ranks, hosts, algorithm):
    size = len(hosts)
    engines = run_ranks(size, move_much, connecting=on(hosts, algorithm))
    assert engines == ["hierarchical"] * size


def lose_rank_one(claim, path):
    """Return the error of each call, on its own communicator, after rank 1 was killed.

    No rank exits before all have failed: in a ring, rank 3 receives nothing from rank 1
    and must fail because the other ranks fail.
    """
    store = store_at(path, HANG_S)
    cases = [(*case, by(case[1])(claim)) for case in DYING]
    cases.append(("all_reduce", "on two levels", on("aabb")(claim)))
    for _, _, communicator in cases:
        communicator.all_reduce(torch.ones(2)).wait()
    cases[0][2].barrier().wait()
    if claim.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    texts = []
    for name, algorithm, communicator in cases:
        with pytest.raises(PeerLostError) as caught:
            CALLS[name](communicator, torch.ones(600_000, 2)).wait()
        texts.append(str(caught.value))
        store.set(f"failed {name} {algorithm} {claim.rank}", "")
        store.wait([f"failed {name} {algorithm} {rank}" for rank in (0, 2, 3)])
        with pytest.raises(CollectiveError):
            communicator.all_reduce(torch.ones(2)).wait()
    return texts


def test_a_dead_rank_is_noticed_by_all(run_ranks_bare):
    with job_store() as path:
        results = run_ranks_bare(4, lose_rank_one, path, dying={1})
    assert results.pop(1) is None
    for rank, texts in zip((0, 2, 3), results, strict=True):
        assert len(texts) == len(DYING) + 1
        for text in texts:
            assert "failed because another rank was lost" in text
            assert f"on rank {rank} of 4" in text


def close_under_way(communicator):
    """Rank 0 closes while its sum waits for rank 1, which never calls."""
    if communicator.rank == 1:
        with pytest.raises(PeerLostError):
            communicator.recv(torch.ones(1), 0).wait()
        return
    works = [communicator.all_reduce(torch.ones(9)) for _ in range(3)]
    communicator.close()
    for work in works:
        with pytest.raises(CollectiveError):
            work.wait()


def test_closing_fails_pending_calls(run_ranks):
    run_ranks(2, close_under_way, connecting=by("ring"))


def connect_by_name(claim):
    for engine in ("scheduled", "hierarchical"):
        with pytest.raises(UsageError, match=r"of ring, tree, halving_doubling, got"):
            connect(claim, engine=engine, algorithm="butterfly")
    wanted = claim._replace(engine="scheduled", algorithm="tree")
    for config in (wanted, claim._replace(engine="hierarchical")):
        communicator = connect(config, timeout_s=NEVER_S)
        assert communicator.algorithm == config.algorithm
        with pytest.raises(UsageError, match="device must be cpu for the"):
            communicator.all_reduce(torch.ones(3, device="meta"))
        assert communicator.all_reduce(torch.ones(3)).wait().tolist() == [2.0] * 3
        communicator.close()


def test_names_and_devices(run_ranks_bare):
    run_ranks_bare(2, connect_by_name)


def scatter_by_auto(claim):
    """Let ``auto`` choose engines as if each rank were on its own host."""
    alone = claim._replace(local_rank=0, local_size=1)
    peers = tuple(PeerInfo(f"host{rank}", has_cuda=False) for rank in range(3))
    communicator = connect_auto(EngineConfig(alone, NEVER_S, peers=peers))
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (5, NUMEL, 3 * NUMEL):
            own = torch.arange(numel).remainder(5).to(dtype) + claim.rank
            total = torch.arange(numel).remainder(5).to(dtype) * 3 + 3
            part = communicator.reduce_scatter(own).wait()
            assert torch.equal(part, total.tensor_split(3)[claim.rank])
    communicator.close()


def test_auto_on_several_hosts(run_ranks_bare):
    run_ranks_bare(3, scatter_by_auto)
