"""Ranks that run ``backward()`` unequally often before a step are an error on all.

Else a reduction would add gradients of different steps, so that weights differ between
ranks, and in the end one rank waits for one that has left.
"""

import pytest
import torch
from tests.parity.sessions import run_sessions
from torch import nn

import ronde.torch as hvd


def distributed(model, **options):
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)


def start(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    return model, distributed(model, **options)


def backward(model, number=0):
    inputs = torch.full((2, 4), (1.0 + hvd.rank() + number) / 8)
    model(inputs).square().mean().backward()


def train(model, optimizer, passes):
    """Take a step for each number of passes."""
    for number, num_passes in enumerate(passes):
        for _ in range(num_passes):
            backward(model, number)
        optimizer.step()
        optimizer.zero_grad()


def train_and_join(model, optimizer, passes):
    train(model, optimizer, passes)
    hvd.join()


def assert_equal_weights(model):
    for parameter in model.parameters():
        everyone = hvd.allgather(parameter.detach()[None])
        assert all(torch.equal(one, everyone[0]) for one in everyone)


@pytest.mark.parametrize(
    ("size", "engine"), [(3, "auto"), (2, "gloo"), (4, "hierarchical")]
)
def test_one_pass_more_on_one_rank_is_an_error_on_all(size, engine):
    def work():
        model, optimizer = start()
        uneven = 2 if hvd.rank() == 1 else 1
        with pytest.raises(hvd.HorovodInternalError) as caught:
            train(model, optimizer, [1, 2, 1, uneven, 1, 1])
        # What is no gradient goes on.
        assert float(hvd.allreduce(torch.ones(1), name="after")) == 1.0
        return str(caught.value)

    first, second, *_ = run_sessions(size, work, engine=engine)
    assert first.startswith("Gradients were computed more than backward_passes_per_")
    assert f"on 1 of {size} ranks, not on this one." in first
    assert f"on 1 of {size} ranks, including this one." in second


def test_a_pass_less_than_on_the_others_is_an_error_on_all():
    def work():
        fp16 = hvd.Compression.fp16
        model, optimizer = start(backward_passes_per_step=2, compression=fp16)
        last = 1 if hvd.rank() == 0 else 3
        with pytest.raises(hvd.HorovodInternalError) as caught:
            train(model, optimizer, [2, last, 2, 2])
        return str(caught.value)

    first, *rest = run_sessions(3, work)
    assert "on 2 of 3 ranks, not on this one." in first
    assert all("on 2 of 3 ranks, including this one." in text for text in rest)


def test_a_rank_that_has_joined_does_not_hide_it():
    def work():
        model, optimizer = start()
        passes = [[1], [1, 2, 1], [1, 1, 1, 1]][hvd.rank()]
        with pytest.raises(hvd.HorovodInternalError) as caught:
            train_and_join(model, optimizer, passes)
        return str(caught.value)

    _, second, third = run_sessions(3, work)
    assert "on 1 of 2 ranks, including this one." in second
    assert "on 1 of 2 ranks, not on this one." in third


def test_what_is_even_or_made_up_for_passes():
    """Each of these is right in Horovod, or means nothing to the other ranks."""

    def work():
        is_odd = hvd.rank() % 2 == 1
        model, optimizer = start()
        train(model, optimizer, [1, 2, 3, 1])  # as many on all ranks
        train(model, optimizer, [1, not is_odd, 1])  # a rank without gradients
        backward(model)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.set_backward_passes_per_step(3)
        train(model, optimizer, [3, 3, 2 if is_odd else 3, 1 if is_odd else 2, 3])
        optimizer.set_backward_passes_per_step(1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(3):  # the second step is skipped, on all ranks
            loss = model(torch.ones(1, 4)).sum()
            loss = loss * float("inf") if number == 1 and is_odd else loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert_equal_weights(model)

    run_sessions(3, work)


def test_ranks_that_took_unequally_many_steps_go_on_after_a_join():
    def work():
        model, optimizer = start()
        for _ in range(3):
            train(model, optimizer, [1] * (2 + hvd.rank()))
            last = hvd.join()
            hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        train(model, optimizer, [1, 2])
        assert_equal_weights(model)

    run_sessions(3, work)


def test_a_new_worker_goes_on_with_those_that_have_taken_steps():
    def work():
        model, optimizer = start()
        train(model, optimizer, [1] * (hvd.size() - 1))
        hvd.shutdown()
        hvd.init()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        if hvd.rank() == 1:
            optimizer = distributed(model)
        train(model, optimizer, [1, 2, 1])
        assert_equal_weights(model)

    run_sessions(3, work)
