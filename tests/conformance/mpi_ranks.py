"""A rank under a real ``mpirun``: ``python -m tests.conformance.mpi_ranks CASE``.

A rank that fails ends with its traceback.
"""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.conformance.data_movement import objects_travel
from tests.conformance.samples import ALL_CASES, FEW, THIRD
from tests.conformance.test_engines import SUITE, run_checks
from tests.limits import HANG_S

from ronde.collectives import MPI, Communicator, ReduceOp, connect, connect_world
from ronde.errors import CollectiveError
from ronde.world import read_rank_info


def run_suite(communicator, share=THIRD):
    for part in ("reductions", "movements", "refusals"):  # it copies from any place
        run_checks(communicator, SUITE[part], share=share)
    leave_work_alone(communicator)
    run_in_short_calls(communicator)


def run_in_short_calls(communicator):
    """Run the suite in MPI calls of at most 5 elements."""
    short = again(communicator, max_count=5)
    checks = SUITE["movements"] + SUITE["reductions"]
    checks.remove(objects_travel)  # of 100,000 bytes, as broadcasts
    run_checks(short, checks, share=FEW)


def again(communicator, **options):
    """Connect the same ranks again, with other options."""
    options = {"timeout_s": HANG_S, **options}
    return Communicator(connect_world(communicator.rank, communicator.size, **options))


def leave_work_alone(communicator):
    """Works without a wait complete, and their tensors live until then."""
    tensors = [torch.full((1000,), float(i)) for i in range(600)]
    for tensor in tensors:
        communicator.all_reduce(tensor)
        communicator.all_reduce(torch.ones(50_000), ReduceOp.AVERAGE)
    communicator.barrier().wait()
    last = communicator.all_reduce(torch.ones(1)).wait()
    assert last.item() == communicator.size


def be_late(communicator):
    """Rank 1 makes no call until rank 0 has given up waiting for it."""
    told = Path(sys.argv[2])
    impatient = again(communicator, timeout_s=0.5)
    if communicator.rank == 0:
        with pytest.raises(CollectiveError) as caught:
            impatient.barrier().wait()
        told.write_text(str(caught.value))
        communicator.send(torch.ones(1), 1).wait()
    else:
        communicator.recv(torch.ones(1), 0).wait()


def take_turns(communicator):
    """Threads call concurrently although MPI allows one thread at a time."""
    assert MPI.Query_thread() == MPI.THREAD_SERIALIZED
    copies = [communicator.duplicate() for _ in range(4)]

    def reduce_often(copy):
        for _ in range(50):
            ones = copy.all_reduce(torch.ones(1000)).wait()
            assert ones.tolist() == [float(copy.size)] * 1000

    with ThreadPoolExecutor(len(copies)) as threads:
        list(threads.map(reduce_often, copies))
    communicator.barrier().wait()
    MPI.Finalize()


def die(communicator):
    """Rank 1 is killed while the others wait for it."""
    communicator.barrier().wait()
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    communicator.barrier().wait()


def fail(communicator):
    """Rank 1 raises while the others wait for it."""
    if communicator.rank == 1:
        raise ValueError("rank 1 has had enough")
    communicator.barrier().wait()


def main() -> None:
    """Connect as programs do; size 1 also uses MPI."""
    claim = read_rank_info()
    if sys.argv[1] == "turns":
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
    if claim.size == 1:
        communicator = Communicator(connect_world(0, 1, timeout_s=HANG_S))
    else:
        communicator = connect(claim, engine="mpi", timeout_s=HANG_S)
    assert communicator.engine == "mpi"
    doing = {
        "suite": run_suite,
        "whole": partial(run_suite, share=ALL_CASES),
        "turns": take_turns,
        "late": be_late,
        "die": die,
        "fail": fail,
    }
    doing[sys.argv[1]](communicator)
    print(f"rank {communicator.rank} of {communicator.size} is through", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
