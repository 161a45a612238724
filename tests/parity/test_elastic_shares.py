"""Ranks with unequal shares and micro-batches follow one process with whole batches."""

import pytest
import torch
from tests.parity.problems import OddMlp, assert_close, mse
from tests.parity.sessions import run_sessions
from torch import nn

import ronde.torch as hvd
from ronde.torch.elastic import (
    ElasticLoader,
    ElasticShards,
    GradientWeights,
    LearningRateScale,
)

SAMPLES = 23
BATCH = 7  # and 2 at the end, for up to 4 ranks
EPOCHS = 3


def samples():
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 7, generator=generator, dtype=torch.float64)
    targets = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    return inputs, targets


def start():
    torch.manual_seed(0)
    model = OddMlp().double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, sgd


def weights_of(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def train(source, *, is_single):
    """Train as the loop of an elastic job does; return the weights and passes."""
    model, sgd = start()
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    weights = GradientWeights(model.parameters(), optimizer)
    num_passes = []
    for share in source:
        weights.begin(share)
        optimizer.zero_grad()
        if is_single:
            mse(model, *share.inputs).backward()
        else:
            for inputs in weights.micro_batches(share):
                mse(model, *inputs).backward()
        optimizer.step()
        num_passes.append(len(share.weights))
    weights.close()
    source.close()
    assert optimizer.backward_passes_per_step == 1
    return weights_of(model), num_passes


def train_alone(batches):
    model, optimizer = start()
    for inputs, targets in batches:
        optimizer.zero_grad()
        mse(model, inputs, targets).backward()
        optimizer.step()
    return weights_of(model)


def assert_parity(results, batches):
    expected = train_alone(batches)
    for weights, _ in results:
        assert_close(weights, expected, num_steps=len(batches))
        assert all(torch.equal(weights[name], results[0][0][name]) for name in weights)


@pytest.mark.parametrize(
    ("size", "micro_batch"), [(3, None), (3, 1), (3, 3), (2, 3), (4, 1)]
)
def test_shares_of_a_data_set(size, micro_batch):
    dataset = torch.utils.data.TensorDataset(*samples())

    def work():
        loader = ElasticLoader(dataset, BATCH, micro_batch=micro_batch, epochs=EPOCHS)
        return train(loader, is_single=micro_batch is None)

    whole = ElasticLoader(dataset, BATCH, epochs=EPOCHS)
    whole.seek(whole.position, 0, 1)
    batches = [share.inputs for share in whole]
    assert [len(inputs) for inputs, _ in batches[:4]] == [7, 7, 7, 2]
    results = run_sessions(size, work, environment={})
    assert_parity(results, batches)
    if micro_batch == 1 and size == 4:
        assert [num_passes[0] for _, num_passes in results] == [1, 2, 2, 2]


class Rows:
    """A shard: batches of rows, with a state."""

    def __init__(self, rows):
        self.rows, self.number = rows, 0

    def __iter__(self):
        while self.number < len(self.rows):
            self.number += 1
            yield tuple(each[self.rows[self.number - 1]] for each in samples())
        self.number = 0

    def state_dict(self):
        return self.number

    def load_state_dict(self, state):
        self.number = state


SHARDS = [
    [[0, 1], [2, 3], [4]],
    [[5, 6, 7]],
    [[8], [9], [10], [11, 12]],
    [[13, 14, 15], [16, 17]],
]


@pytest.mark.parametrize("size", [3, 4])
def test_shards_of_which_some_end_early(size):
    def work():
        source = ElasticShards([Rows(rows) for rows in SHARDS], epochs=EPOCHS)
        return train(source, is_single=False)

    steps = [
        [row for shard in SHARDS for row in ([*shard, [], [], []][number])]
        for number in range(4)
    ]
    batches = [tuple(each[rows] for each in samples()) for rows in steps] * EPOCHS
    results = run_sessions(size, work, environment={})
    assert_parity(results, batches)
    if size == 4:
        assert [len(num_passes) for _, num_passes in results] == [12] * 4
        assert [sum(num_passes) for _, num_passes in results] == [9, 3, 12, 6]


def test_hooks_are_there_only_where_shares_are_unequal():
    model, _ = start()
    frozen = model.second.weight.requires_grad_(False)
    weights = GradientWeights(model.parameters())
    loader = ElasticLoader(torch.utils.data.TensorDataset(*samples()), 8, shuffle=False)
    for rank, size, factor in [(0, 2, 1.0), (2, 3, 9 / 8), (0, 3, 6 / 8), (1, 4, 1.0)]:
        loader.seek(loader.position._replace(samples=0, epoch=0), rank, size)
        share = next(loader)
        weights.begin(share)
        assert share.weights == (factor,)
        assert bool(model.scale._backward_hooks) == (factor != 1)
        frozen.requires_grad_()
        model.zero_grad()
        mse(model, *share.inputs).backward()
        grads = [p.grad.clone() for p in model.parameters()]
        weights.close()
        model.zero_grad()
        mse(model, *share.inputs).backward()
        for grad, p in zip(grads, model.parameters(), strict=True):
            assert torch.equal(grad, p.grad * factor)
        frozen.requires_grad_(False)


def test_a_sample_that_does_not_count_may_have_any_loss():
    parameter = nn.Parameter(torch.ones(3))
    weights = GradientWeights([parameter])
    loader = ElasticLoader([torch.full((3,), float("nan"))], 1)
    loader.seek(loader.position, 0, 2)
    share = next(loader)
    weights.begin(share)
    (parameter * share.inputs).sum().backward()
    assert torch.equal(parameter.grad, torch.zeros(3))


def test_learning_rates_follow_the_ranks_through_a_distributed_optimizer():
    def work():
        parameter = nn.Parameter(torch.zeros(()))
        sgd = torch.optim.SGD([parameter], lr=torch.tensor(0.5))
        optimizer = hvd.DistributedOptimizer(sgd, [("p", parameter)])
        scale = LearningRateScale(optimizer, base_size=1)
        scale.begin(0, hvd.size())
        parameter.backward()
        optimizer.step()
        assert float(optimizer.param_groups[0]["lr"]) == 0.5
        return parameter.item()

    assert run_sessions(3, work, environment={}) == [-1.5] * 3
