"""FSDP2, tensor parallelism, pipelines and checkpoints on ronde against one process."""

import pytest
import torch
from tests.process_group.groups import (
    AUTO,
    ENGINES,
    SMOKE,
    Setting,
    every,
    run_all,
    run_in_group,
)
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

NUM_STEPS = 4
WIDTH = 12
SIZE = AUTO.size
NUM_LAYERS = 6
"""Of a model in a pipeline: two for each rank."""


@pytest.fixture(scope="module")
def found():
    return run_all(AUTO, CALLS)


@pytest.fixture(scope="module")
def found_on_four():
    """Layouts of two dimensions need so many."""
    return run_all(Setting("auto", 4), CALLS_ON_FOUR)


class Block(nn.Module):
    """Two layers behind a norm, added to what comes in."""

    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, inputs):
        return inputs + self.down(torch.tanh(self.up(self.norm(inputs))))


def build(hidden=36, num_blocks=2):
    torch.manual_seed(0)
    blocks = [Block(hidden) for _ in range(num_blocks)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 24)).double()


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


def on_one_process(num_parts, clip=None, num_blocks=2):
    """Train with the gradients of so many parts; return weights and norms."""
    model = build(num_blocks=num_blocks)
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
def test_fully_shard(found, name):
    expected, _ = on_one_process(SIZE)
    assert_equal([weights for weights, _ in found[name]], expected)


def test_fully_shard_and_clip(found):
    clipped, norms = on_one_process(SIZE, clip=0.1)
    for weights, own_norms in found["sharded, clipped"]:
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


def train_hybrid():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return train(shard(build(), mesh), dist.get_rank(), 0.1)


def test_hybrid_sharding(found_on_four):
    expected, _ = on_one_process(4, clip=0.1)
    assert_equal([weights for weights, _ in found_on_four["hybrid"]], expected)


# Tensor parallelism


def parallelize(model, mesh):
    """Shard each block's layers, and the last one for a loss in parallel."""
    from torch.distributed.tensor import parallel

    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    for block in model[:-1]:
        parallel.parallelize_module(block, mesh, plan)
    last = parallel.ColwiseParallel(use_local_output=False)
    parallel.parallelize_module(model, mesh, {str(len(model) - 1): last})
    return model


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


def train_in_parallel(divide):
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = divide(build(), mesh)
    with loss_parallel():
        return train(model, 0)[0]


@pytest.mark.parametrize("divide", [parallelize, parallelize_sequence])
def test_tensor_parallel(found, divide):
    expected, _ = on_one_process(1)
    assert_equal(found[divide.__name__], expected)


def train_both_ways():
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = shard(parallelize(build(), mesh["tp"]), mesh["dp"])
    with loss_parallel():
        return train(model, mesh.get_local_rank("dp"))[0]


def test_sharded_tensor_parallel(found_on_four):
    expected, _ = on_one_process(2)
    assert_equal(found_on_four["both ways"], expected)


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


# Pipelines


def pipeline(name, num_chunks):
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, size = dist.get_rank(), dist.get_world_size()
    layers = list(build(num_blocks=NUM_LAYERS - 1))
    per_stage = len(layers) // (size * num_chunks)
    indices = [rank + size * chunk for chunk in range(num_chunks)]
    modules = [
        nn.Sequential(*layers[per_stage * i : per_stage * (i + 1)]) for i in indices
    ]
    stages = [
        PipelineStage(module, index, size * num_chunks, torch.device("cpu"))
        for module, index in zip(modules, indices, strict=True)
    ]

    def loss_fn(outputs, targets):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    schedule = getattr(schedules, name)(
        stages if num_chunks > 1 else stages[0], 4, loss_fn=loss_fn
    )
    parts = [batch(0, part) for part in range(4)]
    inputs, targets = (torch.cat(each) for each in zip(*parts, strict=True))
    losses, result = [], None
    for _ in range(2):
        for module in modules:
            module.zero_grad()
        given = (inputs,) if rank == 0 else ()
        if rank == size - 1:
            losses = []
            result = schedule.step(*given, target=targets, losses=losses)
        else:
            schedule.step(*given)
    gradients = {
        per_stage * index + at: [p.grad for p in layer.parameters()]
        for index, module in zip(indices, modules, strict=True)
        for at, layer in enumerate(module)
    }
    return result, [loss.detach() for loss in losses], gradients


SCHEDULES = {"ScheduleGPipe": 1, "Schedule1F1B": 1, "ScheduleInterleaved1F1B": 2}


@pytest.mark.parametrize("name", SCHEDULES)
def test_pipeline(found, name):
    model = build(num_blocks=NUM_LAYERS - 1)
    losses, outputs = [], []
    for part in range(4):
        outputs.append(model(batch(0, part)[0]).detach())
        loss = loss_of(model, 0, part)
        losses.append(loss.detach())
        (loss / 4).backward()
    result, own_losses, _ = found[name][-1]
    torch.testing.assert_close(result, torch.cat(outputs), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own_losses, losses, rtol=1e-12, atol=1e-12)
    gradients = {at: each for _, _, part in found[name] for at, each in part.items()}
    assert sorted(gradients) == list(range(NUM_LAYERS))
    for at, each in gradients.items():
        expected = [p.grad for p in model[at].parameters()]
        torch.testing.assert_close(each, expected, rtol=1e-11, atol=1e-12)


# Checkpoints


def laid_out(layout):
    """Return a model and its optimizer in one of the ways to divide four ranks."""
    if layout == "sharded":
        model = shard(build(), init_device_mesh("cpu", (4,)))
    else:
        names = ("replicate", "shard") if layout == "hybrid" else ("dp", "tp")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        if layout == "hybrid":
            model = shard(build(), mesh)
        else:
            model = shard(parallelize(build(), mesh["tp"]), mesh["dp"])
    return model, adam(model)


def save(folder, layout):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.tensor.parallel import loss_parallel

    model, optimizer = laid_out(layout)
    with loss_parallel():
        loss_of(model, 0, 0).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "state": state}, checkpoint_id=folder)
    return whole(model) | moments(state)


def load(folder, layout):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = laid_out(layout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weights, state = get_state_dict(model, optimizer)
    checkpoint.load({"model": weights, "state": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return whole(model) | moments(get_state_dict(model, optimizer)[1])


def moments(state):
    return {
        f"{name}.{which}": tensor.full_tensor()
        for name, each in state["state"].items()
        for which, tensor in each.items()
        if isinstance(tensor, DTensor)
    }


@pytest.mark.parametrize(
    ("setting", "saved", "loaded"),
    [
        (Setting("hierarchical", 4), "hybrid", ["tensor parallel"]),
        *(
            pytest.param(Setting("auto", 4), *layouts, marks=pytest.mark.long)
            for layouts in (
                ("sharded", ["sharded", "tensor parallel"]),
                ("tensor parallel", ["sharded", "hybrid"]),
            )
        ),
    ],
)
def test_checkpoint(setting, saved, loaded, tmp_path):
    folder = str(tmp_path)
    loads = [(load, folder, layout) for layout in loaded]
    found = run_in_group(setting, every, (save, folder, saved), *loads)
    expected = found[0][0]
    assert len(expected) == 3 * len(build().state_dict())  # two moments of each
    for tensors in (each for rank in found for each in rank):
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensors[name], tensor), name


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
    "sharded": (train_sharded, None, {}),
    "sharded, kept": (train_sharded, None, {"reshard_after_forward": False}),
    "sharded, clipped": (train_sharded, 0.1, {}),
    "mixed": (train_mixed,),
    "parallelize": (train_in_parallel, parallelize),
    "parallelize_sequence": (train_in_parallel, parallelize_sequence),
    "redistribute": (redistribute,),
    **{name: (pipeline, name, chunks) for name, chunks in SCHEDULES.items()},
    "compile": (compile_collectives,),
}
CALLS_ON_FOUR = {"hybrid": (train_hybrid,), "both ways": (train_both_ways,)}


@pytest.mark.parametrize("name", ["mixed", "redistribute", "compile"])
def test_what_ranks_compare_by_themselves(found, name):
    assert found[name] == (None,) * SIZE
