"""Replicas of TensorFlow: ``ronde.tensorflow`` and MultiWorkerMirroredStrategy."""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

import ronde.torch as hvd
from ronde.bench.training.compiled import (
    Array,
    CompiledReplica,
    Parts,
    front_end_of,
    import_keras,
    keras_optimizer,
    seeded_model,
)
from ronde.bench.training.outcome import TrainOptions, Variant
from ronde.bench.training.replica import Replica, free_address
from ronde.session.frameworks import import_framework


@contextmanager
def tensorflow_replicas(
    options: TrainOptions, _device: torch.device
) -> Generator[Callable[[Variant], Replica]]:
    keras, tf = import_keras(options), start_tensorflow()
    strategy: Any = None
    if options.is_peered and hvd.size() > 1:
        strategy = _make_strategy(tf)  # before any other operation

    def make(variant: Variant) -> Replica:
        is_peer = variant is Variant.PEER
        with strategy.scope() if is_peer else nullcontext():
            model = seeded_model(keras, options)
            optimizer = keras_optimizer(keras, options)
            optimizer.build(model.trainable_variables)
        loss_of = _make_loss(keras, tf, model)
        wrap: Callable[[Any], Any] | None = None
        if variant is Variant.ALL_RANKS:
            front_end, compression = front_end_of(options)
            wrap = partial(front_end.DistributedGradientTape, compression=compression)

        def train(images: Array, labels: Array) -> Array:
            with tf.GradientTape() as tape:
                loss = loss_of(images, labels)
            tape = wrap(tape) if wrap else tape
            weights = [each.value for each in model.trainable_variables]
            gradients = tape.gradient(loss, weights)
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        def train_on_all(*batch: Array) -> Array:
            return strategy.run(train, args=batch)

        step = tf.function(train_on_all if is_peer else train, autograph=False)
        parts = tensorflow_parts(keras, model)
        return CompiledReplica(options, parts, step, lambda: model.trainable_variables)

    yield make


def start_tensorflow() -> Any:  # noqa: ANN401  it has no types
    """Import TensorFlow; it shall use torch's number of threads and no GPUs."""
    tf = import_framework("tensorflow")
    tf.config.threading.set_intra_op_parallelism_threads(torch.get_num_threads())
    tf.config.set_visible_devices([], "GPU")
    return tf


def _make_strategy(tf: Any) -> Any:  # noqa: ANN401
    workers = hvd.allgather_object(free_address())
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": workers}),
        task_type="worker",
        task_id=hvd.rank(),
        rpc_layer="grpc",
    )
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)


def tensorflow_parts(keras: Any, model: Any) -> Parts:  # noqa: ANN401
    """Compile the parts of a step, which leave the trained weights as they are."""
    tf = import_framework("tensorflow")
    loss_of = _make_loss(keras, tf, model)

    def gradients(images: Array, labels: Array) -> Array:
        with tf.GradientTape() as tape:
            loss = loss_of(images, labels)
        return tape.gradient(loss, [each.value for each in model.trainable_variables])

    compiled = [tf.function(each, autograph=False) for each in (loss_of, gradients)]
    return Parts(compiled[0], compiled[1], tf.convert_to_tensor)


def _make_loss(keras: Any, tf: Any, model: Any) -> Callable[[Array, Array], Array]:  # noqa: ANN401
    crossentropy = keras.losses.sparse_categorical_crossentropy

    def loss_of(images: Array, labels: Array) -> Array:
        logits = model(images, training=True)
        return tf.reduce_mean(crossentropy(labels, logits, from_logits=True))

    return loss_of
