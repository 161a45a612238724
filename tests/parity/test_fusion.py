"""Weight gradients that backward writes into buckets have the bits of copied ones."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tests.limits import HANG_S
from tests.ranks import run_ranks_bare
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ronde.torch as hvd

NUM_STEPS = 3
"""The first one plans and fuses nothing; the last one is seen in the weights."""
WIDE, NARROW = 1031, 521
"""Of a weight of 2.1 MB in float32, which no vector's length divides."""

Step = Callable[[Any, Any, Tensor], None]


class Net(nn.Module):
    """A wide layer that may be fused, behind one that backward begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(NARROW, WIDE)
        self.head = nn.Linear(WIDE, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.wide(inputs)))


class Twice(Net):
    """The wide layer's weight is used in two products."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.head(self.wide(2 * inputs))


class Checkpointed(Net):
    """The wide layer runs again in backward."""

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        hidden = checkpoint(self.wide, inputs, use_reentrant=False)
        return self.head(torch.tanh(hidden))


def scaling_hook() -> nn.Module:
    net = Net()
    net.wide.weight.register_hook(lambda grad: 2 * grad)
    return net


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


def plain(model: Any, optimizer: Any, inputs: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, inputs).backward()
    optimizer.step()


def autocast(model: Any, optimizer: Any, inputs: Tensor) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, inputs)
    loss.backward()
    optimizer.step()


def repeating(model: Any, optimizer: Any, inputs: Tensor) -> None:
    """Two passes over one graph, then one over another, into the same gradient."""
    optimizer.zero_grad()
    value = loss_of(model, inputs)
    value.backward(retain_graph=True)
    value.backward()
    loss_of(model, -2 * inputs).backward()
    optimizer.step()


def crossing(model: Any, optimizer: Any, inputs: Tensor) -> None:
    """Odd ranks reduce a metric before backward, the others after it."""
    optimizer.zero_grad()
    value = loss_of(model, inputs)
    if hvd.rank() % 2:
        hvd.allreduce(value.detach(), name="metric")
    value.backward()
    if hvd.rank() % 2 == 0:
        hvd.allreduce(value.detach(), name="metric")
    optimizer.step()


def failing(model: Any, optimizer: Any, inputs: Tensor) -> None:
    """A backward pass that ends early leaves nothing behind."""

    def fail(_: Tensor) -> None:
        raise ValueError("as asked")

    middle = model.wide(inputs).tanh() * 1
    middle.register_hook(fail)
    with pytest.raises(ValueError, match="as asked"):
        model.head(middle).square().mean().backward()
    optimizer.synchronize()
    plain(model, optimizer, inputs)


class Watching(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def watched(model: Any, optimizer: Any, inputs: Tensor) -> None:
    optimizer.zero_grad()
    value = loss_of(model, inputs)
    with Watching() as mode:
        value.backward()
    assert "aten.mm.out" not in mode.names
    optimizer.step()


def keeping(model: Any, optimizer: Any, inputs: Tensor) -> None:
    """Gradients that a hook of the leaf's node keeps stay what they were."""
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(grads: tuple[Tensor | None, ...], *_: object) -> None:
        kept.extend((grad, grad.clone()) for grad in grads if grad is not None)

    optimizer.zero_grad()
    value = loss_of(model, inputs)
    node = torch.autograd.graph.get_gradient_edge(model.wide.weight).node
    handle = node.register_prehook(keep)
    value.backward()
    optimizer.step()
    handle.remove()
    assert kept
    assert all(torch.equal(grad, copy) for grad, copy in kept)


class Case(NamedTuple):
    """A training, and if gradients must be fused in it, or must not."""

    is_fused: bool
    build: Callable[[], nn.Module] = Net
    step: Step = plain


CASES = {
    "rows": Case(True),
    "checkpointed": Case(True, Checkpointed),
    "several passes": Case(True, step=repeating),
    "crosswise": Case(True, step=crossing),
    "failing": Case(True, step=failing),
    "two products": Case(False, Twice),
    "autocast": Case(False, step=autocast),
    "dispatch mode": Case(False, step=watched),
    "scaling hook": Case(False, scaling_hook),
    "hook before the leaf": Case(False, step=keeping),
}


@pytest.mark.parametrize(
    ("size", "engine", "names"),
    [
        (3, "auto", list(CASES)),
        (2, "gloo", ["rows", "crosswise"]),
    ],
)
def test_bits_are_those_of_copied_gradients(size, engine, names):
    environment = {"RONDE_ENGINE": engine}
    run_ranks_bare(size, _compare, names, environment=environment, timeout_s=HANG_S)


def _compare(_: object, names: list[str]) -> None:
    hvd.init()
    for name in names:
        case = CASES[name]
        num_fused, weights = _train(case, gradient_accumulation_fusion=True)
        assert (num_fused > 0) == case.is_fused, name
        num_plain, copied = _train(case)  # off by default
        assert num_plain == 0, name
        assert all(map(torch.equal, weights, copied)), name
    hvd.shutdown()


def _train(case: Case, **options: bool) -> tuple[int, list[Tensor]]:
    torch.manual_seed(0)
    model = case.build()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model.named_parameters(),
        **options,
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    # Those that are done join and add zeros; but all must reduce a metric.
    num_more = 0 if case.step is crossing else hvd.rank()
    for _ in range(NUM_STEPS + num_more):
        case.step(model, optimizer, torch.randn(5, NARROW, generator=generator))
    hvd.join()
    assert optimizer.reducer is not None
    return optimizer.reducer.num_fused, [p.detach() for p in model.parameters()]
