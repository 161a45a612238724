"""Sessions begin and end, a hundred times, and leave nothing behind."""

import atexit
import ctypes
import gc
import logging
import os
import threading
from pathlib import Path

import pytest
import torch
from tests.limits import HANG_S
from tests.parity.sessions import named
from tests.ranks import run_ranks_bare

import ronde.torch as hvd
from ronde.torch import mpi_ops

NUM_CYCLES = 100
_PR_SET_THP_DISABLE = 41
"""Of linux/prctl.h: from now on no page of this process is a huge one."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("size", [1, 3])
def test_a_hundred_sessions(size):
    run_ranks_bare(size, _cycles, timeout_s=HANG_S)


def _cycles(_: object) -> None:
    # A huge page, which the kernel may give at any time, is two megabytes at once.
    assert ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    before: tuple[int, int, int, int] | None = None
    for number in range(NUM_CYCLES):
        hvd.init()
        hvd.init()  # once more does nothing
        assert hvd.is_initialized()
        total = hvd.allreduce(torch.ones(1000), op=hvd.Sum, name=f"t{number}")
        assert total[0] == hvd.size()
        hvd.allreduce_async(torch.ones(3))  # never waited for
        hvd.barrier()
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        if number == NUM_CYCLES // 2:
            before = _held()
    assert before is not None
    after = _held()
    # What a session leaves would be there 49 times; another rank may still be closing.
    assert all(a < b + 10 for a, b in zip(after[:3], before[:3], strict=True))
    # Half the cycles must not take as much as one megabyte in all.
    assert after[3] - before[3] < 2**20, (before, after)


def _held() -> tuple[int, int, int, int]:
    """Return the number of threads, descriptors and mappings, and the memory held."""
    gc.collect()
    process = Path("/proc/self")
    resident = int(process.joinpath("statm").read_text().split()[1]) * PAGE_BYTES
    mappings = process.joinpath("maps").read_text().count("ronde")
    return (
        threading.active_count(),
        len(list(process.joinpath("fd").iterdir())),
        mappings,
        resident,
    )


def _new_start(_: object) -> None:
    # As in elastic training: one rank is new and has counted nothing yet.
    hvd.init()
    for _ in range(3):
        hvd.allreduce(torch.ones(1))
    hvd.shutdown()
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    assert handle == 0
    assert hvd.synchronize(handle).tolist() == [2.0, 2.0]
    hvd.shutdown()


def _asked(_: object) -> None:
    assert not hvd.mpi_enabled()
    hvd.init([0, 1])
    assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (2, 2, 1)
    assert hvd.rank() == hvd.local_rank()
    assert hvd.cross_rank() == 0
    assert mpi_ops.is_homogeneous()
    for query in (
        *(hvd.mpi_built, hvd.mpi_enabled, hvd.gloo_built, hvd.gloo_enabled),
        *(hvd.ddl_built, hvd.ccl_built, hvd.cuda_built, hvd.rocm_built),
    ):
        assert isinstance(query(), bool)
    assert hvd.gloo_built()
    assert type(hvd.nccl_built()) is int
    with pytest.raises(ValueError, match="Horovod MPI is not enabled"):
        hvd.mpi_threads_supported()
    assert (hvd.Average, hvd.Sum, hvd.Adasum) == (0, 1, 2)
    assert (hvd.Min, hvd.Max, hvd.Product) == (3, 4, 5)
    hvd.shutdown()


def _part(_: object) -> None:
    with pytest.raises(ValueError, match="comm must be None or all ranks"):
        hvd.init([0])
    assert not hvd.is_initialized()


@pytest.mark.parametrize("size", [1, 3])
def test_join(size):
    results = run_ranks_bare(size, _join)
    assert len(set(results)) == 1


def _join(_: object) -> int:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    # Rank r has r + 1 batches; whoever is through counts as zeros, the divisor stays.
    for number in range(rank + 1):
        result = hvd.allreduce(torch.ones(3), name=f"b{number}", op=hvd.Sum)
        assert result.tolist() == [float(size - number)] * 3
        average = hvd.allreduce(torch.ones(3))
        torch.testing.assert_close(average, torch.full((3,), (size - number) / size))
    last = hvd.join()
    assert last == size - 1
    # Unnamed operations agree again, though ranks did different numbers of them.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    hvd.shutdown()
    return last


def _join_errors(_: object) -> None:
    hvd.init()
    if hvd.rank() == 0:
        end = "is not supported with Join at this time."
        for word, call in {
            "Allgather": lambda: hvd.allgather(torch.ones(2)),
            "Alltoall": lambda: hvd.alltoall(torch.ones(2)),
            "Reducescatter": lambda: hvd.reducescatter(torch.ones(2)),
            "Broadcast": lambda: hvd.broadcast(torch.ones(2), 0),
        }.items():
            with pytest.raises(hvd.HorovodInternalError, match=f"{word} {end}"):
                call()
    assert hvd.join() == 0
    hvd.barrier()
    hvd.shutdown()


def test_the_coordinators_core_and_words():
    core = str(min(os.sched_getaffinity(0)))
    affinity = {"HOROVOD_THREAD_AFFINITY": f"{core},{core}"}
    run_ranks_bare(2, _pinned, environment={**affinity, "HOROVOD_LOG_LEVEL": "DEBUG"})
    run_ranks_bare(1, _pinned_nowhere, environment={"HOROVOD_THREAD_AFFINITY": "9999"})


def _pinned(_: object) -> None:
    own = os.sched_getaffinity(0)
    hvd.init()
    assert os.sched_getaffinity(0) == own
    (thread,) = [t for t in threading.enumerate() if t.name == "ronde-coordinator"]
    assert thread.native_id is not None
    assert os.sched_getaffinity(thread.native_id) == {min(own)}
    assert logging.getLogger("ronde").level == logging.DEBUG
    hvd.shutdown()


def _pinned_nowhere(_: object) -> None:
    with pytest.raises(ValueError, match="HOROVOD_THREAD_AFFINITY must name one"):
        hvd.init()
    assert not hvd.is_initialized()


def _forked(_: object) -> None:
    hvd.init()
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    hvd.barrier()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    hvd.shutdown()


def _in_turn(_: object) -> None:
    for case in (_asked, _new_start, _part, _join_errors, _forked):
        with named(case.__name__):
            case(None)


def test_sessions_one_after_another():
    run_ranks_bare(2, _in_turn)


@pytest.mark.parametrize("engine", ["auto", "gloo"])
def test_a_default_device_of_the_program_is_not_ours(engine):
    """What ranks tell each other stays on the CPU, wherever its tensors go."""
    results = run_ranks_bare(2, _with_a_default_device, engine)
    assert results == [([2.0] * 3, [1.0] * 6, [0, 1], {"a": 1}, [0.0, 1.0])] * 2


def _with_a_default_device(_: object, engine: str) -> object:
    torch.set_default_device("meta")
    hvd.init(engine=engine)
    ones = torch.ones(3, device="cpu")
    model = torch.nn.Linear(3, 2, device="cpu")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(ones).sum().backward()
        optimizer.step()
    sent = torch.full((2,), float(hvd.rank()), device="cpu")
    told = (
        hvd.allreduce(ones, op=hvd.Sum).tolist(),
        hvd.allgather(ones).tolist(),
        hvd.allgather_object(hvd.rank()),
        hvd.broadcast_object({"a": 1}),
        hvd.alltoall(sent).tolist(),
    )
    hvd.join()
    hvd.shutdown()
    return told
