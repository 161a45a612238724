"""DistributedOptimizer as a proxy, its buckets, and its bad arguments."""

import gc
import weakref

import numpy as np
import pytest
import torch
from tests.parity.problems import CountingEngine, OddMlp, mse
from tests.ranks import run_ranks_bare
from torch import nn

import ronde.torch as hvd
from ronde.collectives import Communicator
from ronde.data_parallel import BucketLimits, Reducer, ReducerGroup, ReducerOptions
from ronde.errors import UsageError


def in_world_of_one(function):
    """Run ``function`` in a process of its own that called ``init()``."""

    def call(_: object) -> object:
        hvd.init()
        return function()

    return run_ranks_bare(1, call)[0]


def on_ranks(size, function):
    def call(_: object) -> object:
        hvd.init()
        return function()

    return run_ranks_bare(size, call)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward(model: nn.Module) -> None:
    mse(model, torch.ones(2, 7), torch.ones(2, 3)).backward()


def test_stands_in_for_the_wrapped_optimizer():
    def check():
        model = OddMlp()
        wrapped = sgd(model)
        optimizer = hvd.DistributedOptimizer(wrapped, model.named_parameters())
        assert isinstance(optimizer, torch.optim.SGD)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert type(optimizer) is hvd.DistributedOptimizer
        assert optimizer.param_groups is wrapped.param_groups
        backward(model)
        optimizer.step()
        assert optimizer.state is wrapped.state
        saved = optimizer.state_dict()
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.load_state_dict(saved)
        assert wrapped.param_groups[0]["lr"] == 0.1
        optimizer.grad_scale = torch.tensor(2.0)
        assert wrapped.grad_scale == 2.0
        del optimizer.grad_scale
        assert not hasattr(wrapped, "grad_scale")

    in_world_of_one(check)


def test_gradients_are_views_of_few_buckets():
    def check():
        model = OddMlp()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
            assert len(storages) == 1
            optimizer.step()
        return [p.grad.data_ptr() for p in model.parameters()]

    pointers = on_ranks(2, check)
    # All ranks agreed on rank 0's order: the same offsets in the bucket.
    offsets = [[p - min(rank) for p in rank] for rank in pointers]
    assert offsets[0] == offsets[1]


def test_frozen_buckets_are_not_reduced():
    model = OddMlp()
    engine = CountingEngine()
    communicator = Communicator(engine)
    named = list(model.named_parameters())
    options = ReducerOptions(limits=BucketLimits(1, 1))
    reducer = Reducer(named, ReducerGroup(communicator), options)
    counts = []
    for is_trained in (True, True, False, True):
        model.first.requires_grad_(is_trained)
        before = engine.num_reductions
        model.zero_grad()
        backward(model)
        counts.append(engine.num_reductions - before)
        reducer.step_done()
    assert counts == [len(named), len(named), len(named) - 2, len(named)]
    reducer.close()


def test_ranks_whose_gradients_arrive_in_other_orders_agree():
    """Autograd runs what was recorded last first: rank 1 records in reverse."""

    def check():
        torch.manual_seed(0)
        layers = [nn.Linear(5, 5) for _ in range(4)]
        arrived = []
        for number, layer in enumerate(layers):
            layer.weight.register_post_accumulate_grad_hook(
                lambda _, number=number: arrived.append(number)
            )
        parameters = [p for layer in layers for p in layer.parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
        inputs = torch.full((1, 5), 1.0 + hvd.rank())
        order = layers if hvd.rank() == 0 else layers[::-1]
        for _ in range(3):
            optimizer.zero_grad()
            losses = [layer(inputs).sum() for layer in order]
            torch.stack(losses).sum().backward()
            optimizer.step()
        offsets = [layer.weight.grad.storage_offset() for layer in layers]
        gradients = [layer.weight.grad.tolist() for layer in layers]
        return arrived[:4], offsets, gradients

    (first, offsets, gradients), (second, *rest) = on_ranks(2, check)
    assert first == second[::-1]
    assert rest == [offsets, gradients]
    assert offsets == sorted(offsets, reverse=first[0] == 3)
    assert gradients == [[[1.5] * 5] * 5] * 4


def test_optimizer_and_model_are_freed():
    def check():
        model = OddMlp()
        optimizer = hvd.DistributedOptimizer(sgd(model))
        backward(model)
        optimizer.step()
        alive = [weakref.ref(model.first.weight), weakref.ref(optimizer)]
        del model, optimizer
        gc.collect()
        return [reference() is None for reference in alive]

    assert on_ranks(2, check) == [[True, True]] * 2


def test_options_keep_their_types_through_a_broadcast():
    def check():
        optimizer = sgd(OddMlp())
        group = optimizer.param_groups[0]
        if hvd.rank() == 0:
            group |= {"lr": np.float64(0.5), "momentum": torch.tensor(0.25)}
            group |= {"betas": (np.float32(0.1), 0.2, torch.tensor(3)), "n": np.int8(4)}
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        group = optimizer.param_groups[0]
        values = group["lr"], group["momentum"], *group["betas"], group["n"]
        return [(type(value).__name__, float(value)) for value in values]

    for found in on_ranks(3, check):
        assert found == [
            ("float64", 0.5),
            ("Tensor", 0.25),
            ("float32", float(np.float32(0.1))),
            ("float", 0.2),
            ("Tensor", 3.0),
            ("int8", 4.0),
        ]


def test_bad_arguments():
    def check():
        model = OddMlp()
        named = list(model.named_parameters())
        wrapped = sgd(model)
        for arguments, message in (
            ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
            ({"op": hvd.Min}, "op must be Average, Sum or Adasum, got 3"),
            ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "not supported"),
            ({"named_parameters": named + named}, "must be unique. Found duplicates"),
            ({"named_parameters": named[1:]}, "were not named"),
            ({"named_parameters": [1]}, "should be a sequence of tuples"),
            ({"groups": -1}, "groups should be a non-negative integer"),
            ({"groups": [[named[0][1]], [named[0][1]]]}, "can only appear once"),
            ({"groups": [["first"]]}, "groups must consist of torch.Tensor"),
        ):
            with pytest.raises(UsageError, match=message):
                hvd.DistributedOptimizer(wrapped, **arguments)
        with pytest.raises(UsageError, match="invalid params of type"):
            hvd.broadcast_parameters(3, root_rank=0)
        with pytest.raises(UsageError, match="LBFGS"):
            hvd.broadcast_optimizer_state(
                torch.optim.LBFGS(model.parameters()), root_rank=0
            )

    in_world_of_one(check)


def test_a_failed_backward_does_not_spoil_the_next():
    def check():
        model = OddMlp()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        backward(model)
        optimizer.step()
        inputs = torch.ones(2, 7, requires_grad=True)
        inputs.register_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            mse(model, inputs, torch.ones(2, 3)).backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        mse(model, torch.full((2, 7), 1.0 + hvd.rank()), torch.ones(2, 3)).backward()
        gathered = hvd.allgather(model.first.weight.grad[None])
        return bool(torch.equal(gathered[0], gathered[1]))

    assert on_ranks(2, check) == [True, True]


def _raise(_: object) -> None:
    raise ZeroDivisionError
