"""Ranks whose weights, states or options come apart are found and named.

Every cause here is one that users of other tools have reported.
"""

import json
import logging
import re
from functools import partial

import pytest
import torch
from tests.parity.sessions import DYNAMIC, message_of, run_cases, run_sessions
from tests.process_group.groups import Setting, run_all, run_in_group
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel

import ronde.torch as hvd
from ronde.drift import (
    PERIOD,
    Background,
    DriftCheck,
    Values,
    is_apart,
    judge,
    sum_of_words,
)
from ronde.errors import CollectiveError, UsageError

SOME = [Setting("auto", 3), Setting("gloo", 2)]
AT = 2  # the step at which ranks come apart
NUM_DDP_STEPS = 160  # five looks


class Model(nn.Module):
    """Odd sizes and dtypes; ``frozen`` is not trained."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(3, 5)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(5, 1, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))

    def forward(self, inputs):
        inner = self.conv(inputs).tanh().flatten(1).float() + self.shift.float()
        return self.scale * self.last(self.frozen(inner).tanh())


def backward(model, rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    model(torch.randn(2, 2, 3, 3, generator=generator)).square().mean().backward()


def nothing(model, optimizer, step, is_last):
    pass


def other_start(model, optimizer, step, is_last):
    if is_last and step == -1:
        model.conv.weight.data.mul_(2)


def permuted_start(model, optimizer, step, is_last):
    if is_last and step == -1:
        model.conv.weight.data.copy_(model.conv.weight.data.flip(0))


def other_frozen_layer(model, optimizer, step, is_last):
    if is_last and step == -1:
        model.frozen.bias.data[1] = 7.0


def other_rate(model, optimizer, step, is_last):
    if is_last and step == AT:
        optimizer.param_groups[0]["lr"] = 0.3


def own_clipping(model, optimizer, step, is_last):
    """Clip the reduced gradients on one rank, just before the step."""
    if is_last and step >= AT:
        nn.utils.clip_grad_value_(model.parameters(), 1e-6)


def checkpoint_on_one(model, optimizer, step, is_last):
    if is_last and step == AT:
        model.load_state_dict({n: v * 1.5 for n, v in model.state_dict().items()})


def rounded_weight(model, optimizer, step, is_last):
    """Differ in the last bits of one weight."""
    if is_last and step == AT:
        model.last.weight.data.mul_(1 + 2**-23)  # a last bit of some


def half_weight(model, optimizer, step, is_last):
    if is_last and step == AT:
        model.shift.data[2] = 0.5


def scalar(model, optimizer, step, is_last):
    if is_last and step == AT:
        model.scale.data.neg_()


def other_state(model, optimizer, step, is_last):
    """Change the optimizer's state of a parameter that no gradient moves any more."""
    if is_last and step == AT:
        optimizer.state[model.scale]["exp_avg_sq"].mul_(4)


def count_steps(model, optimizer, step, is_last):
    if is_last and step == AT:
        for state in optimizer.state.values():
            state["step"] -= 1


def behind_our_back(model, optimizer, step, is_last):
    if step == -1:
        added = model.added = nn.Parameter(torch.ones(3))
        optimizer.param_groups[0]["params"].append(added)
    model.added.grad = torch.full((3,), -1.0 if is_last else 1.0)


CAUSES = {
    nothing: None,
    other_start: "conv.weight .* began with different weights",
    permuted_start: "began with different weights",
    other_frozen_layer: "frozen.bias .* began with different weights",
    other_rate: r"lr of param_groups\[0\] is 0.01 on rank.* and 0.3 on rank",
    own_clipping: "only some ranks changed weights",
    checkpoint_on_one: "and 6 more .* only some ranks changed weights",
    rounded_weight: "last.weight .* (rounding|only some ranks changed weights)",
    half_weight: "shift .* only some ranks changed weights",
    scalar: "scale .* only some ranks changed weights",
    other_state: "scale .* Likely cause",
    count_steps: "skipped a step: the optimizer has counted",
    behind_our_back: "was added to the wrapped optimizer",
}


def make():
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.Adam(model.parameters(), 0.01)


def train(cause, model, optimizer, rank, size, num_steps):
    is_last = rank == size - 1
    cause(getattr(model, "module", model), optimizer, -1, is_last)
    for step in range(num_steps):
        optimizer.zero_grad()
        backward(model, rank, step)
        cause(getattr(model, "module", model), optimizer, step, is_last)
        optimizer.step()


def train_horovod(cause):
    model, plain = make()
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    num_steps = AT + 2 * PERIOD
    args = cause, model, optimizer, hvd.rank(), hvd.size(), num_steps
    if cause is nothing:
        train(*args)
        return hvd.check_parity(model, optimizer)
    found = message_of(CollectiveError, train, *args)
    return found, hvd.check_parity(model, optimizer)


@pytest.mark.parametrize("setting", SOME, ids=str)
def test_what_comes_apart_is_found_and_named(setting):
    cases = {cause.__name__: partial(train_horovod, cause) for cause in CAUSES}
    found = run_cases(
        setting.size,
        cases,
        engine=setting.engine,
        environment={**DYNAMIC, "RONDE_DRIFT": "error"},
    )
    for cause, words in CAUSES.items():
        of_ranks = found[cause.__name__]
        if words is None:
            assert all(each.is_equal for each in of_ranks), of_ranks
            continue
        for message, now in of_ranks:
            assert re.search(words, message), (cause.__name__, message)
            assert f"rank {setting.size - 1}" in message or setting.size == 2
            step = int(re.search(r"after step (\d+):", message)[1])
            assert step <= AT + 1 + PERIOD
            assert not now.is_equal


def train_ddp(cause):
    model, optimizer = make()
    model = DistributedDataParallel(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    args = cause, model, optimizer, rank, size, NUM_DDP_STEPS
    if cause is nothing:
        train(*args)
        return ""
    return message_of(CollectiveError, train, *args)


@pytest.mark.parametrize("setting", SOME, ids=str)
def test_ddp_on_ronde_finds_it_too(setting):
    # DDP itself broadcasts what the ranks begin with.
    without = {other_start, permuted_start, other_frozen_layer, behind_our_back}
    causes = {c: words for c, words in CAUSES.items() if c not in without}
    found = run_all(setting, {c.__name__: (train_ddp, c) for c in causes})
    for cause, words in causes.items():
        for message in found[cause.__name__]:
            assert re.search(words or "^$", message), (cause.__name__, message)


def train_among_other_calls():
    """Train by DDP on a group whose other calls are not alike on all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        with pytest.raises(UsageError):  # refused here, before anything is sent
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)
    model, optimizer = make()
    model = DistributedDataParallel(model)
    train(nothing, model, optimizer, rank, size, NUM_DDP_STEPS)
    messages, sums = torch.ones(1), [torch.ones(1) for _ in range(64)]
    if rank > 0:
        dist.recv(messages, 0)
    works = [dist.all_reduce(each, async_op=True) for each in sums]
    for other in range(1, size if rank == 0 else 0):
        dist.send(messages, other)
    for work in works:
        work.wait()
    train(nothing, model, optimizer, rank, size, NUM_DDP_STEPS)
    return [each.item() for each in sums]


@pytest.mark.parametrize("setting", SOME, ids=str)
def test_calls_that_are_not_alike_do_not_wait_for_it(setting):
    for sums in run_in_group(setting, train_among_other_calls):
        assert sums == [setting.size] * len(sums)


def test_any_value_of_an_optimizer_can_be_sent():
    parameter = nn.Parameter(torch.ones((), dtype=torch.complex64))
    optimizer = torch.optim.Adam([parameter], torch.tensor(0.1), betas=(0.5, 0.9))
    parameter.abs().backward()
    optimizer.step()
    values = Values.of([("a", parameter)], optimizer)
    read = Values(*json.loads(json.dumps(values)))
    assert {*read.state} == {"step of a", "exp_avg of a", "exp_avg_sq of a"}
    assert read.options["lr of param_groups[0]"] == pytest.approx(0.1)


def test_a_checksum_is_of_values_in_their_order():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.uint8):
        for size in (1, 3, 8, 70_001):  # the last is of several parts
            values = torch.arange(size).remainder(251).to(dtype)
            shifted = torch.cat([values[:1], values])[1:]  # at an odd address
            assert sum_of_words(values) == sum_of_words(shifted)
            assert size == 1 or sum_of_words(values) != sum_of_words(values.flip(0))
    assert sum_of_words(torch.zeros(0)) == 0
    masks = [torch.zeros(100, dtype=torch.float64) for _ in range(2)]
    masks[0][[10, 40]], masks[1][[20, 30]] = 1.0, 1.0  # as far from the middle
    assert sum_of_words(masks[0]) != sum_of_words(masks[1])
    half = torch.arange(1 << 17)
    assert sum_of_words(half) != sum_of_words(half.roll(1 << 16))  # of whole parts


def flags_of(values):
    check = DriftCheck("warn")
    check.step_done(torch.optim.SGD([nn.Parameter(values)]))
    return check.pop_flags().tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_flags_show_changes_of_high_bits_alone(dtype):
    for place in range(8):
        values = torch.ones(8, dtype=dtype)
        before = flags_of(values.clone())
        assert before == flags_of(values.clone())
        for factor in (-1, 2, 4, 2.0**20):
            values[place] = factor
            both = [sum(each) for each in zip(before, flags_of(values), strict=True)]
            assert is_apart(both), (place, factor)


def test_a_parameter_is_called_added_only_if_it_is():
    known = Background(is_reducing=True)
    for name, is_added in [
        ("my_parameter.weight", False),
        ("parameter 2 of param_groups[0]", True),
        ("exp_avg of parameter 2 of param_groups[0]", True),
    ]:
        ranks = {rank: Values({name: str(rank)}, {}, {}, {}) for rank in range(2)}
        drift = judge(ranks, known)
        assert ("was added to the wrapped" in drift.cause) == is_added
        assert drift.num_weights == 1


def train_long():
    model, plain = make()
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    train(nothing, model, optimizer, hvd.rank(), hvd.size(), 5_000)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("setting", SOME, ids=str)
def test_nothing_is_found_where_nothing_is_wrong(setting):
    environment = {**DYNAMIC, "RONDE_DRIFT": "error"}
    options = {"engine": setting.engine, "environment": environment}
    run_sessions(setting.size, train_long, timeout_s=1200, **options)


def warnings_of(function):
    """Return what the call of a function has ronde's logger say."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("ronde").addHandler(handler)
    try:
        function()
    finally:
        logging.getLogger("ronde").removeHandler(handler)
    return found


def keep_training():
    model, plain = make()
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    train(scalar, model, optimizer, hvd.rank(), hvd.size(), 3 * PERIOD)


def two_of_three():
    """Train on two ranks while the third trains a model of its own."""
    pair = hvd.add_process_set([0, 1])
    torch.manual_seed(hvd.rank() // 2)
    model = Model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        model.named_parameters(),
        process_set=pair,
    )
    train(nothing, model, optimizer, hvd.rank(), 3, 2 * PERIOD)
    assert hvd.check_parity(model, process_set=pair).is_equal if hvd.rank() < 2 else 1
    assert not hvd.check_parity(model).is_equal


def join_early(*, is_broadcast):
    """Have rank 0 join two steps before the others, and train on after that."""
    model, plain = make()
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    train(nothing, model, optimizer, hvd.rank(), 3, 3 if hvd.rank() == 0 else 5)
    last = hvd.join()
    if is_broadcast:
        hvd.broadcast_parameters(model.state_dict(), last)
        hvd.broadcast_optimizer_state(optimizer, last)
    train(nothing, model, optimizer, hvd.rank(), 3, 2 * PERIOD)


@pytest.mark.parametrize("mode", ["warn", "off"])
def test_a_warning_comes_once_and_only_of_what_was_to_be_equal(mode):
    cases = {
        "keep_training": partial(warnings_of, keep_training),
        "two_of_three": partial(warnings_of, two_of_three),
        "join": partial(warnings_of, partial(join_early, is_broadcast=True)),
        "join_only": partial(warnings_of, partial(join_early, is_broadcast=False)),
    }
    found = run_cases(3, cases, environment={**DYNAMIC, "RONDE_DRIFT": mode})
    warned = {name: list(map(len, of_ranks)) for name, of_ranks in found.items()}
    once = [int(mode == "warn"), 0, 0]
    assert warned == {
        "keep_training": once,
        "two_of_three": [0, 0, 0],
        "join": [0, 0, 0],
        "join_only": once,
    }
