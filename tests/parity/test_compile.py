"""``torch.compile`` with its default backend: results are those of eager code."""

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from tests.parity.sessions import DYNAMIC, message_of, run_sessions
from torch import Tensor, nn
from torch.nn import functional

import ronde.torch as hvd

pytestmark = [
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="torch.compile's backend needs g++"
    ),
]
# Before and behind the call in each function, so that there is something to compile.
NUM_GRAPHS = 2

Function = Callable[[Tensor], Any]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Keep what was compiled for the next test; compile in the rank's own process."""
    cache = tmp_path_factory.mktemp("inductor")
    return {
        **DYNAMIC,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return ``function`` compiled, with nothing of what was compiled before."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(function, **options)


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def around(call: Function) -> Function:
    """Return a function that computes before and after ``call``."""

    def function(tensor: Tensor) -> Any:
        result = call(tensor * 2)
        return tensor + 1, result

    return function


def in_place(call: Function) -> Function:
    """Return a function that goes on with the tensor that ``call`` has changed."""

    def function(tensor: Tensor) -> Any:
        doubled = tensor * 2
        call(doubled)
        return doubled + 1

    return function


def waiting_for(call: Callable[[Tensor], int]) -> Function:
    """Return a function that computes while what ``call`` has started is under way."""

    def function(tensor: Tensor) -> Any:
        handle = call(tensor * 2)
        meanwhile = tensor + 1
        hvd.poll(handle)
        return meanwhile, hvd.synchronize(handle)

    return function


def of_pairs(call: Callable[[list[Tensor]], Any]) -> Function:
    """Return ``call`` on a group of two tensors."""
    return lambda tensor: call([tensor, tensor[:2]])


def sum_sparse(tensor: Tensor) -> Tensor:
    sparse = tensor.to_sparse()
    return hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)().to_dense()


def use_a_process_set(tensor: Tensor) -> Any:
    some = hvd.add_process_set(range(hvd.size() - 1))
    place = some.size(), some.included()
    if some.included():
        tensor = hvd.allreduce(tensor, op=hvd.Sum, process_set=some)
    return place, tensor, hvd.remove_process_set(some)


@cache
def optimizer() -> torch.optim.Optimizer:
    """Make one; the first imports ``torch._dynamo``, which only ranks are to do."""
    return torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.5, momentum=0.5)


EVEN = [1, 1, 1, 1]
FUNCTIONS: dict[str, Function] = {
    "allreduce": around(lambda t: hvd.allreduce(t, op=hvd.Sum)),
    "allreduce named": around(lambda t: hvd.allreduce(t, name="a", prescale_factor=2)),
    "allreduce_": in_place(hvd.allreduce_),
    "allreduce_async": waiting_for(hvd.allreduce_async),
    "grouped_allreduce": around(of_pairs(hvd.grouped_allreduce)),
    "sparse_allreduce_async": around(sum_sparse),
    "allgather": around(lambda t: hvd.allgather(t[: 1 + hvd.rank()])),
    "broadcast_": in_place(lambda t: hvd.broadcast_(t, 1)),
    "alltoall splits": around(lambda t: hvd.alltoall(t, EVEN[: hvd.size()])),
    "broadcast_object": around(lambda t: hvd.broadcast_object({"a": t.tolist()})),
    "broadcast_optimizer_state": around(
        lambda _: hvd.broadcast_optimizer_state(optimizer(), 1)
    ),
    "process sets": around(use_a_process_set),
}
QUERIES = {
    *("is_initialized", "is_homogeneous", "rank", "size", "elastic"),
    *("local_rank", "local_size", "cross_rank", "cross_size", "global_process_set"),
    *(name for name in hvd.__all__ if name.endswith(("_built", "_enabled"))),
    "mpi_threads_supported",
}


def plain(value: Any) -> Any:
    """Return a result as Python's own lists and numbers, to compare bit by bit."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def rows() -> Tensor:
    return torch.arange(12.0).reshape(4, 3) + hvd.rank()


def compare_collectives(backend: str) -> None:
    for name, function in FUNCTIONS.items():
        expected = plain(function(rows()))
        result = plain(compiled(function, backend=backend)(rows()))
        assert result == expected, name
        assert num_graphs() >= NUM_GRAPHS, name


def test_every_function_is_outside_the_compiler():
    names = {name for name in hvd.__all__ if name[0].islower()} - QUERIES
    unmarked = {
        n for n in names if not hasattr(getattr(hvd, n), "_torchdynamo_disable")
    }
    assert not unmarked


@pytest.mark.parametrize(
    ("size", "engine", "backend"),
    [
        (2, "auto", "aot_eager"),
        pytest.param(3, "gloo", "inductor", marks=pytest.mark.long),
    ],
)
def test_collectives(environment, size, engine, backend):
    run_sessions(
        size, compare_collectives, backend, engine=engine, environment=environment
    )


DIFFERENTIABLE = {
    "allreduce": hvd.allreduce,
    "grouped_allreduce": of_pairs(hvd.grouped_allreduce),
    "allgather": hvd.allgather,
    "broadcast": lambda t: hvd.broadcast(t, 1),
    "alltoall": lambda t: hvd.alltoall(t[: hvd.size()]),
    "reducescatter": lambda t: hvd.reducescatter(t, op=hvd.Sum),
}


def loss_of(call: Function) -> Function:
    def function(tensor: Tensor) -> Tensor:
        result = call(tensor * 2)
        results = [result] if isinstance(result, Tensor) else result
        return tensor.sum() + sum((each * each).sum() for each in results)

    return function


def with_backward(function: Function) -> Function:
    def run(tensor: Tensor) -> Tensor:
        loss = function(tensor)
        loss.backward()
        return loss.detach()

    return run


BACKWARD_INSIDE = ("allreduce", "alltoall")
"""The others' gradients are taken in the same way."""


def compare_gradients(backend: str) -> None:
    for name, call in DIFFERENTIABLE.items():
        function = loss_of(call)
        results: list[Any] = []
        runs = [
            with_backward(function),
            with_backward(compiled(function, backend=backend)),
        ]
        if name in BACKWARD_INSIDE:
            runs.append(compiled(with_backward(function), backend=backend))
        for run in runs:
            tensor = rows().requires_grad_()
            loss = run(tensor)
            assert tensor.grad is not None
            results.append(plain((loss, tensor.grad)))
        assert num_graphs() >= NUM_GRAPHS, name
        assert results == results[:1] * len(runs), name


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)]
)
def test_gradients(environment, backend):
    run_sessions(2, compare_gradients, backend, environment=environment)


class Net(nn.Module):
    """Convolution, batch norm over all ranks and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = hvd.SyncBatchNorm(4)
        self.out = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        features = functional.relu(self.norm(self.conv(images)))
        return self.out(features.mean((2, 3)))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor
) -> Tensor:
    optimizer.zero_grad()
    loss = functional.mse_loss(model(batch), torch.ones(len(batch), 3))
    loss.backward()
    optimizer.step()
    return hvd.allreduce(loss.detach(), name="loss")


def train(model: nn.Module, step: Callable[..., Any]) -> list[Tensor]:
    """Return the losses and the weights of four steps."""
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
    )
    hvd.broadcast_parameters(model.state_dict(), 0)
    generator = torch.Generator().manual_seed(hvd.rank())
    batches = [torch.rand(4, 2, 6, 6, generator=generator) for _ in range(4)]
    losses = [step(model, optimizer, batch) for batch in batches]
    return [*losses, *(p.detach() for p in model.parameters())]


def compare_training(backend: str) -> None:
    """Compile the step on even ranks, and the model on odd ones."""
    torch.manual_seed(7)
    model = Net()
    expected = train(copy.deepcopy(model), train_step)
    if hvd.rank() % 2:
        results = train(compiled(model, backend=backend), train_step)
    else:
        results = train(model, compiled(train_step, backend=backend))
    assert num_graphs() >= 1
    # The compiler adds up a convolution in another order.
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-6)
    weights = torch.cat([result.flatten() for result in results])
    assert torch.equal(hvd.broadcast(weights, 0), weights)  # the same on all ranks


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)]
)
def test_training(environment, backend):
    run_sessions(3, compare_training, backend, environment=environment)


def refuse_one_graph() -> None:
    tensor = rows()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="other ranks"):
        compiled(lambda t: hvd.allreduce(t * 2) + 1, fullgraph=True)(tensor)
    assert torch.equal(hvd.allreduce(tensor, op=hvd.Max), rows() - hvd.rank() + 1)


class PlainDescent(torch.optim.Optimizer):
    """An optimizer whose step the compiler could see through."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(self.param_groups[0]["lr"] * parameter.grad)


def descend(
    *, op: int, has_compiled_autograd: bool, is_synchronized: bool, is_compiled: bool
) -> Tensor:
    """Return the weights after three steps that clip; one parameter is unused."""
    torch.manual_seed(7)
    model = nn.Linear(3, 2)
    unused = nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(
        PlainDescent(model.parameters()), model.named_parameters(), op=op
    )
    optimizer.add_param_group({"params": [unused]})

    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        if is_synchronized:
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize() if is_synchronized else nullcontext():
            optimizer.step()

    with torch._dynamo.config.patch(compiled_autograd=has_compiled_autograd):
        run = compiled(step, backend="eager") if is_compiled else step
        for _ in range(3):
            run(rows() + 1)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def compare_descents() -> None:
    for op, has_compiled_autograd, is_synchronized in (
        (hvd.Average, True, True),
        (hvd.Average, False, False),
        (hvd.Adasum, True, False),
    ):
        run = partial(
            descend,
            op=op,
            has_compiled_autograd=has_compiled_autograd,
            is_synchronized=is_synchronized,
        )
        weights = run(is_compiled=True)
        torch.testing.assert_close(weights, run(is_compiled=False))
        assert torch.equal(hvd.broadcast(weights, 0), weights)


def fail_in_compiled_autograd() -> str:
    """Return what step() raises; rank 0 goes backward twice before its first step."""
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(
        PlainDescent(model.parameters()), model.named_parameters()
    )

    def backward() -> None:
        model(rows()).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        run = compiled(backward, backend="eager")
        run()
        if hvd.rank() == 1:
            optimizer.step()
        run()
    return message_of(hvd.HorovodInternalError, optimizer.step)


def compare_descents_and_fail() -> str:
    compare_descents()
    return fail_in_compiled_autograd()


def test_steps_that_the_compiler_could_see_through(environment):
    """``backward()`` cannot raise in compiled autograd: ``step()`` does instead."""
    messages = run_sessions(2, compare_descents_and_fail, environment=environment)
    assert all("backward_passes_per_step" in message for message in messages)


def share_of_a_compiled_model() -> None:
    model = nn.Linear(3, 2)
    own = torch.compile(model) if hvd.rank() == 0 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, own.named_parameters())
    hvd.broadcast_parameters(own.state_dict(), 0)
    model(rows()).sum().backward()
    optimizer.step()
    weights = model.weight.detach()
    assert torch.equal(hvd.broadcast(weights, 0), weights)


def refuse_and_share() -> None:
    refuse_one_graph()
    share_of_a_compiled_model()


def test_one_graph_is_refused_and_ranks_may_differ_in_what_is_compiled(environment):
    run_sessions(2, refuse_and_share, environment=environment)


def test_importing_imports_no_compiler():
    """``torch._dynamo`` takes seconds, also for programs that compile nothing."""
    code = "import sys, ronde.torch; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
