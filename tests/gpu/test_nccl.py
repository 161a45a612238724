"""The engines' suite on CUDA tensors: NCCL, on as many ranks as there are devices."""

import pytest
import torch
from tests.conformance.engines import Setting
from tests.conformance.test_engines import SUITE

from ronde.collectives import ReduceOp

NEEDS_CUDA = "no CUDA device here: NCCL is not tested"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_CUDA),
    # The first NCCL communicator of a process takes seconds.
    pytest.mark.timeout(300),
]
SIZES = range(1, min(4, max(1, torch.cuda.device_count())) + 1)
ENGINES = [
    Setting("solo", 1),
    *(Setting("gloo", size) for size in SIZES),
]


def run_checks_on_cuda(communicator, checks):
    """Run the checks in turn; a rank has a device to itself."""
    torch.cuda.set_device(communicator.rank)
    for check in checks:
        own = communicator.duplicate()
        check(own, "cuda")
        own.close()
    return [check.__name__ for check in checks]


@pytest.mark.parametrize("setting", ENGINES, ids=str)
@pytest.mark.parametrize("part", SUITE)
def test_engine_on_cuda(run_ranks, setting, part):
    names = run_ranks(
        setting.size,
        run_checks_on_cuda,
        SUITE[part],
        connecting=setting,
        timeout_s=240.0,
    )
    assert names == [[check.__name__ for check in SUITE[part]]] * setting.size


def follow_the_stream(communicator):
    """``wait()`` orders what comes next after the result, on another stream too."""
    torch.cuda.set_device(communicator.rank)
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


@pytest.mark.parametrize("setting", ENGINES, ids=str)
def test_results_are_ordered_by_the_stream(run_ranks, setting):
    results = run_ranks(
        setting.size, follow_the_stream, connecting=setting, timeout_s=240.0
    )
    assert results == [(200.0, 200.0)] * setting.size


def mix_devices(communicator):
    """CPU and CUDA tensors go their own ways in one communicator."""
    torch.cuda.set_device(communicator.rank)
    works = [
        communicator.all_reduce(torch.ones(3, device=device))
        for device in ("cpu", "cuda", "cpu", "cuda")
    ]
    return [work.wait().tolist() for work in works]


@pytest.mark.parametrize("setting", ENGINES, ids=str)
def test_cpu_and_cuda_tensors_mix(run_ranks, setting):
    results = run_ranks(setting.size, mix_devices, connecting=setting, timeout_s=240.0)
    assert results == [[[float(setting.size)] * 3] * 4] * setting.size
