"""SyncBatchNorm, join and the timeline on CUDA tensors."""

import pytest
import torch
from tests.gpu.devices import LIMIT_S, NEEDS_CUDA, on_its_device
from tests.ranks import run_ranks_bare
from tests.unit.timeline_samples import check_events, read_events
from torch import nn

import ronde.torch as hvd

pytestmark = NEEDS_CUDA


def run_on_devices(size, fn, *args, environment=None):
    return run_ranks_bare(
        size,
        on_its_device,
        in_session,
        fn,
        *args,
        environment=environment,
        timeout_s=LIMIT_S,
    )


def in_session(claim, fn, *args):
    hvd.init()
    try:
        return fn(*args)
    finally:
        hvd.shutdown()


def normalize(dtype):
    """Return how far this rank's results are from those of the whole batch."""
    torch.manual_seed(1)
    size, rank = hvd.size(), hvd.rank()
    whole = torch.rand(3 * size, 5, 4, 6, dtype=torch.float64).cuda()
    own = whole[3 * rank : 3 * rank + 3].to(memory_format=torch.channels_last)
    ours, plain = hvd.SyncBatchNorm(5).cuda(), nn.BatchNorm2d(5).cuda().double()
    inputs, every = own.to(dtype).requires_grad_(), whole.requires_grad_()
    result, expected = ours(inputs), plain(every)
    seed = torch.rand_like(every)
    result.backward(seed[3 * rank : 3 * rank + 3].to(dtype))
    expected.backward(seed)
    assert result.dtype == dtype
    weight = hvd.allreduce(ours.weight.grad, op=hvd.Sum)
    pairs = [
        (result, expected[3 * rank : 3 * rank + 3]),
        (inputs.grad, every.grad[3 * rank : 3 * rank + 3]),
        (weight, plain.weight.grad),
        (ours.running_mean, plain.running_mean),
        (ours.running_var, plain.running_var),
    ]
    return [
        float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max())
        for a, b in pairs
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_sync_batch_norm_is_that_of_the_whole_batch(needs_ranks, size, dtype):
    """Inputs up to 1 are divided by a deviation of 0.3: they err by 4 eps at most, and
    so does each of the 144 terms of a sum; errors of either sign add up to 48 eps.
    """
    needs_ranks(size)
    for errors in run_on_devices(size, normalize, dtype):
        assert max(errors) <= 100 * torch.finfo(dtype).eps


def step_unevenly():
    """Rank 1 ends first, then also adds zeros to named tensors on its own device."""
    model = nn.Linear(4, 3).cuda()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for number in range(2 if hvd.rank() else 4):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + number, device="cuda")).sum().backward()
        optimizer.step()
    if hvd.rank() == 0:
        for name in "ab":
            hvd.allreduce(torch.ones(5, device="cuda"), name=name, op=hvd.Sum)
    last = hvd.join()
    return last, model.weight.detach().cpu().tolist()


def test_a_rank_that_has_joined_takes_part_on_its_device(two_ranks):
    (last, weights), (last_of_other, _) = run_on_devices(2, step_unevenly)
    assert last == last_of_other == 0
    assert all(map(all, weights))


def record(path):
    own = path if hvd.rank() == 0 else f"{path}.other"
    hvd.start_timeline(own)
    for _ in range(3):
        hvd.allreduce(torch.ones(1000, device="cuda"), name="x")
    hvd.stop_timeline()
    return hvd.rank()


@pytest.mark.parametrize("size", [1, 2])
def test_a_timeline_has_what_ran_on_the_device(needs_ranks, tmp_path, size):
    needs_ranks(size)
    path = tmp_path / "timeline.json"
    dynamic = {"HOROVOD_TIMELINE": "DYNAMIC"}
    run_on_devices(size, record, str(path), environment=dynamic)
    spans = check_events(read_events(path.read_text()))
    done = [e["args"]["tensor"] for e in spans if "fused" in e.get("args", {})]
    assert done == ["allreduce.x"] * 3 * size
