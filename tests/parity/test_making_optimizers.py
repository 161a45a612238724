"""Making an optimizer is not collective: ranks connect at its first use."""

import copy
import re

import pytest
import torch
from tests.parity.problems import loss_of, weights_of
from tests.parity.sessions import run_sessions
from torch import nn

import ronde.torch as hvd

NUM_STEPS = 3
STALL = {
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5",
}


def build(width):
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)).double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def distributed(model, **options):
    return hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)


def train(model, optimizer, num_steps=NUM_STEPS):
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()


def alone(width, ranks):
    """Return the weights of one process that trains on the batches of all ranks."""
    model = build(width)
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, rank, step) / len(ranks)).backward()
        optimizer.step()
    return weights_of(model)


def assert_equal(results, expected):
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


def test_made_in_another_order():
    """Of models that are alike, the first one here is the first one there."""
    widths = (4, 4, 6)

    def work():
        order = sorted(set(widths), reverse=hvd.rank() % 2 == 1)
        models = [build(each) for width in order for each in widths if each == width]
        optimizers = [distributed(model) for model in models]
        pairs = sorted(
            zip(models, optimizers, strict=True),
            key=lambda pair: pair[0][0].out_features,
        )
        for model, optimizer in pairs:
            train(model, optimizer)
        return weights_of(*[model for model, _ in pairs])

    results = run_sessions(3, work)
    assert_equal(results, [w for width in widths for w in alone(width, range(3))])


def test_a_spare_copy_on_one_rank_does_not_shift_what_all_make_later():
    """Rank 0's second one is the others' first: they are alike, and none else waits."""

    def work():
        if hvd.rank() == 0:
            distributed(build(4))
        model = build(4)
        optimizer = distributed(model)
        train(model, optimizer)
        copies = copy.deepcopy((model, optimizer))
        train(*copies)
        return weights_of(model)

    assert_equal(run_sessions(3, work), alone(4, range(3)))


@pytest.mark.waits
@pytest.mark.parametrize(
    "op", [hvd.Average, pytest.param(hvd.Adasum, marks=pytest.mark.long)]
)
def test_used_on_one_rank_alone_is_reported(op):
    def work():
        model = build(4)
        optimizer = distributed(model, op=op)
        if hvd.rank() == 0:
            loss_of(model, 0, 0).backward()
            call = optimizer.step
        else:

            def call():
                hvd.allreduce(torch.ones(1), name="metric")

        with pytest.raises(hvd.HorovodInternalError) as caught:
            call()
        return str(caught.value)

    for text in run_sessions(2, work, environment=STALL):
        (missing,) = re.findall(r"^1!?: \[(.+)\]$", text, re.MULTILINE)
        assert "connect.optimizer.0.weight" in missing


def test_different_models_are_an_error_on_all_ranks():
    def work():
        last = hvd.rank() == 2
        model = build(6 if last else 4)
        optimizer = distributed(model)
        loss_of(model, hvd.rank(), 0).backward()
        with pytest.raises(hvd.HorovodInternalError) as caught:
            optimizer.step()
        return str(caught.value)

    expected = (
        "parameters must be the same on all ranks, got 0.weight (4, 5) strides (5, 1) "
        "torch.float64 on cpu on rank 0 and 0.weight (6, 5) strides (5, 1) "
        "torch.float64 on cpu on rank 2. Build the same model on all ranks."
    )
    assert run_sessions(3, work) == [expected] * 3


def test_models_of_different_lengths_are_an_error_on_all_ranks():
    def work():
        model = build(4)
        some = model[0] if hvd.rank() else model
        optimizer = distributed(some)
        loss_of(model, hvd.rank(), 0).backward()
        with pytest.raises(hvd.HorovodInternalError, match="num_parameters must be"):
            optimizer.step()
        # The session goes on.
        other = build(4)
        train(other, distributed(other))
        return weights_of(other)

    assert_equal(run_sessions(2, work), alone(4, range(2)))


def test_process_sets_that_overlap():
    """Rank 1 is in both, and uses them in the other order at every second step."""

    def work():
        low, high = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])
        sets = {4: low, 6: high, 8: hvd.global_process_set}
        order = [4, 6, 8] if hvd.rank() != 1 else [8, 6, 4]
        models = {width: build(width) for width in order}
        optimizers = {
            width: distributed(models[width], process_set=sets[width])
            for width in order
            if sets[width].included()
        }
        for step in range(NUM_STEPS):
            for width, optimizer in optimizers.items():
                optimizer.zero_grad()
                loss_of(models[width], hvd.rank(), step).backward()
            for optimizer in optimizers.values():
                optimizer.step()
        return {width: weights_of(models[width]) for width in optimizers}

    ranks = {4: [0, 1], 6: [1, 2], 8: [0, 1, 2]}
    results = run_sessions(3, work)
    for rank, result in enumerate(results):
        for width, trained in result.items():
            assert rank in ranks[width]
            assert_equal([trained], alone(width, ranks[width]))


def test_a_rank_joins_before_the_first_use():
    """Another optimizer is used on no rank."""
    size = 3

    def work():
        model = build(4)
        if hvd.rank() == 0:
            distributed(build(8))
        optimizer, unused = distributed(model), distributed(build(6))
        train(model, optimizer, num_steps=0 if hvd.rank() == 1 else NUM_STEPS)
        last = hvd.join()
        del unused
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        train(model, optimizer)
        return weights_of(model)

    results = run_sessions(size, work)
    num_batches = [NUM_STEPS, 0, NUM_STEPS, NUM_STEPS]
    model = build(4)
    optimizer = sgd(model)
    for counts in (num_batches, [NUM_STEPS] * 4):
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            for rank in range(size):
                if step < counts[rank]:
                    (loss_of(model, rank, step) / size).backward()
            optimizer.step()
    assert_equal(results, weights_of(model))


def test_a_rank_that_joined_without_the_optimizer_is_an_error_on_the_others():
    def work():
        if hvd.rank() == 1:
            hvd.join()
            return None
        model = build(4)
        optimizer = distributed(model)
        with pytest.raises(hvd.HorovodInternalError) as caught:
            train(model, optimizer)
        hvd.join()
        return str(caught.value)

    first, _, third = run_sessions(3, work)
    assert first == third
    assert "connect.optimizer.0.weight" in first
    assert "before" in first
    assert "joins" in first
