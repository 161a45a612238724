"""FSDP2 and tensor parallelism on ronde against one process."""

import pytest
import torch
from tests.process_group.groups import AUTO, ENGINES, SMOKE, run_all, run_in_group
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

NUM_STEPS = 4
WIDTH = 12
SIZE = AUTO.size


@pytest.fixture(scope="module")
def found():
    return run_all(AUTO, CALLS)


class Block(nn.Module):
    """Two layers behind a norm, added to what comes in."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 36)
        self.down = nn.Linear(36, WIDTH)

    def forward(self, inputs):
        return inputs + self.down(torch.tanh(self.up(self.norm(inputs))))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 24)).double()


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(2, 12, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 24, (2, 12), generator=generator)
    return inputs, targets


def loss_of(model, step, rank):
    inputs, targets = batch(step, rank)
    dtype = next(model.parameters()).dtype
    if dtype is not torch.float64:
        inputs = inputs.float().to(dtype)
    outputs = model(inputs)
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def on_one_process(num_parts, clip=None):
    """Train with the gradients of several parts; return weights and norms."""
    model = build()
    optimizer = adam(model)
    norms = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for part in range(num_parts):
            (loss_of(model, step, part) / num_parts).backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
    return model.state_dict(), norms


def whole(model):
    """Return all weights as plain tensors."""
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def train(model, part, clip=None):
    optimizer = adam(model)
    norms = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, step, part).backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            norms.append(norm.full_tensor())
        optimizer.step()
    return whole(model), norms


def assert_equal(states, expected):
    for state in states:
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(
                state[name], tensor, rtol=1e-10, atol=1e-11, msg=name
            )


# FSDP2


def shard(model, mesh, **options):
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train_sharded(clip, options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return train(shard(build(), mesh, **options), dist.get_rank(), clip)


@pytest.mark.parametrize("name", ["sharded", "sharded, kept"])
def test_fully_shard_and_clip(found, name):
    clipped, norms = on_one_process(SIZE, clip=0.1)
    for weights, own_norms in found[name]:
        assert_equal([weights], clipped)
        for norm, other in zip(own_norms, norms, strict=True):
            torch.testing.assert_close(norm, other, rtol=1e-12, atol=0)


@pytest.mark.parametrize("setting", [ENGINES[1], ENGINES[3], SMOKE[0]], ids=str)
def test_fully_shard_on_other_engines(setting):
    expected, _ = on_one_process(setting.size)
    found = run_in_group(setting, train_sharded, None, {})
    assert_equal([weights for weights, _ in found], expected)


def train_mixed():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    size = dist.get_world_size()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = shard(build().float(), init_device_mesh("cpu", (size,)), mp_policy=policy)
    loss_of(model, 0, dist.get_rank()).backward()
    # Other processes may have more threads, and round norms' gradients otherwise.
    totals = [torch.zeros(parameter.shape) for parameter in model.parameters()]
    for rank in range(size):
        single = build().float().to(torch.bfloat16)
        loss_of(single, 0, rank).backward()
        for total, parameter in zip(totals, single.parameters(), strict=True):
            total.add_(parameter.grad)
    for total, parameter in zip(totals, model.parameters(), strict=True):
        gradient = parameter.grad.full_tensor()
        eps = size * torch.finfo(torch.float32).eps
        torch.testing.assert_close(gradient, total / size, rtol=eps, atol=eps)


# Tensor parallelism


def parallelize_sequence(model, mesh):
    from torch.distributed.tensor import parallel

    for index, block in enumerate(model[:-1]):
        plan = {
            "norm": parallel.SequenceParallel(),
            "up": parallel.ColwiseParallel(input_layouts=Shard(1)),
            "down": parallel.RowwiseParallel(output_layouts=Shard(1)),
        }
        if index == 0:
            parallel.parallelize_module(
                block,
                mesh,
                parallel.PrepareModuleInput(
                    input_layouts=Replicate(),
                    desired_input_layouts=Shard(1),
                    use_local_output=True,
                ),
            )
        parallel.parallelize_module(block, mesh, plan)
    last = parallel.ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    parallel.parallelize_module(model, mesh, {str(len(model) - 1): last})
    return model


def train_sequence_parallel():
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_sequence(build(), mesh)
    with loss_parallel():
        return train(model, 0)[0]


def test_sequence_parallel(found):
    expected, _ = on_one_process(1)
    assert_equal(found["sequence parallel"], expected)


def redistribute():
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole_one = torch.arange(5.0 * 7).reshape(5, 7)  # size divides neither
    for first in (Replicate(), Shard(0), Shard(1)):
        tensor = distribute_tensor(whole_one, mesh, [first])
        for then in (Replicate(), Shard(0), Shard(1)):
            moved = tensor.redistribute(mesh, [then])
            assert torch.equal(moved.full_tensor(), whole_one)
            total = (moved * 2).sum(0).full_tensor()
            assert torch.equal(total, 2 * whole_one.sum(0))
    assert rank == mesh.get_local_rank()


# torch.compile


def compile_collectives():
    from torch.distributed import _functional_collectives as functional

    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD

    def compute(inputs):
        total = functional.all_reduce(inputs * 2, "sum", group)
        rows = functional.all_gather_tensor(total + rank, 0, group)
        part = functional.reduce_scatter_tensor(rows.sin(), "sum", 0, group)
        return functional.all_to_all_single(part, None, None, group) + 1

    inputs = torch.randn(size, 3, dtype=torch.float64) + rank
    compiled = torch.compile(compute, backend="aot_eager", fullgraph=True)
    expected = compute(inputs)
    for _ in range(2):
        torch.testing.assert_close(compiled(inputs), expected, rtol=1e-14, atol=0)


CALLS = {
    "sharded": (train_sharded, 0.1, {}),
    "sharded, kept": (train_sharded, 0.1, {"reshard_after_forward": False}),
    "mixed": (train_mixed,),
    "sequence parallel": (train_sequence_parallel,),
    "redistribute": (redistribute,),
    "compile": (compile_collectives,),
}


@pytest.mark.parametrize("name", ["mixed", "redistribute", "compile"])
def test_checks_on_the_ranks(found, name):
    assert found[name] == (None,) * SIZE
