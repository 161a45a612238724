"""The models that every framework has, in Keras 3: the layers of ``models.py``."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ronde.bench.training.catalogue import ModelFacts
from ronde.bench.training.models import Inception, Residual, build
from ronde.bench.training.outcome import TrainOptions
from ronde.errors import UsageError
from ronde.session.frameworks import import_framework

Keras = Any  # modules and layers of Keras, which has no types
Model = Any
Maps = Any  # a symbolic tensor


def import_keras(options: TrainOptions) -> Keras:
    """Import Keras; raise a UsageError if its backend is not the one to measure."""
    keras = import_framework("keras")
    backend, wanted = keras.backend.backend(), options.framework
    if wanted in ("tensorflow", "jax") and backend != wanted:
        raise UsageError(
            f"KERAS_BACKEND must be {wanted} for --framework {wanted}, got {backend}. "
            f"Type: export KERAS_BACKEND={wanted}"
        )
    return keras


def seeded_model(keras: Keras, options: TrainOptions) -> Model:
    """Build a model with the same weights on all ranks."""
    random.seed(0)  # keras.utils.set_random_seed would import TensorFlow
    return build_keras(keras, options.model)


def build_keras(keras: Keras, facts: ModelFacts) -> Model:
    """Build a model with channels last, layer by layer as torch's."""
    channels, *sizes = facts.sample_shape
    inputs = keras.Input((*sizes, channels))
    with torch.device("meta"):
        model = build(facts.name)
    return keras.Model(inputs, _apply(keras.layers, model, inputs))


def _apply(layers: Keras, module: nn.Module, maps: Maps) -> Maps:
    """Apply the Keras layers that a torch module corresponds to."""
    match module:
        case nn.Sequential():
            for each in module:
                maps = _apply(layers, each, maps)
            return maps
        case Residual():
            parts = (module.body, module.shortcut)
            both = [_apply(layers, part, maps) for part in parts]
            return layers.ReLU()(layers.Add()(both))
        case Inception():
            branches = [_apply(layers, each, maps) for each in module.branches]
            return layers.Concatenate()(branches)
        case nn.Conv2d():
            return _convolve(layers, module, maps)
        case _:
            return _LAYERS[type(module)](layers, module)(maps)


def _convolve(layers: Keras, module: nn.Conv2d, maps: Maps) -> Maps:
    is_same = module.padding == tuple(each // 2 for each in module.kernel_size)
    if not is_same and module.padding != (0, 0):
        maps = layers.ZeroPadding2D(module.padding)(maps)
    return layers.Conv2D(
        module.out_channels,
        module.kernel_size,
        module.stride,
        padding="same" if is_same else "valid",
        use_bias=module.bias is not None,
    )(maps)


# The other layers by torch's class.
_LAYERS: Mapping[type[nn.Module], Callable[[Keras, Any], Keras]] = {
    nn.AdaptiveAvgPool2d: lambda layers, _: layers.GlobalAveragePooling2D(),
    nn.BatchNorm2d: lambda layers, m: layers.BatchNormalization(
        momentum=1 - m.momentum, epsilon=m.eps
    ),
    nn.Dropout: lambda layers, m: layers.Dropout(m.p),
    nn.Dropout2d: lambda layers, m: layers.SpatialDropout2D(m.p),
    nn.Flatten: lambda layers, _: layers.Flatten(),
    nn.Identity: lambda layers, _: layers.Identity(),
    nn.Linear: lambda layers, m: layers.Dense(m.out_features),
    nn.MaxPool2d: lambda layers, m: layers.MaxPooling2D(
        m.kernel_size, m.stride, "same" if m.ceil_mode or m.padding else "valid"
    ),
    nn.ReLU: lambda layers, _: layers.ReLU(),
}
