"""Ranks that make their calls in different orders, as Horovod lets them."""

from functools import partial

import pytest
import torch
from tests.parity.problems import assert_same_weights, loss_of, weights_of
from tests.parity.sessions import run_cases, run_sessions
from torch import nn

import ronde.torch as hvd

NUM_STEPS = 4


class Words(nn.Module):
    """A model whose first gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6, sparse=True)
        self.out = nn.Linear(6, 3)

    def forward(self, inputs):
        indices = (inputs.abs() * 10).long() % 11
        return self.out(self.table(indices).mean(1))


def mlp():
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


MODELS = {"plain": mlp, "sparse": Words}
KINDS = list(MODELS)


def build(kind, seed=0):
    torch.manual_seed(seed)
    return MODELS[kind]().double()


def distributed(model):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(sgd, model.named_parameters())


def alone(kind, size, *, skips=lambda rank, step: False, seed=0):
    """Return the weights of one process: who skips a step adds zeros to the average."""
    model = build(kind, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            if not skips(rank, step):
                (loss_of(model, rank, step) / size).backward()
        optimizer.step()
    return weights_of(model)


def skip_a_backward(kind, skipped):
    """The last rank's batch is bad; all ranks average the loss all the same."""
    size = hvd.size()

    def skips(rank, step):
        return rank == size - 1 and step == skipped

    model = build(kind)
    optimizer = distributed(model)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        if not skips(hvd.rank(), step):
            loss.backward()
        hvd.allreduce(loss.detach(), name="loss")
        optimizer.step()
    assert_same_weights(weights_of(model), alone(kind, size, skips=skips))


def use_two_optimizers_crosswise(kind):
    """Odd ranks go backward and step in the other order."""
    models = [build(kind, seed) for seed in range(2)]
    optimizers = [distributed(model) for model in models]
    order = [0, 1] if hvd.rank() % 2 == 0 else [1, 0]
    for step in range(NUM_STEPS):
        for index in order:
            optimizers[index].zero_grad()
            loss_of(models[index], hvd.rank(), step).backward()
        for index in order:
            optimizers[index].step()
    expected = alone(kind, hvd.size()) + alone(kind, hvd.size(), seed=1)
    assert_same_weights(weights_of(*models), expected)


def measure_before_backward_on_some_ranks(kind, name):
    model = build(kind)
    optimizer = distributed(model)
    metrics = []

    def measure():
        metrics.append(hvd.allreduce(torch.ones(1) * hvd.rank(), name=name).item())

    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        if hvd.rank() == 0:
            loss.backward()
            measure()
        else:
            measure()
            loss.backward()
        optimizer.step()
    assert_same_weights(weights_of(model), alone(kind, hvd.size()))
    assert metrics == [(hvd.size() - 1) / 2] * NUM_STEPS


@pytest.mark.parametrize(
    ("size", "engine", "kinds"),
    [
        (3, "auto", KINDS),
        (3, "gloo", ["sparse"]),
        (4, "hierarchical", ["plain"]),
    ],
)
def test_any_order(size, engine, kinds):
    def work(kind):
        skip_a_backward(kind, 0)
        skip_a_backward(kind, 2)
        use_two_optimizers_crosswise(kind)
        measure_before_backward_on_some_ranks(kind, "metric")
        measure_before_backward_on_some_ranks(kind, None)

    run_cases(size, {kind: partial(work, kind) for kind in kinds}, engine=engine)


def test_gradients_are_complete_after_synchronize():
    """What gave way is clipped, or forgotten, as if it had not."""

    def work():
        model = build("plain")
        optimizer = distributed(model)
        norms = []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, hvd.rank(), step)
            if hvd.rank() == 0 or step % 2:
                loss.backward()
            hvd.allreduce(loss.detach(), name="loss")
            optimizer.synchronize()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            norms.append(norm.item())
            if step != 2:
                with optimizer.skip_synchronize():
                    optimizer.step()
        return weights_of(model), norms

    (first, norms), *others = run_sessions(3, work)
    assert all(norm > 0 for norm in norms)
    for same, equal in others:
        assert equal == norms
        assert_same_weights(same, first)
