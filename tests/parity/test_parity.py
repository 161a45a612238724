"""N ranks with batch b follow one process with batch N*b, whatever one does."""

from dataclasses import replace
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
    mse,
    plain_step,
    train_alone,
    train_on_ranks,
)
from tests.ranks import run_ranks_bare
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ronde.torch as hvd
from ronde.collectives import Communicator
from ronde.data_parallel import BucketLimits, Reducer, ReducerGroup, ReducerOptions
from ronde.torch.session import current_session


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


MLP = Problem(OddMlp, 7, plain_step, sgd)
CNN = Problem(OddCnn, 147, plain_step, sgd)


def assert_parity(problem: Problem, size: int = 2, **tolerance: Any) -> None:
    results = run_ranks_bare(size, train_on_ranks, problem)
    for name, value in results[0].items():
        for result in results[1:]:
            assert torch.equal(result[name], value), f"ranks differ in {name}"
    expected = train_alone(problem, size)
    assert_close(results[0], expected, num_steps=problem.num_steps, **tolerance)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("make_optimizer", [sgd, adam])
@pytest.mark.parametrize("problem", [MLP, CNN], ids=["mlp", "cnn"])
def test_follows_one_process(problem, make_optimizer, size):
    assert_parity(replace(problem, make_optimizer=make_optimizer), size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype):
    # Rounding feeds back through bfloat16's weights: few steps, so that it stays small.
    num_steps = 50 if dtype == torch.float32 else 5
    assert_parity(replace(MLP, dtype=dtype, num_steps=num_steps))


def test_channels_last_gradients_keep_their_strides():
    assert all(run_ranks_bare(2, _strides))


def _strides(_: object) -> bool:
    hvd.init()
    model = OddCnn()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    for number in range(3):
        plain_step(model, optimizer, *Problem.data(CNN32, number, 4), number)
    return all(p.grad.stride() == p.stride() for p in model.parameters())


CNN32 = replace(CNN, dtype=torch.float32)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    def step(model, optimizer, inputs, targets, number):
        optimizer.zero_grad(set_to_none=set_to_none)
        mse(model, inputs, targets).backward()
        optimizer.step()

    assert_parity(replace(MLP, step=step))


def test_zero_grad_by_the_model():
    def step(model, optimizer, inputs, targets, number):
        mse(model, inputs, targets).backward()
        optimizer.step()
        model.zero_grad(set_to_none=number % 2 == 0)

    assert_parity(replace(MLP, step=step))


def test_plain_grad_scaler_with_infinite_gradients():
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

    assert_parity(replace(MLP, step=step))


def first_of_batch(number: int) -> float:
    return float(MLP.data(number, 4)[0][0, 0])


def test_grad_scaler_unscales_before_clipping():
    scaler = torch.amp.GradScaler("cpu", init_scale=64)

    def step(model, optimizer, inputs, targets, number):
        optimizer.zero_grad()
        scaler.scale(mse(model, inputs, targets)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    assert_parity(replace(MLP, step=step))


@pytest.mark.parametrize("is_on_wrapped", [True, False])
def test_learning_rate_scheduler(is_on_wrapped):
    schedulers: dict[int, Any] = {}

    def step(model, optimizer, inputs, targets, number):
        if id(model) not in schedulers:
            target = getattr(optimizer, "wrapped", optimizer)
            target = target if is_on_wrapped else optimizer
            schedulers[id(model)] = torch.optim.lr_scheduler.StepLR(target, 5, 0.7)
        plain_step(model, optimizer, inputs, targets, number)
        schedulers[id(model)].step()

    assert_parity(replace(MLP, step=step))


@pytest.mark.parametrize("is_average", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_backward_passes_per_step(is_average, size):
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
    assert_parity(replace(MLP, step=step, options=lambda _: options), size)


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_any_number_of_passes_before_a_step(passes):
    """Three passes, whatever was announced; the gradients add up as in one process."""

    def step(model, optimizer, inputs, targets, number):
        optimizer.zero_grad()
        for factor in (1.0, 0.5, 0.25):
            mse(model, factor * inputs, targets).backward()
        optimizer.step()

    options = {"backward_passes_per_step": passes}
    assert_parity(replace(MLP, step=step, options=lambda _: options))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("size", [2, 3])
def test_two_backward_passes_on_a_sum_or_average(op, size):
    def step(model, optimizer, inputs, targets, number):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        is_alone = not hasattr(optimizer, "synchronize")
        factor = size if op == hvd.Sum and is_alone else 1
        (factor * mse(model, inputs, targets)).backward()
        (factor * mse(model, -inputs, targets)).backward()
        optimizer.step()

    def slow_sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    problem = replace(MLP, step=step, make_optimizer=slow_sgd)
    assert_parity(replace(problem, options=lambda _: {"op": op}), size)


def test_clipping_between_synchronize_and_step():
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

    assert_parity(replace(MLP, step=step))


def test_closure():
    def step(model, optimizer, inputs, targets, number):
        def closure():
            optimizer.zero_grad()
            loss = mse(model, inputs, targets)
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None

    assert_parity(replace(MLP, step=step))


def test_lbfgs_calls_its_closure_many_times():
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
    assert_parity(replace(MLP, step=step, make_optimizer=lbfgs, num_steps=5))


class Pair(nn.Module):
    """A generator and a discriminator, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = OddMlp()
        self.discriminator = nn.Linear(3, 1)


def test_several_models_and_optimizers_at_once():
    results = run_ranks_bare(2, _train_pair)
    assert_close(results[0], _train_pair(None, num_ranks=2))


def _train_pair(claim: object, num_ranks: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(0)
    pair = Pair().double()
    optimizers = [sgd(pair.generator), adam(pair.discriminator)]
    rows = slice(None)
    if claim is not None:
        hvd.init()
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


@pytest.mark.parametrize("set_to_none", [True, False])
def test_frozen_unused_and_shared_parameters(set_to_none):
    def step(model, optimizer, inputs, targets, number):
        optimizer.zero_grad(set_to_none=set_to_none)
        output = model(inputs, is_sometimes=number % 3 == 1)
        nn.functional.mse_loss(output, targets).backward()
        assert model.never.weight.grad is None
        optimizer.step()

    assert_parity(Problem(Partial, 7, step, decaying_sgd))


def test_parameter_used_on_one_rank_only():
    assert all(run_ranks_bare(3, _use_on_rank_one))


def _use_on_rank_one(_: object) -> bool:
    hvd.init()
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


def test_rank_without_any_gradient_takes_part_at_step():
    assert run_ranks_bare(2, _no_gradient_on_rank_one) == [True, True]


def _no_gradient_on_rank_one(_: object) -> bool:
    hvd.init()
    torch.manual_seed(0)
    model = OddMlp()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    for number in range(3):
        optimizer.zero_grad()
        if hvd.rank() == 0:
            mse(model, *CNN_FREE(number)).backward()
        optimizer.step()
    weights = hvd.allgather(model.first.weight.detach()[None])
    return bool(torch.equal(weights[0], weights[1]))


def CNN_FREE(number: int) -> tuple[Tensor, Tensor]:  # noqa: N802
    return replace(MLP, dtype=torch.float32).data(number, 4)


def test_thawed_parameters_join():
    def step(model, optimizer, inputs, targets, number):
        model.first.requires_grad_(number >= 5 and number % 4 != 0)
        plain_step(model, optimizer, inputs, targets, number)

    def frozen_first():
        model = OddMlp()
        model.first.requires_grad_(False)
        return model

    assert_parity(replace(MLP, build=frozen_first, step=step))


def test_added_parameter_group():
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

    assert_parity(replace(MLP, build=Growing, step=step, make_optimizer=early_sgd))


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


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant):
    def build():
        return Checkpointed(use_reentrant=use_reentrant)

    assert_parity(replace(MLP, build=build))


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


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_that_grows_while_its_bucket_is_under_way(use_reentrant):
    """Every gradient in a bucket of its own; a shared one is added to twice."""

    def build():
        return Checkpointed(use_reentrant=use_reentrant)

    problem = replace(MLP, build=build)
    results = run_ranks_bare(2, _train_in_tiny_buckets, problem)
    assert_close(results[0], train_alone(problem, 2))
    assert_close(results[1], results[0], num_steps=0)


def _train_in_tiny_buckets(_: object, problem: Problem) -> dict[str, Tensor]:
    hvd.init()
    model = problem.model()
    optimizer = problem.make_optimizer(model)
    named = list(model.named_parameters())
    options = ReducerOptions(limits=BucketLimits(1, 1))
    communicator = current_session().states[0].communicator.duplicate()
    reducer = Reducer(named, ReducerGroup(communicator), options)
    optimizer.register_step_post_hook(lambda *_: reducer.step_done())
    for number in range(problem.num_steps):
        inputs, targets = problem.data(number, 2 * BATCH)
        rows = slice(hvd.rank() * BATCH, (hvd.rank() + 1) * BATCH)
        problem.step(model, optimizer, inputs[rows], targets[rows], number)
    assert len(reducer.rounds.buckets) == len(named)
    hvd.shutdown()
    return {name: p.detach() for name, p in named}


def test_compiled_module():
    def step(model, optimizer, inputs, targets, number):
        compiled = torch.compile(model, backend="aot_eager")
        plain_step(compiled, optimizer, inputs, targets, number)

    assert_parity(replace(MLP, step=step))


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_gradient_predivide_factor(factor):
    options = {"gradient_predivide_factor": factor}
    assert_parity(replace(MLP, options=lambda _: options), 3)


@pytest.mark.parametrize("groups", [1, 2, 5, "lists"])
def test_groups(groups):
    def options(model):
        if groups == "lists":
            return {"groups": [[model.third.bias, model.first.weight], [model.scale]]}
        return {"groups": groups}

    assert_parity(replace(MLP, options=options))


@pytest.mark.parametrize(
    ("compression", "wire"),
    [("fp16", torch.float16), ("bf16", torch.bfloat16)],
)
def test_compression(compression, wire):
    options = {"compression": getattr(hvd.Compression, compression)}
    problem = replace(MLP, options=lambda _: options, num_steps=10)
    assert_parity(problem, wire=wire)


class Embedded(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 3, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.table((inputs[:, 0].abs() * 5).long().clamp(max=10))


def test_sparse_as_dense():
    def plain_sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.05)

    problem = Problem(Embedded, 7, plain_step, plain_sgd)
    assert_parity(replace(problem, options=lambda _: {"sparse_as_dense": True}))


def test_a_user_compressor():
    class Half:
        @staticmethod
        def compress(tensor):
            return tensor * 0.5, None

        @staticmethod
        def decompress(tensor, ctx):
            return tensor * 2.0

    assert_parity(replace(MLP, options=lambda _: {"compression": Half}))
