"""Weight gradients that backward writes into buckets have the bits of copied ones."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.limits import HANG_S
from tests.ranks import run_ranks_bare
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ronde.torch as hvd

NUM_STEPS = 3
"""The first one plans and fuses nothing; the last one is seen in the weights."""
WIDE, NARROW = 1031, 521
"""Of a weight of 2.1 MB in float32, which no vector's length divides."""

Loss = Callable[[nn.Module, Tensor], Tensor]
Step = Callable[[nn.Module, Any, Tensor, Loss], None]


class Net(nn.Module):
    """A wide layer that may be fused, behind one that backward begins with."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.wide = nn.Linear(NARROW, WIDE, bias=bias)
        self.head = nn.Linear(WIDE, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.wide(inputs)))


class Products(nn.Module):
    """Weights of products that are not a layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.right = nn.Parameter(torch.randn(NARROW, WIDE) / 30)
        self.left = nn.Parameter(torch.randn(WIDE, NARROW) / 30)
        self.head = nn.Linear(NARROW, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(torch.mm(inputs, self.right))
        return self.head(torch.mm(hidden, self.left))


class Columns(Products):
    """A weight that is its product's left factor."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(torch.mm(self.left, inputs.t()).t())
        return self.head(torch.mm(hidden, self.left))[:, :2] + self.right.mean()


class Columned(Products):
    """As ``Columns``, once each."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(torch.mm(self.left, inputs.t()))
        return self.head(torch.mm(self.right, hidden).t())


class Twice(Net):
    """The wide layer's weight is used in two products."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.wide(inputs)
        return super().forward(inputs) + self.head(
            functional.linear(inputs, self.wide.weight) * hidden
        )


class Transposed(Net):
    """One transposed weight, used in two products."""

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.wide.weight.t()
        return self.head(torch.tanh(inputs @ weight) + 2 * inputs.square() @ weight)


class Checkpointed(Net):
    """The wide layer runs again in backward."""

    is_reentrant = False

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        hidden = checkpoint(self.wide, inputs, use_reentrant=self.is_reentrant)
        return self.head(torch.tanh(hidden))


class Reentrant(Checkpointed):
    """As reentrant checkpointing does it."""

    is_reentrant = True


def normed() -> nn.Module:
    net = Net()
    nn.utils.parametrizations.weight_norm(net.wide)
    return net


def biasless() -> nn.Module:
    return Net(bias=False)


def saved_elsewhere(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return mean(model, inputs)


def mean(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


def autocast(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return mean(model, inputs)


def functional_call(model: nn.Module, inputs: Tensor) -> Tensor:
    given = dict(model.named_parameters())
    return torch.func.functional_call(model, given, (inputs,)).square().mean()


def plain(model: nn.Module, optimizer: Any, inputs: Tensor, loss: Loss) -> None:
    optimizer.zero_grad()
    loss(model, inputs).backward()
    optimizer.step()


def zeroing(model: nn.Module, optimizer: Any, inputs: Tensor, loss: Loss) -> None:
    optimizer.zero_grad(set_to_none=False)
    loss(model, inputs).backward()
    optimizer.step()


def repeating(model: nn.Module, optimizer: Any, inputs: Tensor, loss: Loss) -> None:
    """Two passes over one graph, then one over another, into the same gradient."""
    optimizer.zero_grad()
    value = loss(model, inputs)
    value.backward(retain_graph=True)
    value.backward()
    loss(model, -2 * inputs).backward()
    optimizer.step()


def clipping(model: nn.Module, optimizer: Any, inputs: Tensor, loss: Loss) -> None:
    optimizer.zero_grad()
    loss(model, inputs).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def crossing(model: nn.Module, optimizer: Any, inputs: Tensor, loss: Loss) -> None:
    """Odd ranks reduce a metric before backward, the others after it."""
    optimizer.zero_grad()
    value = loss(model, inputs)
    if hvd.rank() % 2:
        hvd.allreduce(value.detach(), name="metric")
    value.backward()
    if hvd.rank() % 2 == 0:
        hvd.allreduce(value.detach(), name="metric")
    optimizer.step()


def asking(model: nn.Module, optimizer: Any, inputs: Tensor, loss: Loss) -> None:
    """``autograd.grad`` returns gradients and leaves all others alone."""
    optimizer.zero_grad()
    value = loss(model, inputs)
    weights = list(model.parameters())
    before = torch.autograd.grad(value, weights, retain_graph=True)
    assert all(weight.grad is None for weight in weights)
    kept = [grad.clone() for grad in before]
    value.backward(retain_graph=True)
    reduced = [require(weight.grad).clone() for weight in weights]
    after = torch.autograd.grad(value, weights)
    optimizer.step()
    for grads in (before, after):
        assert all(map(torch.equal, grads, kept))
    assert all(
        torch.equal(require(w.grad), g) for w, g in zip(weights, reduced, strict=True)
    )


def differentiable(
    model: nn.Module, optimizer: Any, inputs: Tensor, loss: Loss
) -> None:
    optimizer.zero_grad()
    inputs = inputs.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(model, inputs), inputs, create_graph=True)
    (loss(model, inputs) + slope.square().mean()).backward()
    optimizer.step()


def creating_graph(
    model: nn.Module, optimizer: Any, inputs: Tensor, loss: Loss
) -> None:
    optimizer.zero_grad()
    loss(model, inputs).backward(create_graph=True)
    optimizer.step()


def toggling(model: Any, optimizer: Any, inputs: Tensor, loss: Loss) -> None:
    """The weight is frozen after the forward pass, and thawed for the next."""
    optimizer.zero_grad()
    model.wide.weight.requires_grad_()
    value = loss(model, inputs)
    model.wide.weight.requires_grad_(False)
    value.backward()
    optimizer.step()


def freezing(model: Any, optimizer: Any, inputs: Tensor, loss: Loss) -> None:
    model.wide.weight.requires_grad_(not model.wide.weight.requires_grad)
    plain(model, optimizer, inputs, loss)
    model.wide.weight.requires_grad_()


def selecting(model: Any, optimizer: Any, inputs: Tensor, loss: Loss) -> None:
    optimizer.zero_grad()
    chosen = [model.head.bias, model.wide.weight]
    loss(model, inputs).backward(inputs=chosen)
    optimizer.step()


def with_anomalies(
    model: nn.Module, optimizer: Any, inputs: Tensor, loss: Loss
) -> None:
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        plain(model, optimizer, inputs, loss)


class Watching(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def watched(model: nn.Module, optimizer: Any, inputs: Tensor, loss: Loss) -> None:
    optimizer.zero_grad()
    value = loss(model, inputs)
    with Watching() as mode:
        value.backward()
    assert "aten.mm.out" not in mode.names
    optimizer.step()


def failing(model: Any, optimizer: Any, inputs: Tensor, loss: Loss) -> None:
    """A backward pass that ends early leaves nothing behind."""

    def fail(_: Tensor) -> None:
        raise ValueError("as asked")

    hidden = model.wide(inputs).tanh()
    middle = hidden * 1
    middle.register_hook(fail)
    with pytest.raises(ValueError, match="as asked"):
        model.head(middle).square().mean().backward()
    optimizer.synchronize()
    plain(model, optimizer, inputs, loss)


def keeping(register: Callable[[Any, Any], Any]) -> Step:
    """Gradients that a hook keeps stay what they were."""

    def step(model: Any, optimizer: Any, inputs: Tensor, loss: Loss) -> None:
        kept: list[tuple[Tensor, Tensor]] = []

        def keep(*grads: Any) -> None:
            for grad in grads:
                if isinstance(grad, tuple):
                    keep(*grad)
                elif grad is not None:
                    kept.append((grad, grad.clone()))

        optimizer.zero_grad()
        value = loss(model, inputs)
        handle = register(model.wide.weight, keep)
        if handle is None:
            handle = register(value.grad_fn, keep)
        value.backward()
        optimizer.step()
        handle.remove()
        assert kept
        assert all(torch.equal(grad, copy) for grad, copy in kept)

    return step


def on_leaf(weight: Any, keep: Any) -> Any:
    return weight.register_hook(keep)


def node_of(root: Any, name: str) -> Any:
    """Return one of the nodes that make the wide weight's gradient."""
    unvisited = [root]
    for each in unvisited:
        unvisited += [n for n, _ in each.next_functions if n is not None]
        if getattr(each, "variable", torch.empty(0)).shape == (WIDE, NARROW):
            return path_to(root, each)[name]
    raise AssertionError(name)


def path_to(root: Any, leaf: Any) -> dict[str, Any]:
    paths = [[root]]
    for path in paths:
        if path[-1] is leaf:
            return {type(node).__name__: node for node in path[-3:]}
        paths += [[*path, n] for n, _ in path[-1].next_functions if n is not None]
    raise AssertionError(leaf)


def after_node(name: str) -> Callable[[Any, Any], Any]:
    def register(target: Any, keep: Any) -> Any:
        if isinstance(target, Tensor):
            return None
        return node_of(target, name).register_hook(keep)

    return register


def before_node(name: str) -> Callable[[Any, Any], Any]:
    def register(target: Any, keep: Any) -> Any:
        if isinstance(target, Tensor):
            return None
        return node_of(target, name).register_prehook(keep)

    return register


def scaling_hook(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: 2 * grad)


def module_hooks(model: Any) -> None:
    model.wide.register_full_backward_hook(lambda _, *grads: None)
    model.wide.register_full_backward_pre_hook(lambda _, grads: (2 * grads[0],))
    model.wide.register_forward_hook(lambda *_: None)


def tie(model: Any) -> None:
    model.head = nn.Sequential(nn.Linear(WIDE, 3), nn.Linear(3, NARROW))
    model.tied = nn.Linear(NARROW, WIDE)
    model.tied.weight = model.wide.weight
    model.register_forward_hook(lambda m, _, out: m.tied(out))


def keep_sums(model: Any) -> None:
    """Keep gradients in a hook that runs before the optimizer's own."""
    model.kept = []

    def keep(weight: Tensor) -> None:
        grad = require(weight.grad)
        model.kept.append((grad, grad.clone()))

    model.wide.weight.register_post_accumulate_grad_hook(keep)


def checking(model: Any, optimizer: Any, inputs: Tensor, loss: Loss) -> None:
    plain(model, optimizer, inputs, loss)
    assert model.kept
    assert all(torch.equal(grad, copy) for grad, copy in model.kept)


def swap(inputs: Tensor) -> Tensor:
    return inputs.transpose(0, 1)


def compiled(model: Any) -> None:
    model.compile(backend="aot_eager")


def nothing(_: Any) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """What is trained, and whether gradients can be fused in it.

    Attributes:
        is_fused: Whether there must be fused gradients, or must be none; None where it
            is no matter.
        build: Makes the model.
        step: Trains it.
        loss: Of the model on its inputs.
        shape: Of the inputs.
        dtype: Of weights and inputs.
        prepare: Called with the model before the optimizer is made.
        options: Of the optimizer.
        transform: Of the inputs.
        is_uneven: Whether ranks take different numbers of steps, and join.
    """

    is_fused: bool | None
    build: Callable[[], nn.Module] = Net
    step: Step = plain
    loss: Loss = mean
    shape: tuple[int, ...] = (5, NARROW)
    dtype: torch.dtype = torch.float32
    prepare: Callable[[Any], None] = nothing
    options: tuple[tuple[str, Any], ...] = ()
    transform: Callable[[Tensor], Tensor] = lambda inputs: inputs
    is_uneven: bool = False


THREE_PASSES = (("backward_passes_per_step", 3),)
CASES = {
    "rows": Case(True),
    "one row": Case(True, shape=(1, NARROW)),
    "as many rows as columns": Case(True, shape=(WIDE, NARROW)),
    "no rows": Case(True, shape=(0, NARROW), loss=lambda m, x: m(x).sum()),
    "a vector": Case(True, shape=(NARROW,)),
    "a sequence": Case(True, shape=(3, 4, NARROW)),
    "a sequence without bias": Case(True, biasless, shape=(3, 4, NARROW)),
    "images": Case(True, shape=(2, 3, 4, NARROW)),
    "a transposed sequence": Case(True, shape=(3, 4, NARROW), transform=swap),
    "transposed rows": Case(True, shape=(NARROW, 5), transform=Tensor.t),
    "every other row": Case(True, shape=(10, NARROW), transform=lambda x: x[::2]),
    "without bias": Case(True, biasless),
    "float64": Case(True, dtype=torch.float64),
    "bfloat16": Case(None, dtype=torch.bfloat16),
    "products": Case(True, Products, dtype=torch.float64),
    "left factor": Case(True, Columned, dtype=torch.float64),
    "left and right": Case(False, Columns),
    "sum": Case(True, options=(("op", hvd.Sum),)),
    "predivided": Case(True, options=(("gradient_predivide_factor", 2.0),)),
    "functional call": Case(True, loss=functional_call),
    "module hooks": Case(True, prepare=module_hooks),
    "saved elsewhere": Case(True, loss=saved_elsewhere),
    "chosen inputs": Case(True, step=selecting),
    "autograd.grad": Case(True, step=asking),
    "checkpointed": Case(True, Checkpointed),
    "reentrant": Case(None, Reentrant),
    "several passes": Case(True, step=repeating),
    "clipped": Case(True, step=clipping),
    "crosswise": Case(True, step=crossing),
    "joined": Case(True, is_uneven=True),
    "frozen now and then": Case(None, step=freezing),
    "frozen after forward": Case(None, step=toggling),
    "failing": Case(True, step=failing),
    "two products": Case(False, Twice),
    "one transposed weight, two products": Case(False, Transposed),
    "tied": Case(False, prepare=tie),
    "normed": Case(False, normed),
    "compiled": Case(False, prepare=compiled),
    "autocast": Case(False, loss=autocast),
    "zeroed": Case(False, step=zeroing),
    "accumulated": Case(False, step=repeating, options=THREE_PASSES),
    "twice differentiable": Case(None, step=differentiable),
    "anomalies": Case(False, step=with_anomalies),
    "dispatch mode": Case(False, step=watched),
    "scaling hooks": Case(False, prepare=scaling_hook),
    "hook on the weight": Case(False, step=keeping(on_leaf)),
    "hook after the sum": Case(False, step=checking, prepare=keep_sums),
    "hook on the product": Case(False, step=keeping(after_node("AddmmBackward0"))),
    "hook before the transpose": Case(False, step=keeping(before_node("TBackward0"))),
    "hook on the transpose": Case(False, step=keeping(after_node("TBackward0"))),
    "hook before the leaf": Case(False, step=keeping(before_node("AccumulateGrad"))),
    "hook on the leaf": Case(False, step=keeping(after_node("AccumulateGrad"))),
}  # fmt: skip


def require(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad


@pytest.mark.parametrize("names", [list(CASES)[:26], list(CASES)[26:]])
def test_bits_are_those_of_copied_gradients(names):
    run_ranks_bare(3, _compare, names, timeout_s=HANG_S)


@pytest.mark.parametrize(
    ("size", "engine"),
    [(3, "gloo"), (3, "scheduled"), (3, "hierarchical"), (2, "auto"), (4, "auto")],
)
def test_other_engines_and_sizes(size, engine):
    names = ["rows", "crosswise", "joined"]
    environment = {"RONDE_ENGINE": engine}
    run_ranks_bare(size, _compare, names, environment=environment, timeout_s=HANG_S)


def test_hooks_that_do_nothing_have_gradients_copied():
    run_ranks_bare(2, _compare_hooked, timeout_s=HANG_S)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_averages_are_sums_of_scaled_gradients(size):
    run_ranks_bare(size, _compare_to_sum, timeout_s=HANG_S)


def _compare(_: object, names: list[str]) -> None:
    hvd.init()
    for name in names:
        case = CASES[name]
        num_fused, weights = _train(case)
        assert num_fused == 0 or case.is_fused is not False, name
        assert num_fused > 0 or not case.is_fused, name
        num_plain, copied = _train(case, is_fusing=False)
        assert num_plain == 0, name
        assert all(map(torch.equal, weights, copied)), name
    hvd.shutdown()


def _compare_hooked(_: object) -> None:
    hvd.init()
    for case in (Case(True), Case(True, Products)):
        num_hooked, hooked = _train(case, hook=nothing)
        assert num_hooked == 0
        assert all(map(torch.equal, hooked, _train(case, is_fusing=False)[1]))
    hvd.shutdown()


def _compare_to_sum(_: object) -> None:
    hvd.init()
    torch.manual_seed(0)
    model = Net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters()
    )
    inputs = [torch.randn(5, NARROW) for _ in range(hvd.size())]
    plain(model, optimizer, inputs[0], mean)  # the one that plans is not fused
    expected = _mean_over_ranks(model, inputs)
    plain(model, optimizer, inputs[hvd.rank()], mean)
    assert optimizer.reducer is not None
    assert optimizer.reducer.num_fused == 1
    assert all(map(torch.equal, _grads(model), expected))
    if hvd.rank() > 0:
        # Rank 0 has joined: it adds zeros.
        expected = _mean_over_ranks(model, inputs[1:])
        plain(model, optimizer, inputs[hvd.rank()], mean)
        assert optimizer.reducer.num_fused == 2
        assert all(map(torch.equal, _grads(model), expected))
    hvd.join()
    hvd.shutdown()


def _mean_over_ranks(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Scale each rank's gradients and add them in the order of ranks."""
    totals = [torch.zeros_like(p) for p in model.parameters()]
    for each in inputs:
        grads = torch.autograd.grad(mean(model, each), list(model.parameters()))
        for total, grad in zip(totals, grads, strict=True):
            total.add_(grad * (1 / hvd.size()))
    return totals


def _grads(model: nn.Module) -> list[Tensor]:
    return [require(p.grad) for p in model.parameters()]


def _train(
    case: Case, *, hook: Callable[[Tensor], None] | None = None, is_fusing: bool = True
) -> tuple[int, list[Tensor]]:
    torch.manual_seed(0)
    model = case.build().to(case.dtype)
    case.prepare(model)
    if hook is not None:
        for parameter in model.parameters():
            parameter.register_hook(hook)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model.named_parameters(),
        gradient_accumulation_fusion=is_fusing,
        **dict(case.options),
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(NUM_STEPS + case.is_uneven * hvd.rank()):
        inputs = torch.randn(case.shape, generator=generator).to(case.dtype)
        case.step(model, optimizer, case.transform(inputs), case.loss)
    if case.is_uneven:
        hvd.join()
    assert optimizer.reducer is not None
    return optimizer.reducer.num_fused, [p.detach() for p in model.parameters()]
