"""``ronde.torch`` trains on a CUDA device as the program would alone."""

import pytest
import torch
from tests.conformance.engines import Setting

import ronde.torch as hvd
from ronde.data_parallel import Bond, Reducer, ReducerOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device here: no training on it"
    ),
    pytest.mark.timeout(300),
]


def make(dtype):
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(8 * 6 * 6, 10),
    )  # fmt: skip
    model = model.to("cuda", dtype, memory_format=torch.channels_last)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model, optimizer, dtype):
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        images = torch.randn(16, 3, 8, 8, generator=generator).to("cuda", dtype)
        labels = torch.randint(0, 10, (16,), generator=generator).to("cuda")
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def train_both_ways(claim, dtype):
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    alone = train(*make(dtype), dtype)
    hvd.init()
    model, optimizer = make(dtype)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters()
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    together = train(model, optimizer, dtype)
    hvd.shutdown()
    return claim.size, alone, together


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_rank_trains_as_the_program_alone(run_ranks_bare, dtype):
    """An average over one rank changes no bit; only kernels may sum in other orders.

    20 steps of momentum 0.9 pass a gradient's error on at most 10 times over; each step
    errs by at most an eps of the gradient's 16 * 36 terms, whose sum stays below 1.
    """
    ((size, alone, together),) = run_ranks_bare(
        1, train_both_ways, dtype, timeout_s=240.0
    )
    assert size == 1
    tolerance = 20 * 10 * 0.05 * torch.finfo(dtype).eps
    for before, after in zip(alone, together, strict=True):
        assert (before - after).abs().max() <= tolerance


def reduce_over_nccl(communicator, dtype):
    """Train through buckets and NCCL, as ranks of a larger world do."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    alone = train(*make(dtype), dtype)
    model, optimizer = make(dtype)
    named = list(model.named_parameters())
    reducer = Reducer(named, Bond(communicator), ReducerOptions())
    storages = set()

    def step(*_):
        storages.update(p.grad.untyped_storage().data_ptr() for p in model.parameters())
        reducer.step_done()

    optimizer.register_step_post_hook(step)
    together = train(model, optimizer, dtype)
    return alone, together, reducer.num_buckets, len(storages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_buckets_and_nccl_change_nothing_on_one_rank(run_ranks, dtype):
    ((alone, together, num_buckets, num_storages),) = run_ranks(
        1,
        reduce_over_nccl,
        dtype,
        connecting=Setting("gloo", 1),
        timeout_s=240.0,
    )
    # One bucket, laid out anew once, after the first step.
    assert (num_buckets, num_storages) in {(1, 1), (1, 2)}
    tolerance = 20 * 10 * 0.05 * torch.finfo(dtype).eps
    for before, after in zip(alone, together, strict=True):
        assert (before - after).abs().max() <= tolerance
