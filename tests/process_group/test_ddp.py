"""DistributedDataParallel on ronde against one process that has every rank's batch."""

import pytest
import torch
from tests.process_group.groups import AUTO, ENGINES, SMOKE, run_all
from torch import distributed as dist, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

NUM_STEPS = 5
TINY_MB = 1e-4  # a bucket for every parameter
SIZE = AUTO.size


class Branches(nn.Module):
    """Odd layers in float64; some are unused, depending on step and rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 13)
        self.branches = nn.ModuleList(nn.Linear(13, 5, bias=False) for _ in range(3))
        self.last = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor([1.3]))
        self.double()

    def forward(self, inputs, branch):
        hidden = torch.tanh(self.branches[branch](torch.tanh(self.first(inputs))))
        return self.scale * self.last(hidden)


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = torch.randn(4, 10, generator=generator, dtype=torch.float64)
    return rows[:, :7], rows[:, 7:]


def loss_of(model, step, rank, branch=0):
    inputs, targets = batch(step, rank)
    return nn.functional.mse_loss(model(inputs, branch), targets)


def same_branch(step, rank):
    return 0


def branch_of_step(step, rank):
    return step % 2


def branch_of_rank(step, rank):
    return rank % 2


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def on_one_process(size, branch=same_branch, make_optimizer=sgd, num_passes=1):
    """Train with the gradients of all ranks' batches, and return the weights."""
    model = Branches()
    optimizer = make_optimizer(model)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for part in range(num_passes):
            for rank in range(size):
                turn = num_passes * step + part
                loss = loss_of(model, turn, rank, branch(step, rank))
                (loss / size).backward()
        optimizer.step()
    return model.state_dict()


def on_ranks(options, branch=same_branch, make_optimizer=sgd, prepare=None):
    model = DistributedDataParallel(Branches(), **options)
    if prepare is not None:
        prepare(model)
    optimizer = make_optimizer(model)
    rank = dist.get_rank()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank, branch(step, rank)).backward()
        optimizer.step()
    return model.module.state_dict()


@pytest.fixture(scope="module")
def found():
    return run_all(AUTO, CALLS)


def assert_equal(states, expected):
    for state in states:
        for name, tensor in expected.items():
            torch.testing.assert_close(
                state[name], tensor, rtol=1e-12, atol=1e-12, msg=name
            )


OPTIONS = {
    "plain": {"find_unused_parameters": True},
    "tiny buckets": {"find_unused_parameters": True, "bucket_cap_mb": TINY_MB},
    "static graph": {"static_graph": True},
    "static graph, tiny buckets": {"static_graph": True, "bucket_cap_mb": TINY_MB},
    "views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(found, name):
    assert_equal(found[name], on_one_process(SIZE))


@pytest.mark.parametrize("setting", [*ENGINES[1:], *SMOKE], ids=str)
def test_other_engines_and_sizes(setting):
    names = ["static graph, tiny buckets", "views"]
    found = run_all(setting, {name: CALLS[name] for name in names})
    for states in found.values():
        assert_equal(states, on_one_process(setting.size))


def all_used(options):
    """Train without unused parameters and without a search for them."""
    rank = dist.get_rank()
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).double(), **options
    )
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    for step in range(2):  # buckets are made anew after the first
        model.zero_grad()
        inputs, targets = batch(step, rank)
        nn.functional.mse_loss(model(inputs), targets).backward()
    return [parameter.grad for parameter in model.parameters()]


ALL_USED = {"all used": {}, "all used, tiny buckets": {"bucket_cap_mb": TINY_MB}}


@pytest.mark.parametrize("name", ALL_USED)
def test_all_used(found, name):
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).double()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    parts = [batch(1, rank) for rank in range(SIZE)]
    inputs, targets = (torch.cat(each) for each in zip(*parts, strict=True))
    nn.functional.mse_loss(model(inputs), targets).backward()
    for gradients in found[name]:
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("branch", [branch_of_step, branch_of_rank])
def test_unused_parameters(found, branch):
    assert_equal(found[branch.__name__], on_one_process(SIZE, branch))


def without_sync():
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = sgd(model)
    rank = dist.get_rank()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, 2 * step, rank).backward()
        loss_of(model, 2 * step + 1, rank).backward()
        optimizer.step()
    return model.module.state_dict()


def test_no_sync(found):
    assert_equal(found["no sync"], on_one_process(SIZE, num_passes=2))


def hook_plain(model):
    model.register_comm_hook(None, default_hooks.allreduce_hook)


def hook_power_sgd(model):
    """Register PowerSGD with a rank so high that it loses nothing."""
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=13,
        start_powerSGD_iter=2,
        min_compression_rate=0,
        orthogonalization_epsilon=0,
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


HOOKS = {"plain hook": hook_plain, "power": hook_power_sgd}


def test_hooks(found):
    expected = on_one_process(SIZE)
    assert_equal(found["plain hook"], expected)
    for power in found["power"]:
        for name, tensor in expected.items():  # through two orthogonalizations a step
            torch.testing.assert_close(power[name], tensor, rtol=1e-9, atol=1e-9)


class Buffered(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("factor", torch.full((3,), value))
        self.register_buffer("count", torch.tensor(int(value)))

    def forward(self):
        return (self.weight * self.factor).sum()


def broadcast_buffers():
    rank = dist.get_rank()
    model = DistributedDataParallel(Buffered(7.0 + rank))
    model.module.factor.fill_(3.0 + rank)
    model.module.count.fill_(5 + rank)
    model().backward()
    return model.module.factor, model.module.count, model.module.weight.grad


def test_buffers(found):
    for factor, count, grad in found["buffers"]:
        assert factor.tolist() == [3.0] * 3
        assert count.item() == 5
        assert grad.tolist() == [3.0] * 3


def join_early():
    """Train one step more on each rank than on the previous one."""
    rank = dist.get_rank()
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = sgd(model)
    with Join([model]):
        for step in range(rank + 1):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
    return model.module.state_dict()


def test_join(found):
    model = Branches()
    optimizer = sgd(model)
    for step in range(SIZE):
        optimizer.zero_grad()
        for rank in range(step, SIZE):
            (loss_of(model, step, rank) / SIZE).backward()
        optimizer.step()
    assert_equal(found["join"], model.state_dict())


def shard_optimizer():
    # Its package warns when it is imported.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(Branches(), static_graph=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
    )
    rank = dist.get_rank()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if rank == 0 else {}
    return model.module.state_dict(), state


def test_zero_redundancy_optimizer(found):
    expected = on_one_process(SIZE, make_optimizer=adam)
    trained, states = zip(*found["sharded optimizer"], strict=True)
    assert_equal(trained, expected)
    assert {len(state) for state in states} == {0, len(states[0])}
    assert states[0]


UNUSED = {"find_unused_parameters": True, "bucket_cap_mb": TINY_MB}
HOOKED = {"static_graph": True, "bucket_cap_mb": TINY_MB}
CALLS = {
    **{name: (on_ranks, options) for name, options in OPTIONS.items()},
    **{name: (all_used, options) for name, options in ALL_USED.items()},
    **{
        branch.__name__: (on_ranks, UNUSED, branch)
        for branch in (branch_of_step, branch_of_rank)
    },
    **{
        name: (on_ranks, HOOKED, same_branch, sgd, hook) for name, hook in HOOKS.items()
    },
    "no sync": (without_sync,),
    "buffers": (broadcast_buffers,),
    "join": (join_early,),
    "sharded optimizer": (shard_optimizer,),
}
