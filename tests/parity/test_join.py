"""Ranks whose data end earlier keep up with the others' optimizer steps."""

import gc
from dataclasses import dataclass

import pytest
import torch
from tests.parity.problems import OddMlp, assert_close, mse
from tests.ranks import run_ranks_bare
from torch import nn

import ronde.torch as hvd

NUM_BATCHES = (7, 3, 5, 0)
"""Of each rank; the last joins before its first step."""
NUM_EPOCHS = 3


def batch(rank, number, num_rows=4):
    generator = torch.Generator().manual_seed(1000 * rank + number)
    inputs = torch.randn(num_rows, 7, generator=generator, dtype=torch.float64)
    targets = torch.randn(num_rows, 3, generator=generator, dtype=torch.float64)
    return inputs, targets


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def build(build_model=OddMlp):
    torch.manual_seed(0)
    return build_model().double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is reduced.

    Attributes:
        build: Makes the model.
        options: Of the distributed optimizer.
        make: Makes the plain optimizer.
    """

    build: type[nn.Module] = OddMlp
    options: tuple[tuple[str, object], ...] = ()
    make: object = sgd


def train_alone(case, size):
    """Step on what ranks would average: zero from those without data."""
    model = build(case.build)
    optimizer = case.make(model)
    for epoch in range(NUM_EPOCHS):
        for number in range(max(NUM_BATCHES[:size])):
            optimizer.zero_grad()
            for rank in range(size):
                if number < NUM_BATCHES[rank]:
                    (mse(model, *batch(rank, 100 * epoch + number)) / size).backward()
            optimizer.step()
    return weights(model)


def train_and_join(_, case):
    hvd.init()
    model = build(case.build)
    optimizer = hvd.DistributedOptimizer(
        case.make(model), model.named_parameters(), **dict(case.options)
    )
    lasts = []
    for epoch in range(NUM_EPOCHS):
        for number in range(NUM_BATCHES[hvd.rank()]):
            optimizer.zero_grad()
            mse(model, *batch(hvd.rank(), 100 * epoch + number)).backward()
            optimizer.step()
        lasts.append(hvd.join())
        # What a script does at the end of an epoch: the ranks that joined early missed
        # the last steps.
        hvd.broadcast_parameters(model.state_dict(), root_rank=lasts[-1])
        hvd.broadcast_optimizer_state(optimizer, root_rank=lasts[-1])
    hvd.shutdown()
    return weights(model), lasts


CASES = {
    "plain": Case(),
    "groups": Case(options=(("groups", 3),)),
    "fp16": Case(options=(("compression", hvd.Compression.fp16),)),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_uneven_data_train_as_one_process_does(name, size):
    case = CASES[name]
    results = run_ranks_bare(size, train_and_join, case)
    expected = train_alone(case, size)
    for trained, lasts in results:
        # Where batches take as long everywhere, the rank with most joins last.
        assert lasts == [0] * NUM_EPOCHS
        wire = torch.float16 if name == "fp16" else None
        assert_close(trained, expected, num_steps=7 * NUM_EPOCHS, wire=wire)
