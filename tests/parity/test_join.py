"""Ranks with less data join, and the steps of other ranks stay correct."""

import gc
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from tests.parity.problems import OddMlp, assert_close, mse
from tests.parity.sessions import named, run_cases, run_sessions
from torch import nn

import ronde.torch as hvd

NUM_BATCHES = (7, 3, 5, 0)
"""Of each rank; the last joins before its first step."""
NUM_EPOCHS = 3


def batch(rank, number, num_rows=4):
    generator = torch.Generator().manual_seed(10000 * rank + number)
    inputs = torch.randn(num_rows, 7, generator=generator, dtype=torch.float64)
    targets = torch.randn(num_rows, 3, generator=generator, dtype=torch.float64)
    return inputs, targets


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def build(build_model=OddMlp):
    torch.manual_seed(0)
    return build_model().double()


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is reduced.

    Attributes:
        build: Makes the model.
        options: Of the distributed optimizer.
        make: Makes the plain optimizer.
        prepare: Called before each step with the model and the step's number.
        num_passes: Backward passes a step, though only one is announced.
    """

    build: Callable[[], nn.Module] = OddMlp
    options: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    prepare: Callable[[nn.Module, int], None] = lambda *_: None
    num_passes: int = 1

    def losses(self, model, rank, number):
        """Yield the losses of one step."""
        for passing in range(self.num_passes):
            yield mse(model, *batch(rank, 10 * number + passing))


def train_alone(case, size):
    """Step on what ranks would average: zero from those without data."""
    model = build(case.build)
    optimizer = case.make(model)
    for epoch in range(NUM_EPOCHS):
        for number in range(max(NUM_BATCHES[:size])):
            case.prepare(model, number)
            optimizer.zero_grad()
            for rank in range(size):
                if number < NUM_BATCHES[rank]:
                    for loss in case.losses(model, rank, 100 * epoch + number):
                        is_sum = case.options.get("op") == hvd.Sum
                        (loss if is_sum else loss / size).backward()
            optimizer.step()
    return weights(model)


def train_and_join(case):
    model = build(case.build)
    optimizer = hvd.DistributedOptimizer(
        case.make(model), model.named_parameters(), **case.options
    )
    lasts = []
    for epoch in range(NUM_EPOCHS):
        for number in range(NUM_BATCHES[hvd.rank()]):
            case.prepare(model, number)
            optimizer.zero_grad()
            for loss in case.losses(model, hvd.rank(), 100 * epoch + number):
                loss.backward()
            optimizer.step()
        lasts.append(hvd.join())
        # What a script does at the end of an epoch: the ranks that joined early missed
        # the last steps.
        hvd.broadcast_parameters(model.state_dict(), root_rank=lasts[-1])
        hvd.broadcast_optimizer_state(optimizer, root_rank=lasts[-1])
    return weights(model), lasts


class Embedded(nn.Module):
    """A sparse embedding before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 5, sparse=True)
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs):
        rows = (inputs[:, 0].abs() * 5).long().clamp(max=10)
        return self.layer(torch.tanh(self.table(rows)))


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def freeze_by_turns(model, number):
    """Train other layers in every step; one is trained from the fifth on alone."""
    model.first.requires_grad_(number % 2 == 0)
    model.third.requires_grad_(number % 3 != 2)
    model.second.requires_grad_(number >= 4)


def start_frozen():
    model = OddMlp()
    model.second.requires_grad_(False)
    return model


CASES = {
    "plain": Case(),
    "groups": Case(options={"groups": 3}),
    "fp16": Case(options={"compression": hvd.Compression.fp16}),
    "sparse": Case(Embedded, make=plain_sgd),
    "sparse_as_dense": Case(Embedded, {"sparse_as_dense": True}, plain_sgd),
    "passes": Case(num_passes=3),
    "passes of a sum": Case(
        options={"op": hvd.Sum}, num_passes=2, make=lambda m: sgd(m, lr=0.01)
    ),
    "sparse passes": Case(Embedded, make=plain_sgd, num_passes=2),
    "frozen": Case(start_frozen, {"groups": 4}, prepare=freeze_by_turns),
}


@pytest.mark.parametrize(
    ("size", "names"),
    [(3, list(CASES)), (4, ["groups"])],
)
def test_uneven_data_train_as_one_process_does(size, names):
    cases = {name: partial(train_and_join, CASES[name]) for name in names}
    for name, results in run_cases(size, cases).items():
        expected = train_alone(CASES[name], size)
        wire = torch.float16 if name == "fp16" else None
        with named(name):
            for trained, lasts in results:
                assert lasts == [0] * NUM_EPOCHS  # it has the most batches
                assert_close(trained, expected, num_steps=7 * NUM_EPOCHS, wire=wire)


def make(model, **options):
    return hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)


def backward(model, number=0):
    mse(model, *batch(hvd.rank(), number)).backward()


def test_several_optimizers_are_kept_up_with_at_once():
    """The others step with either, in turns that the joined rank does not know."""

    def check():
        models = [build(), build()]
        optimizers = [make(model) for model in models]
        turns = [1, 0, 0, 1, 1, 0] if hvd.rank() else []
        for number, turn in enumerate(turns):
            optimizers[turn].zero_grad()
            backward(models[turn], number)
            optimizers[turn].step()
        last = hvd.join()
        for model in models:
            hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        return last, [weights(model) for model in models]

    results = run_sessions(3, check)
    assert results[0][0] in (1, 2)
    expected = [build(), build()]
    optimizers = [sgd(model) for model in expected]
    for number, turn in enumerate([1, 0, 0, 1, 1, 0]):
        optimizers[turn].zero_grad()
        for rank in (1, 2):
            (mse(expected[turn], *batch(rank, number)) / 3).backward()
        optimizers[turn].step()
    for _, trained in results:
        for mine, model in zip(trained, expected, strict=True):
            assert_close(mine, weights(model), num_steps=6)


def test_an_optimizer_that_one_rank_alone_still_has_is_given_up():
    def check():
        kept = []
        for number in range(3):
            model = build()
            optimizer = make(model)
            backward(model)
            optimizer.step()
            if hvd.rank() == 1 and number < 2:
                kept.append(optimizer)
        del optimizer
        gc.collect()
        hvd.join()
        return len(kept)

    assert run_sessions(2, check) == [0, 2]


def test_gradients_of_a_rank_that_has_joined_stay():
    def check():
        model = build()
        optimizer = make(model)
        backward(model)
        optimizer.step()
        before = [p.grad.clone() for p in model.parameters()]
        if hvd.rank():
            optimizer.zero_grad()
            backward(model, 1)
            optimizer.step()
        hvd.join()
        after = [p.grad for p in model.parameters()]
        # And it goes on from them, as one process does that was not told to zero them.
        optimizer.step()
        pairs = zip(before, after, strict=True)
        return all(torch.equal(b, a) for b, a in pairs)

    assert run_sessions(2, check) == [True, False]


def test_an_optimizer_of_some_ranks():
    def check():
        pair = hvd.add_process_set([0, 2])
        model = build()
        optimizer = make(model, process_set=pair)
        for number in range(1 + 2 * hvd.rank()):
            optimizer.zero_grad()
            backward(model, number)
            optimizer.step()
        hvd.join()
        return weights(model)

    results = run_sessions(3, check)
    for rank, ranks in ((1, [1]), (2, [0, 2])):
        model = build()
        optimizer = sgd(model)
        for number in range(1 + 2 * rank):
            optimizer.zero_grad()
            for other in ranks:
                if number < 1 + 2 * other:
                    loss = mse(model, *batch(other, number)) / len(ranks)
                    loss.backward()
            optimizer.step()
        assert_close(results[rank], weights(model), num_steps=5)


def test_a_rank_that_dies_ends_the_wait():
    def check():
        model = build()
        optimizer = make(model)
        backward(model)
        optimizer.step()
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(hvd.HorovodInternalError):
            hvd.join()

    run_sessions(3, check, dying=[1])
