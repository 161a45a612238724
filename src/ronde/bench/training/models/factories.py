"""From a model's name to the model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from torch import nn

from ronde.bench.training.catalogue import (
    CHARACTERS,
    GPT2_SMALL,
    MODELS,
    TransformerShape,
)
from ronde.bench.training.models.alexnet import AlexNet
from ronde.bench.training.models.googlenet import GoogLeNet
from ronde.bench.training.models.resnet import (
    make_resnet18,
    make_resnet20,
    make_resnet50,
)
from ronde.bench.training.models.small import Cnn, LeNet5, Mlp, MnistCnn
from ronde.bench.training.models.transformer import Transformer


def build(name: str) -> nn.Module:
    """Make a model of the catalogue, in training mode, with random weights.

    Args:
        name: A key of ``MODELS``.
    """
    return FACTORIES[name](MODELS[name].num_classes)


def _transformer(shape: TransformerShape) -> Callable[[int], nn.Module]:
    def make(num_words: int) -> nn.Module:
        return Transformer(replace(shape, num_words=num_words))

    return make


FACTORIES: Mapping[str, Callable[[int], nn.Module]] = MappingProxyType(
    {
        "alexnet": AlexNet,
        "cnn": Cnn,
        "googlenet": GoogLeNet,
        "gpt2": _transformer(GPT2_SMALL),
        "lenet5": LeNet5,
        "mlp": Mlp,
        "mnist_cnn": MnistCnn,
        "resnet18": make_resnet18,
        "resnet20": make_resnet20,
        "resnet50": make_resnet50,
        "transformer": _transformer(CHARACTERS),
    }
)
"""Makes a model for so many classes, by name."""
