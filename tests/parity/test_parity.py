"""N ranks with batch b follow one process with batch N*b, whatever one does."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.parity.problems import (
    BATCH,
    CountingEngine,
    OddCnn,
    OddMlp,
    Problem,
    assert_close,
    assert_parity,
    mse,
    plain_step,
    train_share,
)
from tests.parity.sessions import run_cases
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ronde.torch as hvd
from ronde.collectives import Communicator
from ronde.data_parallel import BucketLimits, Reducer, ReducerGroup, ReducerOptions
from ronde.session import current_session


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


SIZE = 3
MLP = Problem(OddMlp, 7, plain_step, sgd)
CNN = Problem(OddCnn, 147, plain_step, sgd)


PROBLEMS: dict[str, Problem] = {}


def problems(*values: Any) -> Callable[[Callable[..., Problem]], object]:
    """Add the problem that a function builds of each value, or of none."""

    def add(build: Callable[..., Problem]) -> object:
        for given in [(value,) for value in values] or [()]:
            PROBLEMS[" ".join(map(str, (build.__name__, *given)))] = build(*given)
        return build

    return add


@problems("mlp", "cnn")
def with_sgd(name):
    return {"mlp": MLP, "cnn": CNN}[name]


@problems("cnn")
def with_adam(name):
    return replace(with_sgd(name), make_optimizer=adam)


@problems(torch.bfloat16)
def dtypes(dtype):
    # Rounding feeds back through bfloat16's weights: few steps, so that it stays small.
    num_steps = 50 if dtype == torch.float32 else 5
    return replace(MLP, dtype=dtype, num_steps=num_steps)


def strides() -> bool:
    torch.manual_seed(0)
    model = OddCnn()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    for number in range(3):
        plain_step(model, optimizer, *Problem.data(CNN32, number, 4), number)
    return all(p.grad.stride() == p.stride() for p in model.parameters())


CNN32 = replace(CNN, dtype=torch.float32)


@problems(False)
def zero_grad(set_to_none):
    def step(model, optimizer, inputs, targets, number):
        optimizer.zero_grad(set_to_none=set_to_none)
        mse(model, inputs, targets).backward()
        optimizer.step()

    return replace(MLP, step=step)


@problems()
def plain_grad_scaler_with_infinite_gradients():
    scalers: dict[int, torch.amp.GradScaler] = {}

    def step(model, optimizer, inputs, targets, number):
        scaler = scalers.setdefault(
            id(model), torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=7)
        )
        optimizer.zero_grad()
        loss = mse(model, inputs, targets)
        if number % 10 == 3 and inputs[0, 0] == first_of_batch(number):
            loss = loss * float("inf")  # on one rank only
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        # On every rank: the step was skipped, and only that one.
        assert (scaler.get_scale() < before) == (number % 10 == 3)

    return replace(MLP, step=step)


def first_of_batch(number: int) -> float:
    return float(MLP.data(number, 4)[0][0, 0])


@problems()
def grad_scaler_unscales_before_clipping():
    scaler = torch.amp.GradScaler("cpu", init_scale=64)

    def step(model, optimizer, inputs, targets, number):
        optimizer.zero_grad()
        scaler.scale(mse(model, inputs, targets)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    return replace(MLP, step=step)


@problems(True, False)
def learning_rate_scheduler(is_on_wrapped):
    schedulers: dict[int, Any] = {}

    def step(model, optimizer, inputs, targets, number):
        if id(model) not in schedulers:
            target = getattr(optimizer, "wrapped", optimizer)
            target = target if is_on_wrapped else optimizer
            schedulers[id(model)] = torch.optim.lr_scheduler.StepLR(target, 5, 0.7)
        plain_step(model, optimizer, inputs, targets, number)
        schedulers[id(model)].step()

    return replace(MLP, step=step)


@problems(True, False)
def backward_passes_per_step(is_average):
    def step(model, optimizer, inputs, targets, number):
        optimizer.zero_grad()
        for factor in (1.0, 0.5):
            loss = mse(model, factor * inputs, targets)
            is_alone = not hasattr(optimizer, "synchronize")
            (loss / 2 if is_alone and is_average else loss).backward()
        optimizer.step()

    options = {
        "backward_passes_per_step": 2,
        "average_aggregated_gradients": is_average,
    }
    return replace(MLP, step=step, options=lambda _: options)


@problems(1, 4)
def any_number_of_passes_before_a_step(passes):
    """Three passes, whatever was announced; the gradients add up as in one process."""

    def step(model, optimizer, inputs, targets, number):
        optimizer.zero_grad()
        for factor in (1.0, 0.5, 0.25):
            mse(model, factor * inputs, targets).backward()
        optimizer.step()

    options = {"backward_passes_per_step": passes}
    return replace(MLP, step=step, options=lambda _: options)


@problems(hvd.Sum)
def two_backward_passes_on_a_sum_or_average(op):
    def step(model, optimizer, inputs, targets, number):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        is_alone = not hasattr(optimizer, "synchronize")
        factor = SIZE if op == hvd.Sum and is_alone else 1
        (factor * mse(model, inputs, targets)).backward()
        (factor * mse(model, -inputs, targets)).backward()
        optimizer.step()

    def slow_sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    problem = replace(MLP, step=step, make_optimizer=slow_sgd)
    return replace(problem, options=lambda _: {"op": op})


@problems()
def clipping_between_synchronize_and_step():
    def step(model, optimizer, inputs, targets, number):
        optimizer.zero_grad()
        mse(model, inputs, targets).backward()
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    return replace(MLP, step=step)


@problems()
def closure():
    def step(model, optimizer, inputs, targets, number):
        def closure():
            optimizer.zero_grad()
            loss = mse(model, inputs, targets)
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None

    return replace(MLP, step=step)


@problems()
def lbfgs_calls_its_closure_many_times():
    def lbfgs(model):
        return torch.optim.LBFGS(
            model.parameters(), lr=0.1, max_iter=3, tolerance_change=0.0
        )

    def step(model, optimizer, inputs, targets, number):
        def closure():
            optimizer.zero_grad()
            loss = mse(model, inputs, targets)
            loss.backward()
            return loss

        optimizer.step(closure)

    # Its curvature estimates magnify rounding from step to step.
    return replace(MLP, step=step, make_optimizer=lbfgs, num_steps=5)


class Pair(nn.Module):
    """A generator and a discriminator, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = OddMlp()
        self.discriminator = nn.Linear(3, 1)


def train_pair(num_ranks: int = 0) -> dict[str, Tensor]:
    """Train on ranks, or where their number is given alone."""
    torch.manual_seed(0)
    pair = Pair().double()
    optimizers = [sgd(pair.generator), adam(pair.discriminator)]
    rows = slice(None)
    if not num_ranks:
        num_ranks = hvd.size()
        rows = slice(hvd.rank() * 4, hvd.rank() * 4 + 4)
        optimizers = [hvd.DistributedOptimizer(o) for o in optimizers]
    for number in range(50):
        inputs, targets = MLP.data(number, 4 * num_ranks)
        inputs, targets = inputs[rows], targets[rows]
        fake = pair.generator(inputs)
        optimizers[1].zero_grad()
        (pair.discriminator(fake.detach()) - 1).square().mean().backward()
        pair.discriminator(targets).square().mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (pair.discriminator(fake).square().mean() + fake.square().mean()).backward()
        optimizers[0].step()
    return {name: p.detach() for name, p in pair.named_parameters()}


class Partial(nn.Module):
    """Frozen, unused, shared and sometimes used parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(7, 7)
        self.frozen = nn.Linear(7, 7)
        self.sometimes = nn.Linear(7, 7)
        self.never = nn.Linear(7, 7)
        self.head = nn.Linear(7, 3)
        self.frozen.requires_grad_(False)

    def forward(self, inputs: Tensor, *, is_sometimes: bool = False) -> Tensor:
        hidden = self.shared(torch.tanh(self.shared(inputs)))
        hidden = self.frozen(torch.tanh(hidden))
        if is_sometimes:
            hidden = hidden + self.sometimes(inputs)
        return self.head(hidden)


def decaying_sgd(model: nn.Module) -> torch.optim.Optimizer:
    # Weight decay moves a parameter whose gradient is zero, but none that has none.
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


@problems(True)
def frozen_unused_and_shared_parameters(set_to_none):
    def step(model, optimizer, inputs, targets, number):
        optimizer.zero_grad(set_to_none=set_to_none)
        output = model(inputs, is_sometimes=number % 3 == 1)
        nn.functional.mse_loss(output, targets).backward()
        assert model.never.weight.grad is None
        optimizer.step()

    return Problem(Partial, 7, step, decaying_sgd)


def use_on_rank_one() -> bool:
    torch.manual_seed(0)
    model = Partial()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    for _ in range(3):
        optimizer.zero_grad()
        output = model(torch.ones(2, 7), is_sometimes=hvd.rank() == 1)
        output.sum().backward()
        mine = model.sometimes.weight.grad.clone()
        # Every output is the sum of a linear map: rank 1's gradient is known.
        weights = model.head.weight.sum(0)
        expected = 2 * weights[:, None].expand(7, 7) / hvd.size()
        torch.testing.assert_close(mine, expected)
        assert model.never.weight.grad is None
        optimizer.step()
    return True


@problems()
def thawed_parameters_join():
    def step(model, optimizer, inputs, targets, number):
        model.first.requires_grad_(number >= 5 and number % 4 != 0)
        plain_step(model, optimizer, inputs, targets, number)

    def frozen_first():
        model = OddMlp()
        model.first.requires_grad_(False)
        return model

    return replace(MLP, build=frozen_first, step=step)


@problems()
def added_parameter_group():
    class Growing(OddMlp):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Linear(3, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.late(super().forward(inputs))

    def early_sgd(model):
        early = [p for n, p in model.named_parameters() if "late" not in n]
        return torch.optim.SGD(early, lr=0.05, momentum=0.9)

    def step(model, optimizer, inputs, targets, number):
        if number == 10:
            optimizer.add_param_group({"params": list(model.late.parameters())})
        plain_step(model, optimizer, inputs, targets, number)

    return replace(MLP, build=Growing, step=step, make_optimizer=early_sgd)


class Checkpointed(OddMlp):
    """Recomputes its layers in backward; ``second`` is used in two segments."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.square = nn.Linear(13, 13)

    def forward(self, inputs: Tensor) -> Tensor:
        def run(function, value):
            return checkpoint(function, value, use_reentrant=self.use_reentrant)

        hidden = torch.tanh(run(self.first, inputs.requires_grad_()))
        hidden = torch.tanh(run(self.square, hidden))
        hidden = torch.tanh(run(self.square, hidden))
        hidden = torch.tanh(run(self.second, hidden))
        return self.scale * run(self.third, hidden)


@problems(True, False)
def checkpointed(use_reentrant):
    def build():
        return Checkpointed(use_reentrant=use_reentrant)

    return replace(MLP, build=build)


def test_nested_backward_does_not_end_a_round():
    model = Checkpointed(use_reentrant=True)
    engine = CountingEngine()
    communicator = Communicator(engine)
    named = list(model.named_parameters())
    reducer = Reducer(named, ReducerGroup(communicator), ReducerOptions())
    counts = []
    for _ in range(3):
        before = engine.num_reductions
        model.zero_grad()
        mse(model, torch.ones(2, 7), torch.ones(2, 3)).backward()
        assert all(p.grad is not None for p in model.parameters())
        counts.append(engine.num_reductions - before)
        reducer.step_done()
    assert counts == [1, 1, 1]
    reducer.close()


def train_in_tiny_buckets(*, use_reentrant: bool) -> dict[str, Tensor]:
    """Have a gradient in a bucket of its own, and add to a shared one twice."""
    problem = checkpointed(use_reentrant)
    model = problem.model()
    optimizer = problem.make_optimizer(model)
    named = list(model.named_parameters())
    options = ReducerOptions(limits=BucketLimits(1, 1))
    communicator = current_session().states[0].communicator.duplicate()
    reducer = Reducer(named, ReducerGroup(communicator), options)
    optimizer.register_step_post_hook(lambda *_: reducer.step_done())
    for number in range(problem.num_steps):
        inputs, targets = problem.data(number, hvd.size() * BATCH)
        rows = slice(hvd.rank() * BATCH, (hvd.rank() + 1) * BATCH)
        problem.step(model, optimizer, inputs[rows], targets[rows], number)
    assert len(reducer.rounds.buckets) == len(named)
    reducer.close()
    return {name: p.detach() for name, p in named}


@problems(2.0)
def gradient_predivide_factor(factor):
    options = {"gradient_predivide_factor": factor}
    return replace(MLP, options=lambda _: options)


@problems(5, "lists")
def groups(groups):
    def options(model):
        if groups == "lists":
            return {"groups": [[model.third.bias, model.first.weight], [model.scale]]}
        return {"groups": groups}

    return replace(MLP, options=options)


ALIKE = [True] * SIZE
CASES = {
    **{name: partial(train_share, problem) for name, problem in PROBLEMS.items()},
    "strides": strides,
    "pair": train_pair,
    "used on rank 1": use_on_rank_one,
    "tiny buckets": partial(train_in_tiny_buckets, use_reentrant=False),
    "tiny buckets, reentrant": partial(train_in_tiny_buckets, use_reentrant=True),
}


@pytest.fixture(scope="module")
def found():
    return run_cases(SIZE, CASES)


@pytest.mark.parametrize("name", PROBLEMS)
def test_ranks_follow_one_process(found, name):
    assert_parity(found[name], PROBLEMS[name])


@pytest.mark.parametrize(
    ("size", "engine"),
    [(4, "auto"), (2, "gloo"), (3, "scheduled"), (3, "hierarchical")],
)
def test_other_sizes_and_engines(size, engine):
    names = ["with_sgd mlp", "with_adam cnn"]
    found = run_cases(size, {name: CASES[name] for name in names}, engine=engine)
    for name, results in found.items():
        assert_parity(results, PROBLEMS[name])


def test_channels_last_gradients_keep_their_strides(found):
    assert found["strides"] == ALIKE


def test_several_models_and_optimizers_at_once(found):
    assert_close(found["pair"][0], train_pair(num_ranks=SIZE))


def test_parameter_used_on_one_rank_only(found):
    assert found["used on rank 1"] == ALIKE


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_that_grows_while_its_bucket_is_under_way(found, use_reentrant):
    name = "tiny buckets, reentrant" if use_reentrant else "tiny buckets"
    assert_parity(found[name], checkpointed(use_reentrant))
