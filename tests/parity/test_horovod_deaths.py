"""A rank that dies during an operation: the other ranks fail soon and name it."""

import mmap
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.parity.sessions import DYNAMIC, run_sessions

import ronde.torch as hvd

PATIENT = DYNAMIC | {"HOROVOD_GLOO_TIMEOUT_SECONDS": "600"}
"""A collective's own timeout would come only after the test."""
CALLS = {
    "named": lambda t: hvd.allreduce(t, name="x"),
    "adasum": lambda t: hvd.allreduce(t, op=hvd.Adasum),
    "handle": lambda t: hvd.synchronize(hvd.allreduce_async(t)),
    "broadcast_from_it": lambda t: hvd.broadcast(t, 1),
    "alltoall": hvd.alltoall,
    "barrier": lambda t: hvd.barrier(),
    "join": lambda t: hvd.join(),
    "object": lambda t: hvd.broadcast_object("x", 1),
    "add_process_set": lambda t: hvd.add_process_set([0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_other_ranks_name_it(name):
    size = 2 if name == "adasum" else 3
    first, _, *others = run_sessions(
        size, _die_in, name, dying=[1], environment=PATIENT
    )
    for message in (first, *others):
        assert "rank 1" in message, message


def _die_in(name: str) -> str:
    tensor = torch.ones(6, 1000)
    for _ in range(3):  # some went well before
        hvd.allreduce(tensor, name="x")
        hvd.barrier()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hvd.HorovodInternalError) as raised:
        CALLS[name](tensor)
    # And whatever comes after it fails at once.
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(tensor)
    return str(raised.value)


@pytest.mark.parametrize("pause_s", [0.0, 1.0])
@pytest.mark.parametrize("engine", ["shared_memory", "gloo"])
def test_one_rank_without_memory_ends_all(engine, pause_s):
    """Its own error says what it lacked, in whatever thread it failed."""
    told = run_sessions(
        2, _run_out_of_memory, pause_s, engine=engine, environment=PATIENT
    )
    assert all("can't allocate memory" in message for message in told)
    assert "Rank 1 is gone" in told[0]


def _run_out_of_memory(pause_s: float) -> str:
    hvd.allreduce(torch.ones(3))
    rows = torch.ones(25_000_000)
    if hvd.rank() == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        most = used + rows.nbytes // 2
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    handle = hvd.allgather_async(rows)
    time.sleep(pause_s)  # meanwhile another thread carries it out
    with pytest.raises(RuntimeError) as raised:
        hvd.synchronize(handle)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(3))
    return str(raised.value)
