"""Programs that change gradients and parameters in ways that torch allows.

Each runs on several ranks and on one process, which adds up what the ranks would.
"""

import copy
import random

import pytest
import torch
from tests.parity.sessions import run_cases
from torch import nn

import ronde.torch as hvd

NUM_STEPS = 5
SEEDS = [
    range(20),
    *(
        pytest.param(range(n, n + 50), marks=pytest.mark.soak)
        for n in range(20, 500, 50)
    ),
]
"""Of sequences of changes, of which a few run whenever tests do."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)
        self.unused = nn.Linear(2, 2)
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.out = nn.Linear(12, 1)

    def forward(self, inputs):
        inner = self.first(self.conv(inputs).tanh().flatten(1)).tanh()
        return self.out(self.second(inner).tanh())


class Training:
    """A training of one rank, or of all ranks on one process."""

    def __init__(self, ranks, *, is_alone, **options):
        torch.manual_seed(0)
        self.ranks, self.step = ranks, 0
        self.model = Model().double()
        plain = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.optimizer = (
            plain
            if is_alone
            else hvd.DistributedOptimizer(
                plain, self.model.named_parameters(), **options
            )
        )

    @property
    def grads(self):
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def backward(self, scale=1.0):
        for rank in self.ranks:
            generator = torch.Generator().manual_seed(100 * rank + self.step)
            inputs = torch.randn(2, 2, 3, 3, generator=generator, dtype=torch.float64)
            weight = next(self.model.parameters())
            outputs = self.model(inputs.to(weight.dtype))
            (scale * outputs.square().mean() / len(self.ranks)).backward()


def assigned(training):
    for grad in training.grads:
        grad.data = grad.data.clamp(-0.1, 0.1)


def clamped(training):
    for grad in training.grads:
        grad.data.clamp_(-0.1, 0.1)


def detached(training):
    for grad in training.grads:
        grad.detach_()


def set_anew(training):
    for grad in training.grads:
        grad.set_(grad * 0.5)


def resized(training):
    for grad in training.grads:
        grad.resize_(grad.shape)


def replaced(training):
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def other_memory(training):
    for parameter in training.model.parameters():
        parameter.data = parameter.data.clone()


def single(training):
    if training.step == 2:
        training.model.float()


def frozen_meanwhile(training):
    training.model.out.requires_grad_(training.step % 2 == 0)


AFTER_BACKWARD = [
    *(assigned, clamped, detached, set_anew, resized, replaced, other_memory),
    *(single, frozen_meanwhile),
]


def zeroed_in_place(training):
    for grad in training.grads:
        grad.detach_()
        grad.zero_()


def two_losses(training, look=lambda grad: grad):
    """Combine the gradients of two losses, which are kept by reference."""
    training.backward()
    first = [look(grad) for grad in training.grads]
    training.optimizer.zero_grad()
    training.backward(-3.0)
    second = [look(grad) for grad in training.grads]
    assert all(torch.allclose(-3 * a, b) for a, b in zip(first, second, strict=True))
    trained = [p for p in training.model.parameters() if p.grad is not None]
    for parameter, one, other in zip(trained, first, second, strict=True):
        parameter.grad = (one - 0.5 * other).view_as(parameter)


def kept_over_steps(training):
    """Keep what gradients were, as momentum of one's own."""
    kept = training.__dict__.setdefault("kept", [])
    training.backward()
    kept.append([grad.flatten() for grad in training.grads])
    with torch.no_grad():
        for parameter, *olds in zip(
            [p for p in training.model.parameters() if p.grad is not None],
            *kept[-3:-1],
            strict=False,
        ):
            for old in olds:
                parameter.grad = parameter.grad + old.view_as(parameter)


def accumulated(training):
    """Add up two passes in one gradient that was never reset."""
    training.backward()
    kept = training.grads
    training.backward(2.0)
    for grad, now in zip(kept, training.grads, strict=True):
        assert torch.equal(grad, now)


PASSES = {
    "zeroed in place": lambda t: (zeroed_in_place(t), t.backward()),
    "two losses": two_losses,
    "two losses by views": lambda t: two_losses(t, lambda grad: grad.view(-1)),
    "two losses by arrays": lambda t: two_losses(
        t, lambda grad: torch.from_numpy(grad.numpy())
    ),
    "kept over steps": kept_over_steps,
    "accumulated": accumulated,
}


def run(ranks, *, is_alone=False, passes=Training.backward, after=lambda _: None):
    training = Training(ranks, is_alone=is_alone)
    for step in range(NUM_STEPS):
        training.step = step
        training.optimizer.zero_grad()
        passes(training)
        after(training)
        training.optimizer.step()
    return [parameter.detach().clone() for parameter in training.model.parameters()]


CASES = {each.__name__: {"after": each} for each in AFTER_BACKWARD} | {
    name: {"passes": passes} for name, passes in PASSES.items()
}


@pytest.mark.parametrize(("size", "engine"), [(3, "auto"), (2, "gloo")])
def test_ranks_follow_one_process(size, engine):
    cases = {
        name: lambda case=case: run([hvd.rank()], **case)
        for name, case in CASES.items()
    }
    for name, results in run_cases(size, cases, engine=engine).items():
        alone = run(range(size), is_alone=True, **CASES[name])
        for rank in range(size):
            for weight, first in zip(results[rank], results[0], strict=True):
                assert torch.equal(weight, first), (name, rank)
        for weight, expected in zip(results[0], alone, strict=True):
            tolerance = 1e-4 if weight.dtype == torch.float32 else 1e-12
            torch.testing.assert_close(
                weight, expected, rtol=tolerance, atol=tolerance, msg=name
            )


def test_a_hook_that_comes_after_wrapping_finds_the_gradient():
    def case():
        training = Training([hvd.rank()], is_alone=False)
        found = []

        def halved(parameter):
            found.append(parameter.grad is not None)
            parameter.grad.mul_(0.5)

        for step in range(3):
            training.step = step
            for parameter in training.model.parameters():
                if step == 1:
                    parameter.register_post_accumulate_grad_hook(halved)
            training.optimizer.zero_grad()
            training.backward()
            training.optimizer.step()
        return found, next(iter(training.model.parameters())).detach()

    results = run_cases(2, {"hook": case})["hook"]
    for found, weight in results:
        assert found == [True] * 16
        assert torch.equal(weight, results[0][1])


def test_an_optimizer_that_is_kept_adds_nothing():
    size = 3

    def case(op):
        def trainings():
            weight = nn.Parameter(torch.ones(1))
            kept = []
            for _ in range(3):
                plain = torch.optim.SGD([weight], lr=0.1)
                kept.append(hvd.DistributedOptimizer(plain, [("w", weight)], op=op))
                kept[-1].zero_grad()
                weight.sum().backward()
                grads.append(weight.grad.item())
                kept[-1].step()
            return grads

        grads = []
        return trainings

    cases = {"sum": case(hvd.Sum), "average": case(hvd.Average)}
    results = run_cases(size, cases)
    assert results["sum"] == [[size] * 3] * size
    assert results["average"] == [[1.0] * 3] * size


class Changing(Training):
    """A training in which a program changes the model as it likes."""

    def __init__(self, seed, ranks, *, is_alone):
        super().__init__(ranks, is_alone=is_alone)
        self.random = random.Random(seed)
        self.saved = None

    def cast(self):
        self.model.float() if self.random.random() < 0.5 else self.model.double()

    def cast_and_back(self):
        self.model.float().double()

    def freeze(self):
        self.random.choice(list(self.model.parameters())).requires_grad_(False)

    def unfreeze(self):
        self.model.requires_grad_(True)

    def replace_layer(self):
        torch.manual_seed(self.step)
        weight = self.model.conv.weight
        self.model.conv = nn.Conv2d(2, 3, 2).to(weight.dtype)
        self._add(self.model.conv.parameters())

    def add_group(self):
        self._add([nn.Parameter(torch.ones(3, dtype=torch.float64))])

    def _add(self, parameters):
        self.optimizer.add_param_group({"params": list(parameters), "lr": 0.05})

    def keep_state(self):
        state = self.model.state_dict(), self.optimizer.state_dict()
        self.saved = copy.deepcopy(state), len(self.optimizer.param_groups)

    def load_state(self):
        if self.saved and self.saved[1] == len(self.optimizer.param_groups):
            (model, optimizer), _ = copy.deepcopy(self.saved)
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)

    def channels_last(self):
        self.model.to(memory_format=torch.channels_last)

    def tie(self):
        self.model.second.weight = self.model.first.weight

    def forget_gradients(self):
        for parameter in self.model.parameters():
            parameter.grad = None

    def nothing(self):
        pass

    CHANGES = (
        *(cast, cast_and_back, assigned, clamped, freeze, unfreeze, replace_layer),
        *(add_group, keep_state, load_state, channels_last, tie, other_memory),
        *(forget_gradients, nothing),
    )

    def run(self):
        for self.step in range(6):
            self.optimizer.zero_grad(set_to_none=self.random.random() < 0.7)
            self.backward()
            self.change()
            self.optimizer.step()
            self.change()
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def change(self):
        self.random.choice(self.CHANGES)(self)


@pytest.mark.parametrize("seeds", SEEDS)
def test_any_sequence_of_changes(seeds):
    cases = {
        str(seed): lambda seed=seed: Changing(seed, [hvd.rank()], is_alone=False).run()
        for seed in seeds
    }
    for name, results in run_cases(3, cases).items():
        alone = Changing(int(name), range(3), is_alone=True).run()
        for weights in results[1:]:
            for weight, first in zip(weights, results[0], strict=True):
                assert torch.equal(weight, first), name
        for weight, expected in zip(results[0], alone, strict=True):
            torch.testing.assert_close(
                weight, expected, rtol=1e-4, atol=1e-5, msg=f"seed {name}"
            )
