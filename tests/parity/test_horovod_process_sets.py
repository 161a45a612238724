"""Process sets come, go and work apart from each other."""

import threading

import pytest
import torch
from tests.parity.sessions import message_of, run_cases, run_sessions
from tests.ranks import run_ranks_bare

import ronde.torch as hvd


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_collective_in_a_set(size):
    run_sessions(size, _in_sets)


def _in_sets() -> None:
    rank = hvd.rank()
    even = hvd.add_process_set(range(0, hvd.size(), 2))
    assert (even.process_set_id or 0) >= 1
    assert even.included() == (rank % 2 == 0)
    odd = hvd.add_process_set(range(1, hvd.size(), 2))
    mine = odd if rank % 2 else even
    assert mine.size() == len(mine.ranks)
    assert mine.rank() == mine.ranks.index(rank)
    total = float(sum(mine.ranks))
    own = torch.full((6,), float(rank))
    first, last = mine.ranks[0], mine.ranks[-1]
    count = len(mine.ranks)
    # Both sets use the same names at the same time.
    assert hvd.allreduce(own, name="x", process_set=mine)[0] == pytest.approx(
        total / count
    )
    assert hvd.allreduce_(own.clone(), op=hvd.Sum, process_set=mine)[0] == total
    assert hvd.grouped_allreduce([own], op=hvd.Max, process_set=mine)[0][0] == last
    gathered = hvd.allgather(own[: rank + 1], name="x", process_set=mine)
    assert gathered.tolist() == [float(r) for r in mine.ranks for _ in range(r + 1)]
    assert hvd.broadcast(own, last, process_set=mine)[0] == last
    scattered = hvd.reducescatter(own, op=hvd.Sum, process_set=mine)
    assert scattered.tolist() == [total] * scattered.shape[0]
    received, counts = hvd.alltoall(own, [1] * count, process_set=mine)
    assert received.tolist() == [float(r) for r in mine.ranks]
    assert counts.tolist() == [1] * count
    assert hvd.broadcast_object({"r": rank}, first, process_set=mine) == {"r": first}
    assert hvd.allgather_object(rank, process_set=mine) == mine.ranks
    hvd.barrier(process_set=mine)
    # And all ranks together go on as before.
    assert hvd.allreduce(own, name="x", op=hvd.Sum)[0] == sum(range(hvd.size()))
    assert hvd.remove_process_set(odd)
    assert odd.process_set_id is None
    assert not hvd.remove_process_set(odd)
    assert not hvd.remove_process_set(hvd.global_process_set)


def _come_and_go() -> None:
    ids: list[int | None] = []
    for _ in range(10):
        process_set = hvd.add_process_set([0, 2])
        ids.append(process_set.process_set_id)
        if process_set.included():
            result = hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=process_set)
            assert result.tolist() == [2.0] * 3
        assert hvd.remove_process_set(process_set)
    assert len(set(ids)) == len(ids)
    assert hvd.allgather(torch.tensor(ids)).view(3, -1).unique(dim=0).shape[0] == 1


def test_sets_are_added_and_removed():
    run_cases(3, {"repeatedly": _come_and_go, "in any order": _added_by_threads})


def _added_by_threads() -> None:
    sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2]), hvd.ProcessSet([0, 2])]
    order = sets[hvd.rank() :] + sets[: hvd.rank()]
    threads = [threading.Thread(target=hvd.add_process_set, args=(s,)) for s in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = [s.process_set_id for s in sets]
    assert hvd.allgather_object(ids) == [ids] * 3
    for process_set in sets:
        if process_set.included():
            assert (
                hvd.allgather_object(hvd.rank(), process_set=process_set)
                == process_set.ranks
            )


def test_a_set_does_not_wait_for_another():
    run_sessions(4, _apart)


def _apart() -> None:
    even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])
    hvd.barrier()
    if hvd.rank() % 2:
        for _ in range(20):
            hvd.barrier(process_set=odd)
        hvd.broadcast_object("through", 1)
    else:
        # Only then do the even ranks come to their barrier.
        assert hvd.broadcast_object(None, 1) == "through"
        hvd.barrier(process_set=even)


def test_static_sets():
    run_ranks_bare(3, _static)


def _static(_: object) -> None:
    pair, one = hvd.ProcessSet([1, 0]), hvd.ProcessSet([2])
    hvd.init(process_sets=[pair, one])
    assert hvd.global_process_set.ranks == [0, 1, 2]
    assert (pair.process_set_id, one.process_set_id) == (1, 2)
    assert pair.ranks == [0, 1]
    mine = one if hvd.rank() == 2 else pair
    assert hvd.allgather_object(hvd.rank(), process_set=mine) == mine.ranks
    message = "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow"
    assert message_of(ValueError, hvd.add_process_set, [1, 2]).startswith(message)
    assert message_of(ValueError, hvd.remove_process_set, pair).startswith(message)
    hvd.init(process_sets=[pair, one])  # again: nothing happens
    hvd.shutdown()
    hvd.init(process_sets=[one, pair])  # in a new session, with other numbers
    assert (pair.process_set_id, one.process_set_id) == (2, 1)
    assert hvd.allgather_object(hvd.rank(), process_set=mine) == mine.ranks
    hvd.shutdown()


def _duplicates() -> None:
    for ranks in ([0], [1, 0]):
        sets = [hvd.ProcessSet([0]), hvd.ProcessSet(ranks), hvd.ProcessSet([1])]
        message = message_of(ValueError, hvd.init, process_sets=sets)
        assert message == (
            "Horovod could not be initialized because process_sets entry number 1 is a "
            "duplicate: ProcessSet(process_set_id=None, "
            f"ranks={sorted(ranks)}, mpi_comm=None)"
        )
    # The session is there, and takes a list without the fault.
    sets = [hvd.ProcessSet([1]), hvd.ProcessSet([0])]
    hvd.init(process_sets=sets)
    assert [s.process_set_id for s in sets] == [2, 1]
    hvd.shutdown()


def test_sets_at_init():
    run_ranks_bare(2, lambda _: [_duplicates(), _dynamic()])


def _dynamic() -> None:
    assert "dynamic" in message_of(ValueError, hvd.init, process_sets="static")
    hvd.init(process_sets="dynamic")
    assert hvd.remove_process_set(hvd.add_process_set([0]))
    hvd.shutdown()
    hvd.init()  # Horovod remembers it, and elastic training relies on that
    stale = hvd.add_process_set([1])
    hvd.shutdown()
    hvd.init()
    other = hvd.add_process_set([0])
    assert other.process_set_id == stale.process_set_id
    assert message_of(ValueError, stale.size) == (
        "Process set does not exist or has not been registered."
    )
    assert "has not been registered" in message_of(
        ValueError, hvd.barrier, process_set=stale
    )
    hvd.shutdown()
