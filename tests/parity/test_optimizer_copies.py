"""Copies and pickles of optimizers, and Horovod's own optimizer class."""

import copy
import io

import pytest
import torch
from tests.parity.sessions import run_sessions
from tests.ranks import run_ranks_bare
from torch import nn

import ronde.torch as hvd
from ronde.torch.optimizer import _DistributedOptimizer


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, hvd.DistributedOptimizer(sgd, model.named_parameters())


def train(model, optimizer, num_steps=2):
    for step in range(num_steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + hvd.rank() + step)).square().mean().backward()
        optimizer.step()


def weights(model):
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = hvd.allgather(flat[None])
    assert all(torch.equal(one, everyone[0]) for one in everyone)
    return flat


def save_and_load(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, save_and_load])
def test_a_copy_of_model_and_optimizer_trains_as_they_do(duplicate):
    def work():
        model, optimizer = build()
        train(model, optimizer)
        other, its_optimizer = duplicate((model, optimizer))
        assert type(its_optimizer) is hvd.DistributedOptimizer
        before = weights(model)
        train(other, its_optimizer)
        assert torch.equal(weights(model), before)
        train(model, optimizer)
        assert torch.equal(weights(model), weights(other))

    run_sessions(3, work)


def test_a_shallow_copy_steps_the_same_parameters():
    def work():
        model, optimizer = build()
        train(model, copy.copy(optimizer))
        train(model, optimizer)
        expected, of_expected = build()
        train(expected, of_expected)
        train(expected, of_expected)
        assert torch.equal(weights(model), weights(expected))

    run_sessions(2, work)


def test_settings_are_kept():
    def work():
        model = build()[0]
        parameters = list(model.parameters())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.1),
            op=hvd.Sum,
            groups=[parameters[:2], parameters[2:]],
            compression=hvd.Compression.fp16,
        )
        optimizer.set_backward_passes_per_step(2)
        other, copied = copy.deepcopy((model, optimizer))
        assert copied.backward_passes_per_step == 2
        for each, its_optimizer in ((model, optimizer), (other, copied)):
            for _ in range(2):
                each(torch.ones(1, 4)).sum().backward()
            its_optimizer.step()
        assert torch.equal(weights(model), weights(other))

    run_sessions(2, work)


def test_without_a_session_the_plain_optimizer_comes_back(tmp_path):
    file = tmp_path / "saved"

    def work():
        model, optimizer = build()
        train(model, optimizer)
        if hvd.rank() == 0:
            torch.save((model, optimizer), file)

    run_sessions(2, work)
    run_ranks_bare(1, train_without_a_session, file)


def train_without_a_session(_, file):
    model, optimizer = torch.load(file, weights_only=False)
    assert type(optimizer) is torch.optim.SGD
    assert len(optimizer.state) == 4
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


class Paused(_DistributedOptimizer):
    """As frameworks do it: a hook of their own around Horovod's reduction."""

    is_paused = False

    def _make_hook(self, p):
        def hook(*_):
            if not Paused.is_paused:
                self._handles[p] = self._allreduce_grad_async(p)

        return hook


class Halving(_DistributedOptimizer):
    """Starts its own reductions, and returns what Horovod's method would."""

    def _allreduce_grad_async(self, p):
        wire, context = self._compression.compress(p.grad)
        name = self._parameter_names.get(p)
        return hvd.allreduce_async_(wire, name=name, prescale_factor=0.5), context


METHODS = ("__init__", "_register_hooks", "_allreduce_grad_async")
METHODS += ("synchronize", "step")


def test_methods_of_horovods_class_may_be_mixed_into_another():
    def work():
        model, optimizer = build()
        other = copy.deepcopy(model)
        methods = {name: getattr(_DistributedOptimizer, name) for name in METHODS}
        methods["_make_hook"] = Paused._make_hook
        methods["_should_synchronize"] = True
        sgd = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        mixed = type("SGD", (torch.optim.SGD,), methods)(
            sgd.param_groups, other.named_parameters()
        )
        assert isinstance(mixed, torch.optim.SGD)
        train(model, optimizer, 3)
        train(other, mixed, 3)
        torch.testing.assert_close(weights(other), weights(model))

    run_sessions(3, work)


def test_a_reduction_of_its_own_may_replace_horovods():
    def work():
        model = build()[0]
        members = dict(_DistributedOptimizer.__dict__)
        members["_allreduce_grad_async"] = Halving._allreduce_grad_async
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = type("SGD", (torch.optim.SGD,), members)(
            sgd.param_groups,
            model.named_parameters(),
            compression=hvd.Compression.fp16,
        )
        model(torch.ones(2, 4)).sum().backward()
        optimizer.synchronize()
        return model[1].bias.grad.tolist()

    # Each of the two rows adds 1, halved.
    assert run_sessions(2, work) == [[1.0, 1.0]] * 2


def test_horovods_class_as_a_whole():
    def work():
        model = build()[0]
        members = dict(_DistributedOptimizer.__dict__)
        cls = type("SGD", (torch.optim.SGD,), members)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = cls(sgd.param_groups, backward_passes_per_step=2)
        rows = torch.ones(1, 4)
        model(rows).sum().backward()
        if hvd.rank() == 0:  # the other reduces zeros for what it has not
            model(rows).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        weights(model)
        optimizer.backward_passes_per_step = 1
        model(rows).sum().backward()
        with pytest.raises(ValueError, match="more than backward_passes_per_step"):
            model(rows).sum().backward()
        optimizer.synchronize()

    run_sessions(2, work)


def test_a_gradient_may_be_reduced_by_hand():
    def work():
        model, optimizer = build()
        weight = model[0].weight
        weight.grad = torch.full_like(weight, float(hvd.rank()))
        handle, _ = optimizer._allreduce_grad_async(weight)
        hvd.synchronize(handle)
        return float(weight.grad.mean())

    assert run_sessions(3, work) == [1.0] * 3
