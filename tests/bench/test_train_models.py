"""The catalogue's models are the ones that were published."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ronde.bench import (
    CHARACTERS,
    MODELS,
    PaddedShortcut,
    Transformer,
    build,
    loss_of,
    make_samples,
)

# torchvision rounds to a million multiply-adds; the other figures are sums and exact.
ROUNDED = {"resnet50"}
HALF_OF_LAST_DIGIT = 500_000


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def build_on_meta(name):
    """Build with shapes and no data, and one sample to go with it."""
    with torch.device("meta"):
        return build(name), make_samples(MODELS[name], 1)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_published(name):
    model, _ = build_on_meta(name)
    assert num_parameters(model) == MODELS[name].num_parameters


@pytest.mark.parametrize("name", MODELS)
def test_multiply_adds_are_those_published(name):
    model, (inputs, _) = build_on_meta(name)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(inputs)
    counted_macs = counter.get_total_flops() // 2
    tolerance = HALF_OF_LAST_DIGIT if name in ROUNDED else 0
    assert abs(counted_macs - MODELS[name].forward_macs) <= tolerance


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_trained(name):
    model, (inputs, labels) = build_on_meta(name)
    loss_of(model(inputs), labels).backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())


def test_the_shortcut_without_weights_keeps_every_second_pixel():
    maps = torch.arange(32.0).reshape(1, 2, 4, 4)
    short = PaddedShortcut(3)(maps)
    assert short.shape == (1, 5, 2, 2)
    assert torch.equal(short[:, :2], maps[:, :, ::2, ::2])
    assert not short[:, 2:].any()


def test_a_token_does_not_see_what_follows_it():
    torch.manual_seed(0)
    model = Transformer(CHARACTERS)
    tokens = torch.randint(CHARACTERS.num_words, (2, CHARACTERS.context))
    changed = tokens.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % CHARACTERS.num_words
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])
