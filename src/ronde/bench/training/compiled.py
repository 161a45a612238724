"""Replicas of frameworks that compile a whole step into one function."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

import ronde.torch as hvd
from ronde.bench.training.keras_models import build_keras
from ronde.bench.training.outcome import Phase, TrainOptions
from ronde.bench.training.replica import Stopwatch, batches, digest_of
from ronde.errors import UsageError
from ronde.session.frameworks import import_framework

Array = Any  # of the framework


class Parts(NamedTuple):
    """Compiled parts of one model's step, and the way of a batch to the device."""

    forward: Callable[[Array, Array], Array]
    gradients: Callable[[Array, Array], Array]  # forward and backward
    to_device: Callable[[Any], Array] = lambda array: array
    wait: Callable[[Any], object] = lambda results: results


class CompiledReplica:
    """A model with its step compiled into one function; phases are differences.

    With a running clock a step is preceded by its parts: forward marks FORWARD, forward
    and backward mark BACKWARD, and the step marks UPDATE. ``split`` takes differences.
    """

    is_split_apart = True

    def __init__(
        self,
        options: TrainOptions,
        parts: Parts,
        step: Callable[[Array, Array], Array],
        weights: Callable[[], Iterable[Any]],
    ) -> None:
        is_image = len(options.model.sample_shape) == 3
        options = replace(options, framework="torch", is_channels_last=is_image)
        self._axes = (0, 2, 3, 1) if is_image else (0, 1)
        self._batches = batches(options, torch.device("cpu"), seed=hvd.rank())
        self._parts, self._step, self._weights = parts, step, weights
        self._results: Any = ()

    def step(self, clock: Stopwatch) -> None:
        forward, gradients, to_device, _ = self._parts
        clock.start()
        inputs, labels = next(self._batches)
        images, classes = inputs.permute(self._axes).numpy(), labels.numpy()
        clock.mark(Phase.INPUT)
        images, classes = self._results = to_device(images), to_device(classes)
        clock.mark(Phase.HOST_TO_DEVICE)
        if clock.is_running:
            self._results = forward(images, classes)
            clock.mark(Phase.FORWARD)
            self._results = gradients(images, classes)
            clock.mark(Phase.BACKWARD)
        self._results = self._step(images, classes)
        clock.mark(Phase.UPDATE)

    def synchronize(self) -> None:
        self._parts.wait(self._results)

    def digest(self) -> int:
        return digest_of(torch.from_numpy(np.array(each)) for each in self._weights())


def seeded_model(keras: Any, options: TrainOptions) -> Any:  # noqa: ANN401
    """Build a model with the same weights on all ranks."""
    random.seed(0)  # keras.utils.set_random_seed would import TensorFlow
    return build_keras(keras, options.model)


def keras_optimizer(keras: Any, options: TrainOptions) -> Any:  # noqa: ANN401
    if options.optimizer == "adam":
        return keras.optimizers.Adam(1e-4)
    return keras.optimizers.SGD(1e-3, momentum=0.9)


def import_keras(options: TrainOptions) -> Any:  # noqa: ANN401
    """Import Keras; raise a UsageError if its backend is not the one to measure."""
    keras = import_framework("keras")
    backend, wanted = keras.backend.backend(), options.framework
    if wanted in ("tensorflow", "jax") and backend != wanted:
        raise UsageError(
            f"KERAS_BACKEND must be {wanted} for --framework {wanted}, got {backend}. "
            f"Type: export KERAS_BACKEND={wanted}"
        )
    return keras


def front_end_of(options: TrainOptions) -> tuple[Any, Any]:
    """Return ronde's module for the framework, and the compression in it."""
    module: Any = import_module(f"ronde.{options.framework}")
    return module, getattr(module.Compression, options.compression)
