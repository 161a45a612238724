"""The engines' suite on CUDA tensors: NCCL, alone and with other ranks."""

import traceback

import pytest
import torch
from tests.conformance.test_engines import SUITE
from tests.gpu.devices import LIMIT_S, NEEDS_CUDA, NUM_DEVICES, on_cuda

from ronde.collectives import ReduceOp

pytestmark = NEEDS_CUDA
SIZES = range(1, max(2, min(4, NUM_DEVICES)) + 1)
ENGINES = [on_cuda("solo", 1), *(on_cuda("gloo", size) for size in SIZES)]
SEVERAL = [engine for engine in ENGINES if engine.size > 1]
NOT_OF_NCCL = {"halves_are_rounded_once", "average_divides"}
"""Of more than two ranks' 16-bit floats it rounds the sum once a rank."""


def run_checks_on_cuda(communicator, checks):
    """Run all checks in turn; return what those raised that failed."""
    # Connects NCCL, for the duplicates too: a check's first calls may come in another
    # order on another rank.
    communicator.all_reduce(torch.ones(1, device="cuda")).wait()
    failures = {}
    for check in checks:
        if check.__name__ in NOT_OF_NCCL and communicator.size > 2:
            continue
        own = communicator.duplicate()
        try:
            check(own, "cuda")
            own.close()
        except Exception:  # noqa: BLE001  all that fails is told at once
            failures[check.__name__] = traceback.format_exc()
            own.abort()
    return failures


CASES = [
    *((part, e) for e in ENGINES for part in SUITE if part != "places" or e.size > 1),
    ("movements", on_cuda("auto", 2)),
]


@pytest.mark.parametrize(("part", "engine"), CASES, ids=str)
def test_engine_on_cuda(run_ranks, needs_ranks, engine, part):
    needs_ranks(engine.size)
    checks = SUITE[part]
    # Ranks that share a GPU take turns on it, a few milliseconds each.
    failures = run_ranks(
        engine.size, run_checks_on_cuda, checks, connecting=engine, timeout_s=100.0
    )
    told = [
        f"rank {r}: {text}" for r, each in enumerate(failures) for text in each.values()
    ]
    assert failures == [{}] * engine.size, "\n".join(told)


def follow_the_stream(communicator):
    """``wait()`` orders what comes next after the result, on another stream too."""
    tensor = torch.zeros(1 << 22, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(50):
            tensor.add_(1.0)
        work = communicator.all_reduce(tensor, ReduceOp.AVERAGE, postscale=2.0)
        doubled = work.wait() * 2.0
    side.synchronize()
    return doubled.min().item(), doubled.max().item()


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_results_are_ordered_by_the_stream(run_ranks, needs_ranks, engine):
    needs_ranks(engine.size)
    results = run_ranks(
        engine.size, follow_the_stream, connecting=engine, timeout_s=LIMIT_S
    )
    assert results == [(200.0, 200.0)] * engine.size


def mix_devices(communicator):
    """CPU and CUDA tensors go their own ways in one communicator."""
    works = [
        communicator.all_reduce(torch.ones(3, device=device))
        for device in ("cpu", "cuda", "cpu", "cuda")
    ]
    return [work.wait().tolist() for work in works]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_cpu_and_cuda_tensors_mix(run_ranks, needs_ranks, engine):
    needs_ranks(engine.size)
    results = run_ranks(engine.size, mix_devices, connecting=engine, timeout_s=LIMIT_S)
    assert results == [[[float(engine.size)] * 3] * 4] * engine.size


def cross_messages(communicator):
    """Receive first, on every rank, more than NCCL's own buffers hold."""
    rank, size = communicator.rank, communicator.size
    sent = torch.full((4 << 20,), float(rank), device="cuda")
    received = torch.empty_like(sent)
    arriving = communicator.recv(received, (rank - 1) % size)
    communicator.send(sent, (rank + 1) % size).wait()
    arriving.wait()
    # What another rank waits for leaves before what is called next, unwaited for.
    total = torch.ones(1, device="cuda")
    if rank == 0:
        late = communicator.send(sent[:1], 1)
        communicator.all_reduce(total).wait()
        late.wait()
    else:
        if rank == 1:
            communicator.recv(total.clone(), 0).wait()
        communicator.all_reduce(total).wait()
    return received.unique().tolist(), total.item()


@pytest.mark.parametrize("engine", SEVERAL, ids=str)
def test_messages_cross(run_ranks, two_ranks, engine):
    size = engine.size
    results = run_ranks(size, cross_messages, connecting=engine, timeout_s=LIMIT_S)
    assert results == [([float((r - 1) % size)], float(size)) for r in range(size)]


def leave_at_once(communicator):
    """Close while the stream still works on what was waited for."""
    sums = []
    for _ in range(5):
        copy = communicator.duplicate()
        tensor = torch.ones(4 << 20, device="cuda")
        result = copy.all_reduce(tensor).wait()
        copy.close()
        sums.append(result.min().item())
    return sums


@pytest.mark.parametrize("engine", [on_cuda("gloo", 1), *SEVERAL[:1]], ids=str)
def test_what_was_waited_for_survives_close(run_ranks, needs_ranks, engine):
    needs_ranks(engine.size)
    size = engine.size
    results = run_ranks(size, leave_at_once, connecting=engine, timeout_s=LIMIT_S)
    assert results == [[float(size)] * 5] * size
