"""With ``zero=1`` ranks keep shares of the optimizer's state, like one process."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.parity.problems import (
    BATCH,
    OddCnn,
    OddMlp,
    Problem,
    assert_close,
    assert_parity,
    mse,
    plain_step,
    train_share,
)
from tests.parity.sessions import message_of, named, run_cases, run_sessions
from torch import Tensor, nn

import ronde.torch as hvd
from ronde.errors import UsageError


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.1}, {"params": others, "momentum": 0.5}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def zero(_: nn.Module) -> dict[str, Any]:
    return {"zero": 1}


MLP = Problem(OddMlp, 7, plain_step, adam, options=zero)
CNN = Problem(OddCnn, 147, plain_step, adam, options=zero)


PROBLEMS = {
    "mlp adam": MLP,
    "mlp groups": replace(MLP, make_optimizer=two_groups),
    "cnn adam": CNN,
    "cnn groups": replace(CNN, make_optimizer=two_groups),
}


def closure_step(
    model: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor, number: int
) -> None:
    del number

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, inputs, targets)
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None
    assert all(p.grad is not None for p in model.parameters())


def thawing_step(
    model: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor, number: int
) -> None:
    model.get_submodule("first").requires_grad_(number >= 10)
    plain_step(model, optimizer, inputs, targets, number)


PROBLEMS["a closure and its loss"] = replace(MLP, step=closure_step)
PROBLEMS["trained later"] = replace(MLP, step=thawing_step)


@pytest.mark.parametrize(("size", "names"), [(3, list(PROBLEMS)), (4, ["cnn adam"])])
def test_follows_one_process(size, names):
    cases = {name: partial(train_share, PROBLEMS[name]) for name in names}
    for name, results in run_cases(size, cases).items():
        with named(name):
            assert_parity(results, PROBLEMS[name])


def test_a_group_that_is_added():
    size, steps = 3, 20

    def run(optimizer: Any, model: nn.Module, rows: slice, count: int) -> list[Tensor]:
        late = nn.Parameter(torch.linspace(0.5, 1.5, 7, dtype=torch.float64))
        for number in range(steps):
            if number == steps // 2:
                optimizer.add_param_group({"params": [late], "lr": 0.003})
            inputs, targets = MLP.data(number, count * BATCH)
            optimizer.zero_grad()
            loss = mse(model, inputs[rows] * late, targets[rows])
            loss.backward()
            optimizer.step()
        return [late.detach(), *(p.detach() for p in model.parameters())]

    def on_ranks() -> list[Tensor]:
        model = MLP.model()
        optimizer = hvd.DistributedOptimizer(adam(model), zero=1)
        first = hvd.rank() * BATCH
        return run(optimizer, model, slice(first, first + BATCH), hvd.size())

    model = MLP.model()
    expected = dict(enumerate(run(adam(model), model, slice(None), size)))
    for result in run_sessions(size, on_ranks):
        assert_close(dict(enumerate(result)), expected, num_steps=steps)


def train(
    model: nn.Module, optimizer: Any, first: int, last: int, count: int, rows: slice
) -> None:
    for number in range(first, last):
        inputs, targets = CNN.data(number, count)
        plain_step(model, optimizer, inputs[rows], targets[rows], number)


def start(saved: Any, last: int) -> Any:
    """Go on from what rank 0 alone has read; return what it would write."""
    model = CNN.model()
    optimizer = hvd.DistributedOptimizer(adam(model), model.named_parameters(), zero=1)
    first = 0
    if hvd.rank() == 0 and saved is not None:
        first, weights, state = saved
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    first = hvd.broadcast_object(first)
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    share = 12 // hvd.size()
    rows = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
    train(model, optimizer, first, last, 12, rows)
    optimizer.consolidate_state_dict()
    if hvd.rank() == 0:
        return last, model.state_dict(), optimizer.state_dict()
    refused = message_of(UsageError, optimizer.state_dict)
    assert "with zero=1 this rank has only its share" in refused
    return None


def test_is_saved_and_read_by_other_numbers_of_ranks():
    saved = None
    for last, size in enumerate((2, 3, 4, 1), 1):
        saved = run_sessions(size, start, saved, 5 * last)[0]
    model = CNN.model()
    optimizer = adam(model)
    train(model, optimizer, 0, 20, 12, slice(None))
    _, weights, state = saved
    assert_close(weights, model.state_dict(), num_steps=20)
    expected = optimizer.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        assert_close(state["state"][number], values, num_steps=20)
        for key, value in values.items():
            assert state["state"][number][key].stride() == value.stride()


def share_of_state() -> tuple[int, int]:
    # One layer has more than half of all.
    layers = [nn.Linear(64, 64) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(64, 500))
    optimizer = hvd.DistributedOptimizer(adam(model), zero=1)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    own = sum(v.numel() for s in optimizer.state.values() for v in s.values() if v.ndim)
    return own, 2 * sum(p.numel() for p in model.parameters())


def test_shares_are_equal_whatever_the_shapes():
    size = 3
    shares = run_sessions(size, share_of_state)
    whole = shares[0][1]
    assert sum(own for own, _ in shares) == whole
    for own, _ in shares:
        assert own == pytest.approx(whole / size, rel=0.01)


class LayerNorms(torch.optim.SGD):
    """Steps by the norm of each layer."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1 / parameter.grad.norm())


class Renamed(torch.optim.SGD):
    """Steps as torch's does."""


def refusals() -> list[str]:
    model = nn.Linear(3, 4)

    def make(cls: Any = torch.optim.SGD, **options: Any) -> Any:
        return hvd.DistributedOptimizer(cls(model.parameters()), **options)

    own = make(zero=1)
    model(torch.ones(2, 3)).sum().backward()
    own.step()
    table = nn.Embedding(5, 4, sparse=True)
    sparse = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=0.1), zero=1
    )
    table(torch.tensor([1, 2])).sum().backward()
    return [
        message_of(UsageError, make, zero=2),
        message_of(UsageError, make, zero=1, op=hvd.Adasum),
        message_of(UsageError, make, torch.optim.LBFGS, zero=1),
        message_of(UsageError, make, LayerNorms, zero=1),
        str(make(LayerNorms, zero=1, zero_elementwise=True)),
        str(make(Renamed, zero=1)),
        message_of(UsageError, copy.deepcopy, own),
        message_of(UsageError, own.consolidate_state_dict, 2),
        message_of(UsageError, own.load_state_dict, {"state": {}, "param_groups": []}),
        message_of(UsageError, sparse.step),
        message_of(UsageError, hvd.join),
        message_of(UsageError, hvd.elastic.TorchState, optimizer=own),
        message_of(UsageError, own.state_dict),
    ]


def test_what_cannot_be_is_refused():
    starts = (
        "zero must be 0 or 1, got 2.",
        "zero=1 and op=Adasum cannot be used together",
        "zero=1 needs an optimizer that updates each element independently, got LBFGS.",
        "zero=1 needs an optimizer that updates each element independently, got Layer",
        "DistributedOptimizer(LayerNorms",
        "DistributedOptimizer(Renamed",
        "an optimizer with zero=1 cannot be copied or pickled",
        "root must be in 0..1, got 2.",
        "the groups in state_dict must have the optimizer's numbers of parameters, ",
        "zero=1 does not support sparse gradients.",
        "join() cannot be used with zero=1",
        "TorchState does not support an optimizer with zero=1",
        "with zero=1 this rank has only its share",
    )
    for found in run_sessions(2, refusals):
        for message, begin in zip(found, starts, strict=True):
            assert message.startswith(begin)
