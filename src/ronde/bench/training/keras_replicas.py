"""Replicas of Keras 3: its trainer with ``ronde.keras``, on any backend."""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ronde.bench.training.compiled import (
    CompiledReplica,
    Parts,
    front_end_of,
    import_keras,
    keras_optimizer,
    seeded_model,
)
from ronde.bench.training.jax_replicas import jax_parts, jax_replicas
from ronde.bench.training.outcome import TrainOptions, Variant
from ronde.bench.training.replica import Replica, ReplicaMaker
from ronde.bench.training.tensorflow_replicas import (
    start_tensorflow,
    tensorflow_parts,
    tensorflow_replicas,
)
from ronde.errors import UsageError


@contextmanager
def keras_replicas(
    options: TrainOptions, device: torch.device
) -> Generator[Callable[[Variant], Replica]]:
    keras = import_keras(options)
    backend: str = keras.backend.backend()
    if backend == "tensorflow":
        start_tensorflow()
    # Keras' trainer does not work under a strategy of several processes: its backend's
    # own loop takes its place.
    peers: ReplicaMaker = nullcontext(_refuse_peer)
    if options.is_peered and backend == "tensorflow":
        peers = tensorflow_replicas(options, device)
    elif options.is_peered and backend == "jax":
        peers = jax_replicas(options, device)
    elif options.is_peered:
        _refuse_peer()
    with peers as make_peer:
        yield (
            lambda variant: (
                make_peer(variant)
                if variant is Variant.PEER
                else _make_replica(options, keras, variant)
            )
        )


def _refuse_peer(_variant: object = None) -> Replica:
    raise UsageError(
        "KERAS_BACKEND must be tensorflow or jax for --peer, got torch. "
        "Leave --peer out."
    )


def _make_replica(options: TrainOptions, keras: Any, variant: Variant) -> Replica:  # noqa: ANN401
    model, optimizer = seeded_model(keras, options), keras_optimizer(keras, options)
    if variant is Variant.ALL_RANKS:
        front_end, compression = front_end_of(options)
        optimizer = front_end.DistributedOptimizer(optimizer, compression=compression)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    parts = {
        "tensorflow": lambda: tensorflow_parts(keras, model),
        "jax": lambda: jax_parts(model),
        "torch": lambda: _torch_parts(model, loss),
    }[keras.backend.backend()]()

    def weights() -> list[Any]:
        return [
            keras.ops.convert_to_numpy(each.value) for each in model.trainable_variables
        ]

    return CompiledReplica(options, parts, model.train_on_batch, weights)


def _torch_parts(model: Any, loss: Any) -> Parts:  # noqa: ANN401
    def forward(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss(labels, model(images, training=True))

    def gradients(images: torch.Tensor, labels: torch.Tensor) -> None:
        forward(images, labels).backward()
        model.zero_grad()

    return Parts(forward, gradients, torch.from_numpy)
