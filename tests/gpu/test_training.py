"""``ronde.torch`` trains on a CUDA device as the program would alone."""

from dataclasses import replace

import pytest
import torch
from tests.gpu.devices import LIMIT_S, NEEDS_CUDA, on_cuda, on_its_device
from tests.parity.problems import (
    OddCnn,
    OddMlp,
    Problem,
    assert_close,
    plain_step,
    train_alone,
    train_on_ranks,
)

import ronde.torch as hvd
from ronde.data_parallel import Reducer, ReducerGroup, ReducerOptions

pytestmark = NEEDS_CUDA


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


MLP = Problem(OddMlp, 7, plain_step, sgd, num_steps=20)
PROBLEMS = {
    "mlp-sgd": MLP,
    "mlp-adam": replace(MLP, make_optimizer=adam),
    "cnn": replace(MLP, build=OddCnn, num_inputs=147),
    "float32": replace(MLP, dtype=torch.float32),
    "fp16 on the wire": replace(
        MLP, options=lambda _: {"compression": hvd.Compression.fp16}
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_two_ranks_follow_one_process(run_ranks_bare, two_ranks, name):
    """One process on the CPU: the device's kernels round as often, in other orders."""
    problem = PROBLEMS[name]
    results = run_ranks_bare(
        2,
        on_its_device,
        train_on_ranks,
        replace(problem, device="cuda"),
        timeout_s=LIMIT_S,
    )
    for weight, value in results[0].items():
        assert torch.equal(results[1][weight], value), f"ranks differ in {weight}"
    wire = torch.float16 if "wire" in name else None
    expected = train_alone(problem, 2)
    assert_close(results[0], expected, num_steps=problem.num_steps, wire=wire)


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
        1, train_both_ways, dtype, timeout_s=LIMIT_S
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
    reducer = Reducer(named, ReducerGroup(communicator), ReducerOptions())
    storages = set()

    def step(*_):
        storages.update(p.grad.untyped_storage().data_ptr() for p in model.parameters())
        reducer.step_done()

    optimizer.register_step_post_hook(step)
    together = train(model, optimizer, dtype)
    return alone, together, len(reducer.rounds.buckets), len(storages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_buckets_and_nccl_change_nothing_on_one_rank(run_ranks, dtype):
    ((alone, together, num_buckets, num_storages),) = run_ranks(
        1,
        reduce_over_nccl,
        dtype,
        connecting=on_cuda("gloo", 1),
        timeout_s=LIMIT_S,
    )
    # One bucket, laid out anew once, after the first step.
    assert (num_buckets, num_storages) in {(1, 1), (1, 2)}
    tolerance = 20 * 10 * 0.05 * torch.finfo(dtype).eps
    for before, after in zip(alone, together, strict=True):
        assert (before - after).abs().max() <= tolerance


def run_uneven(_):
    hvd.init()
    model = torch.nn.Linear(3, 2, device="cuda")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    def train():
        for num_passes in (1, 2, 1 + hvd.rank(), 1, 1, 1):
            for _ in range(num_passes):
                model(torch.ones(2, 3, device="cuda")).sum().backward()
            optimizer.step()

    with pytest.raises(hvd.HorovodInternalError) as caught:
        train()
    hvd.shutdown()
    return str(caught.value)


def test_uneven_passes_are_an_error_on_all_ranks(run_ranks_bare, two_ranks):
    first, second = run_ranks_bare(2, on_its_device, run_uneven, timeout_s=LIMIT_S)
    assert "on 1 of 2 ranks, not on this one." in first
    assert "on 1 of 2 ranks, including this one." in second
