"""The models that every framework has, built from Keras 3 layers.

They have the layers, sizes and parameters of ``models.py``, with channels last.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ronde.bench.training.catalogue import INCEPTIONS, POOLED_AFTER, ModelFacts

Layers = Any  # ``keras.layers``
Maps = Any  # a symbolic tensor of Keras


def build_keras(keras: Any, facts: ModelFacts) -> Any:  # noqa: ANN401  Keras has no types
    channels, *sizes = facts.sample_shape
    inputs = keras.Input((*sizes, channels))
    outputs = KERAS_FACTORIES[facts.name](keras.layers, inputs, facts.num_classes)
    return keras.Model(inputs, outputs)


def _alexnet(layers: Layers, maps: Maps, num_classes: int) -> Maps:
    maps = layers.ZeroPadding2D(2)(maps)
    maps = layers.Conv2D(64, 11, 4, activation="relu")(maps)
    maps = layers.MaxPooling2D(3, 2)(maps)
    maps = layers.Conv2D(192, 5, padding="same", activation="relu")(maps)
    maps = layers.MaxPooling2D(3, 2)(maps)
    for width in (384, 256, 256):
        maps = layers.Conv2D(width, 3, padding="same", activation="relu")(maps)
    features = layers.Flatten()(layers.MaxPooling2D(3, 2)(maps))
    for _ in range(2):
        features = layers.Dropout(0.5)(features)
        features = layers.Dense(4096, activation="relu")(features)
    return layers.Dense(num_classes)(features)


def _googlenet(layers: Layers, maps: Maps, num_classes: int) -> Maps:
    maps = _rectified(layers, maps, 64, 7, 2)
    maps = layers.MaxPooling2D(3, 2, padding="same")(maps)
    maps = _rectified(layers, _rectified(layers, maps, 64, 1), 192, 3)
    maps = layers.MaxPooling2D(3, 2, padding="same")(maps)
    for number, widths in enumerate(INCEPTIONS, 1):
        maps = _inception(layers, maps, widths)
        if window := POOLED_AFTER.get(number):
            maps = layers.MaxPooling2D(window, 2, padding="same")(maps)
    features = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(maps))
    return layers.Dense(num_classes)(features)


def _inception(layers: Layers, maps: Maps, widths: Sequence[int]) -> Maps:
    one, narrow, three, narrower, fourth, pooled = widths
    branches = [
        _rectified(layers, maps, one, 1),
        _rectified(layers, _rectified(layers, maps, narrow, 1), three, 3),
        _rectified(layers, _rectified(layers, maps, narrower, 1), fourth, 3),
    ]
    maps = layers.MaxPooling2D(3, 1, padding="same")(maps)
    return layers.Concatenate()([*branches, _rectified(layers, maps, pooled, 1)])


def _resnet50(layers: Layers, maps: Maps, num_classes: int) -> Maps:
    maps = _rectified(layers, maps, 64, 7, 2)
    maps = layers.MaxPooling2D(3, 2, padding="same")(maps)
    for number, (width, depth) in enumerate([(256, 3), (512, 4), (1024, 6), (2048, 3)]):
        for block in range(depth):
            stride, narrow = 2 if number and not block else 1, width // 4
            body = _rectified(layers, maps, narrow, 1)
            body = _rectified(layers, body, narrow, 3, stride)
            body = _convolution(layers, body, width, 1)
            if not block:
                maps = _convolution(layers, maps, width, 1, stride)
            maps = layers.ReLU()(layers.Add()([body, maps]))
    return layers.Dense(num_classes)(layers.GlobalAveragePooling2D()(maps))


def _rectified(
    layers: Layers, maps: Maps, width: int, kernel: int, stride: int = 1
) -> Maps:
    return layers.ReLU()(_convolution(layers, maps, width, kernel, stride))


def _convolution(
    layers: Layers, maps: Maps, width: int, kernel: int, stride: int = 1
) -> Maps:
    form = layers.Conv2D(width, kernel, stride, padding="same", use_bias=False)
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(form(maps))


def _mnist_cnn(layers: Layers, maps: Maps, num_classes: int) -> Maps:
    maps = layers.Conv2D(10, 5)(maps)
    maps = layers.ReLU()(layers.MaxPooling2D(2)(maps))
    maps = layers.SpatialDropout2D(0.5)(layers.Conv2D(20, 5)(maps))
    maps = layers.ReLU()(layers.MaxPooling2D(2)(maps))
    features = layers.Dense(50, activation="relu")(layers.Flatten()(maps))
    return layers.Dense(num_classes)(layers.Dropout(0.5)(features))


def _mlp(layers: Layers, features: Maps, num_classes: int) -> Maps:
    features = layers.Dense(4096, activation="relu")(features)
    features = layers.Dense(3072, activation="relu")(features)
    return layers.Dense(num_classes)(features)


# Builders by model name, as in ``models.FACTORIES``.
KERAS_FACTORIES: Mapping[str, Callable[[Layers, Maps, int], Maps]] = {
    "alexnet": _alexnet,
    "googlenet": _googlenet,
    "mlp": _mlp,
    "mnist_cnn": _mnist_cnn,
    "resnet50": _resnet50,
}
