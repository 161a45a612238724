"""Rounds of gradients that ``backward()`` has postponed."""

import os
import signal
from contextlib import suppress

import pytest
import torch
from tests.parity.problems import assert_same_weights, loss_of, weights_of
from tests.parity.sessions import message_of, run_sessions
from torch import nn

import ronde.torch as hvd


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def start():
    torch.manual_seed(0)
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(sgd, model.named_parameters())


def loss_at(model, step=0, rank=None):
    return loss_of(model, hvd.rank() if rank is None else rank, step)


def skips():
    return hvd.rank() == hvd.size() - 1


def put_off(model, step=0):
    """Have ``backward()`` return before its round on all ranks but the last."""
    if not skips():
        loss_at(model, step).backward()
    hvd.allreduce(torch.ones(1), name="loss")


def alone(size, batches):
    """Return the weights of one process.

    Args:
        size: Ranks that the gradients are averaged over.
        batches: For each step, the rank and the number of each batch.
    """
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        for rank, step in batch:
            (loss_at(model, step, rank) / size).backward()
        optimizer.step()
    return weights_of(model)


def of_others(*steps):
    """Return the batches where the last rank skips all its backward passes."""
    ranks = range(hvd.size() - 1)
    return [[(rank, step) for rank in ranks] for step in steps]


def scale_and_skip():
    """Rank 0 has an infinite gradient in step 1: no rank takes that step."""
    model, optimizer = start()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        is_bad = hvd.rank() == 0 and step == 1
        loss = scaler.scale(loss_at(model, step) * (torch.inf if is_bad else 1))
        if not skips():
            loss.backward()
        hvd.allreduce(torch.ones(1), name="loss")
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [4.0, 2.0, 2.0]
    assert_same_weights(weights_of(model), alone(hvd.size(), of_others(0, 2)))


def forget():
    """``zero_grad()`` and a second pass are refused until the gradients are there."""
    model, optimizer = start()
    for step in range(3):
        if not skips():
            loss_at(model, step).backward()
            for too_early in (optimizer.zero_grad, loss_at(model).backward):
                assert "are not reduced yet" in message_of(AssertionError, too_early)
        hvd.allreduce(torch.ones(1), name="loss")
        optimizer.synchronize()
        if step == 1:
            optimizer.zero_grad()
            optimizer.step()
        else:
            with optimizer.skip_synchronize():
                optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(weights_of(model), alone(hvd.size(), of_others(0, 2)))


def raise_and_go_on():
    """All ranks leave step 1 by an exception between backward and step."""
    model, optimizer = start()
    for step in range(3):
        with suppress(ZeroDivisionError):
            put_off(model, step)
            if step == 1:
                raise ZeroDivisionError
            optimizer.step()
        optimizer.synchronize()
        optimizer.zero_grad()
    assert_same_weights(weights_of(model), alone(hvd.size(), of_others(0, 2)))


def skip_backward_and_step():
    """The last rank skips both once, and takes its third step with its batch 3."""
    model, optimizer = start()
    size = hvd.size()
    for step in range(4 if skips() else 3):
        optimizer.zero_grad()
        is_skipped = skips() and step == 1
        if not is_skipped:
            loss_at(model, step).backward()
        if step < 3:
            hvd.allreduce(torch.ones(1), name="loss")
        if not is_skipped:
            optimizer.step()
    batches = of_others(0, 1, 2)
    for batch, step in zip(batches, (0, 2, 3), strict=True):
        batch.append((size - 1, step))
    assert_same_weights(weights_of(model), alone(size, batches))


def join_meanwhile():
    """Rank 0 joins with a round put off, the last but one without data before."""
    model, optimizer = start()
    for step in range(4):
        optimizer.zero_grad()
        if step == 1 and hvd.rank() == hvd.size() - 2 > 0:
            break
        put_off(model, step)
        if step == 3 and hvd.rank() == 0:
            break
        optimizer.step()
    hvd.join()
    # The last rank took all steps.
    ranks = [list(range(hvd.size() - 1))]
    ranks += 3 * [[rank for rank in ranks[0] if not rank or rank < hvd.size() - 2]]
    batches = [[(rank, step) for rank in of] for step, of in enumerate(ranks)]
    if skips():
        assert_same_weights(weights_of(model), alone(hvd.size(), batches))


def shut_down_and_start_anew():
    model, optimizer = start()
    put_off(model)
    hvd.shutdown()
    hvd.init()
    model, optimizer = start()
    put_off(model)
    optimizer.step()
    assert_same_weights(weights_of(model), alone(hvd.size(), of_others(0)))


CASES = [
    scale_and_skip,
    forget,
    raise_and_go_on,
    skip_backward_and_step,
    join_meanwhile,
    shut_down_and_start_anew,
]


def go_on():
    for case in CASES:
        case()


@pytest.mark.parametrize(
    ("size", "engine"),
    [(3, "auto"), (2, "gloo"), (4, "hierarchical")],
)
def test_what_goes_on(size, engine):
    run_sessions(size, go_on, engine=engine)


def shut_down():
    """End the session of one rank: the others' is over, too."""


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("engine", "leave"),
    [
        *(("auto", leave) for leave in (kill, shut_down, fail)),
        ("gloo", kill),
    ],
)
def test_the_rank_that_is_waited_for_leaves(engine, leave):
    """All others get an error in ``step()``."""

    def work():
        model, optimizer = start()
        optimizer.step()  # ranks connect
        put_off(model)
        if skips():
            return leave()
        return message_of(hvd.HorovodInternalError, optimizer.step)

    def run():
        return run_sessions(3, work, engine=engine, dying=[2])

    if leave is fail:
        with pytest.raises(ZeroDivisionError):
            run()
    else:
        *messages, _ = run()
        assert all("rank was lost" in message for message in messages), messages
