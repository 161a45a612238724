"""Small problems with odd shapes, trained by one process and by several ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ronde.torch as hvd
from ronde.collectives import SoloEngine

NUM_STEPS = 50
BATCH = 4

Step = Callable[[nn.Module, Any, Tensor, Tensor, int], None]
"""One training step: (model, optimizer, inputs, targets, number of the step)."""


class OddMlp(nn.Module):
    """Layers whose sizes no alignment or rank count divides; a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 5, bias=False)
        self.third = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.scale * self.third(torch.tanh(self.second(hidden)))


class OddCnn(nn.Module):
    """Two convolutions with odd channel counts, in channels_last layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3)
        self.second = nn.Conv2d(5, 7, 3)
        self.head = nn.Linear(7, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, inputs: Tensor) -> Tensor:
        images = inputs.reshape(-1, 3, 7, 7).to(memory_format=torch.channels_last)
        hidden = torch.tanh(self.second(torch.tanh(self.first(images))))
        return self.head(hidden.mean((2, 3)))


class CountingEngine(SoloEngine):
    """Counts the bytes of its reductions."""

    def __init__(self) -> None:
        super().__init__()
        self.reduced_bytes: list[int] = []

    @property
    def num_reductions(self) -> int:
        return len(self.reduced_bytes)

    def all_reduce(self, source, out, what):
        self.reduced_bytes.append(source.nbytes)
        return super().all_reduce(source, out, what)


@dataclass(frozen=True)
class Problem:
    """A model, its data for every step, and how to train on it."""

    build: Callable[[], nn.Module]
    num_inputs: int
    step: Step
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    dtype: torch.dtype = torch.float64
    options: Callable[[nn.Module], dict[str, Any]] = lambda _: {}
    num_steps: int = NUM_STEPS
    device: str = "cpu"
    wire: torch.dtype | None = None  # that gradients travel in, where it is another

    def data(self, step: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return the whole batch of one step."""
        generator = torch.Generator().manual_seed(1000 + step)
        inputs = torch.randn(
            num_rows, self.num_inputs, generator=generator, dtype=torch.float64
        )
        targets = torch.randn(num_rows, 3, generator=generator, dtype=torch.float64)
        where = (self.device, self.dtype)
        return inputs.to(*where), targets.to(*where)

    def model(self, seed: int = 0) -> nn.Module:
        """Build the model in the problem's dtype, on its device."""
        torch.manual_seed(seed)
        return self.build().to(self.device, self.dtype)


def train_alone(problem: Problem, size: int) -> dict[str, Tensor]:
    """Train one process on the batches of all ``size`` ranks; return its weights."""
    model = problem.model()
    optimizer = problem.make_optimizer(model)
    for number in range(problem.num_steps):
        inputs, targets = problem.data(number, size * BATCH)
        problem.step(model, optimizer, inputs, targets, number)
    return {name: p.detach() for name, p in model.named_parameters()}


def train_on_ranks(info: object, problem: Problem) -> dict[str, Tensor]:
    """Train this rank in a session of its own."""
    del info
    hvd.init()
    weights = train_share(problem)
    hvd.shutdown()
    return weights


def train_share(problem: Problem) -> dict[str, Tensor]:
    """Train this rank on its share; return its weights."""
    model = problem.model(seed=hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        problem.make_optimizer(model),
        model.named_parameters(),
        **problem.options(model),
    )
    for number in range(problem.num_steps):
        inputs, targets = problem.data(number, hvd.size() * BATCH)
        rows = slice(hvd.rank() * BATCH, (hvd.rank() + 1) * BATCH)
        problem.step(model, optimizer, inputs[rows], targets[rows], number)
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


def assert_parity(results: Sequence[dict[str, Tensor]], problem: Problem) -> None:
    """Compare the weights of all ranks, bit by bit, and with those of one process."""
    for name, value in results[0].items():
        for result in results[1:]:
            assert torch.equal(result[name], value), f"ranks differ in {name}"
    expected = train_alone(problem, len(results))
    assert_close(results[0], expected, num_steps=problem.num_steps, wire=problem.wire)


def mse(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error: a mean over rows, as losses are."""
    return nn.functional.mse_loss(model(inputs), targets)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """Return the loss of a rank's random batch of 4 rows of 5 numbers."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    return model(inputs).square().mean()


def weights_of(*models: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]


def assert_same_weights(result: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


def plain_step(
    model: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor, number: int
) -> None:
    """Train as every tutorial does."""
    del number
    optimizer.zero_grad()
    mse(model, inputs, targets).backward()
    optimizer.step()


def assert_close(
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    *,
    num_steps: int = NUM_STEPS,
    wire: torch.dtype | None = None,
) -> None:
    """Compare weights to what rounding may do in ``num_steps`` steps.

    A step rounds each weight some tens of times (two scalings, a sum over ranks, the
    optimizer's arithmetic), and the errors of the steps add up at worst: 32 * steps *
    eps, relative to the largest weight. ``wire`` is the dtype gradients travelled in.
    """
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        eps = torch.finfo(wire or value.dtype).eps
        scale = max(1.0, float(value.abs().max()))
        worst = float((actual[name].double() - value.double()).abs().max())
        limit = 32 * num_steps * eps * scale
        assert math.isfinite(worst), f"{name} is not finite"
        assert worst <= limit, f"{name} is off by {worst:.3g}, limit {limit:.3g}"
