"""Replicas of TensorFlow, JAX and Keras, which compile a step into one function."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import ronde.torch as hvd
from ronde.bench.timing import Marks
from ronde.bench.training.keras_models import (
    Keras,
    Model,
    import_keras,
    seeded_model,
)
from ronde.bench.training.outcome import Framework, Phase, TrainOptions, Variant
from ronde.bench.training.replica import (
    Replica,
    ReplicaMaker,
    Stopwatch,
    batches,
    digest_of,
    free_address,
)
from ronde.bench.training.torch_replicas import torch_replicas
from ronde.session.frameworks import import_framework

Array = Any  # of a framework
Strategy = Any  # of TensorFlow
State = Sequence[Any]  # of JAX: weights, other variables, the optimizer's state


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
        step: Callable[[Array, Array], object],
        weights: Callable[[], Iterable[Any]],
    ) -> None:
        # JAX runs ahead of the device, also on a CPU.
        self.marks = None if options.framework == "jax" else Marks()
        self._axes = (0, 2, 3, 1) if options.model.is_of_maps else (0, 1)
        options = _of_torch(options)
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


def _of_torch(options: TrainOptions) -> TrainOptions:
    is_last = options.model.is_of_maps
    return replace(options, framework="torch", is_channels_last=is_last)


def _distributed(options: TrainOptions, name: str) -> Callable[[Any], Any]:
    """Return the class ``name`` of ronde's front end, with the compression to use."""
    module: Any = import_module(f"ronde.{options.framework}")
    compression = getattr(module.Compression, options.compression)
    return partial(getattr(module, name), compression=compression)


def _keras_optimizer(keras: Keras, options: TrainOptions) -> Keras:
    if options.optimizer == "adam":
        return keras.optimizers.Adam(1e-4)
    return keras.optimizers.SGD(1e-3, momentum=0.9)


def tensorflow_replicas(options: TrainOptions, _device: torch.device) -> ReplicaMaker:
    """Start TensorFlow with torch's number of threads, without GPUs."""
    keras, tf = import_keras(options), import_framework("tensorflow")
    tf.config.threading.set_intra_op_parallelism_threads(torch.get_num_threads())
    tf.config.set_visible_devices([], "GPU")
    strategy: Strategy = None
    if options.is_peered and hvd.size() > 1:
        strategy = _make_strategy(tf)  # before any other operation
    return nullcontext(partial(_tensorflow_replica, options, keras, strategy))


def _make_strategy(tf: Any) -> Strategy:  # noqa: ANN401  it has no types
    workers = hvd.allgather_object(free_address())
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": workers}),
        task_type="worker",
        task_id=hvd.rank(),
        rpc_layer="grpc",
    )
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)


def _tensorflow_replica(
    options: TrainOptions, keras: Keras, strategy: Strategy, variant: Variant
) -> Replica:
    is_peer = variant is Variant.PEER
    with strategy.scope() if is_peer else nullcontext():
        model = seeded_model(keras, options)
        optimizer = _keras_optimizer(keras, options)
        optimizer.build(model.trainable_variables)
    wrap = None
    if variant is Variant.ALL_RANKS:
        wrap = _distributed(options, "DistributedGradientTape")
    parts = _tensorflow_parts(keras, model, wrap)

    def train(*batch: Array) -> None:
        optimizer.apply(parts.gradients(*batch), model.trainable_variables)

    def train_on_all(*batch: Array) -> None:
        strategy.run(train, args=batch)

    compiled = import_framework("tensorflow").function(
        train_on_all if is_peer else train, autograph=False
    )
    return CompiledReplica(options, parts, compiled, lambda: model.trainable_variables)


def _tensorflow_parts(
    keras: Keras, model: Model, wrap: Callable[[Any], Any] | None = None
) -> Parts:
    """Compile the parts of a step, which leave the trained weights as they are."""
    tf = import_framework("tensorflow")
    crossentropy = keras.losses.sparse_categorical_crossentropy

    def forward(images: Array, labels: Array) -> Array:
        logits = model(images, training=True)
        return tf.reduce_mean(crossentropy(labels, logits, from_logits=True))

    def gradients(images: Array, labels: Array) -> Array:
        with tf.GradientTape() as tape:
            loss = forward(images, labels)
        weights = [each.value for each in model.trainable_variables]
        return (wrap(tape) if wrap else tape).gradient(loss, weights)

    compiled = [tf.function(each, autograph=False) for each in (forward, gradients)]
    return Parts(compiled[0], compiled[1], tf.convert_to_tensor)


@contextmanager
def jax_replicas(
    options: TrainOptions, _device: torch.device
) -> Generator[Callable[[Variant], Replica]]:
    jax, is_distributed = import_framework("jax"), options.is_peered and hvd.size() > 1
    jax.config.update("jax_platforms", "cpu")
    if is_distributed:
        # Before the first operation.
        import_module("ronde.jax.launch").initialize_distributed()
    try:
        yield partial(_jax_replica, options)
    finally:
        if is_distributed:
            jax.distributed.shutdown()


def _jax_replica(options: TrainOptions, variant: Variant) -> Replica:
    jax, optax = import_framework("jax"), import_framework("optax")
    model = seeded_model(import_keras(options), options)
    is_adam, is_peer = options.optimizer == "adam", variant is Variant.PEER
    optimizer = optax.adam(1e-4) if is_adam else optax.sgd(1e-3, momentum=0.9)
    jit = jax.jit
    if variant is Variant.ALL_RANKS:
        optimizer = _distributed(options, "DistributedOptimizer")(optimizer)
        jit = import_module("ronde.jax").jit
    weights, others = _jax_variables(model)
    state: State = (weights, others, optimizer.init(weights))
    differentiate = jax.value_and_grad(_jax_loss(model), has_aux=True)

    def train(state: State, images: Array, labels: Array) -> tuple[State, Array]:
        weights, others, moments = state
        (loss, others), gradients = differentiate(weights, others, images, labels)
        gradients = jax.lax.pmean(gradients, "ranks") if is_peer else gradients
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), others, moments), loss

    parts = _jax_parts(model, lambda: state[:2])
    if is_peer:
        train, state, to_device = _spread(train, state)
        parts = parts._replace(to_device=to_device)
    compiled = jit(train, donate_argnums=0)

    def step(images: Array, labels: Array) -> Array:
        nonlocal state
        state, loss = compiled(state, images, labels)
        return loss

    def own_weights() -> list[Array]:
        return [each.addressable_data(0) for each in state[0]]

    return CompiledReplica(options, parts, step, own_weights)


def _spread(
    train: Callable[..., Any], state: State
) -> tuple[Callable[..., Any], State, Callable[[Any], Array]]:
    """Return a step, its state and the way of a batch to it, on all ranks' devices."""
    jax = import_framework("jax")
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((hvd.size(),), ("ranks",))
    whole, divided = (jax.NamedSharding(mesh, s) for s in (spec(), spec("ranks")))
    spread = jax.make_array_from_process_local_data
    step = jax.shard_map(
        train,
        mesh=mesh,
        in_specs=(spec(), spec("ranks"), spec("ranks")),
        out_specs=spec(),
        check_vma=False,  # moving averages differ between ranks
    )
    return step, jax.tree.map(partial(spread, whole), state), partial(spread, divided)


def _jax_variables(model: Model) -> list[list[Array]]:
    kinds = (model.trainable_variables, model.non_trainable_variables)
    return [[each.value for each in kind] for kind in kinds]


def _jax_loss(model: Model) -> Callable[..., Array]:
    optax = import_framework("optax")

    def loss_of(
        weights: Array, others: Array, images: Array, labels: Array
    ) -> tuple[Array, Array]:
        logits, others = model.stateless_call(weights, others, images, training=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), others

    return loss_of


def _jax_parts(model: Model, variables: Callable[[], Any]) -> Parts:
    jax, loss_of = import_framework("jax"), _jax_loss(model)

    def compiled(function: Callable[..., Array]) -> Callable[[Array, Array], Array]:
        function = jax.jit(function)
        return lambda images, labels: function(*variables(), images, labels)

    gradients = jax.value_and_grad(loss_of, has_aux=True)
    ways = (jax.device_put, jax.block_until_ready)
    return Parts(compiled(loss_of), compiled(gradients), *ways)


@contextmanager
def keras_replicas(
    options: TrainOptions, device: torch.device
) -> Generator[Callable[[Variant], Replica]]:
    """Make replicas of Keras' trainer, and of the backend's own loop as peers."""
    keras = import_keras(options)
    backend: Framework = keras.backend.backend()
    bare_makers: Mapping[Framework, Callable[..., ReplicaMaker]] = {
        "tensorflow": tensorflow_replicas,
        "jax": jax_replicas,
        "torch": partial(
            torch_replicas,
            build_model=lambda: KerasModule(seeded_model(keras, options)),
        ),
    }
    bare_options = replace(options, framework=backend)
    if backend == "torch":
        bare_options = _of_torch(options)
    with bare_makers[backend](bare_options, device) as make_bare:
        bare_variants = {Variant.BARE: Variant.ALL_RANKS, Variant.PEER: Variant.PEER}
        yield (
            lambda variant: (
                make_bare(bare_variants[variant])
                if variant in bare_variants
                else _keras_replica(options, keras, variant)
            )
        )


class KerasModule(nn.Module):
    """A Keras model on torch that takes images with channels first."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images.permute(0, 2, 3, 1) if images.ndim == 4 else images
        return self.model(images, training=True)


def _keras_replica(options: TrainOptions, keras: Keras, variant: Variant) -> Replica:
    model, optimizer = seeded_model(keras, options), _keras_optimizer(keras, options)
    if variant is Variant.ALL_RANKS:
        optimizer = _distributed(options, "DistributedOptimizer")(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    parts = {
        "tensorflow": lambda: _tensorflow_parts(keras, model),
        "jax": lambda: _jax_parts(model, partial(_jax_variables, model)),
        "torch": lambda: _torch_parts(model, loss),
    }[keras.backend.backend()]()
    weights = partial(getattr, model, "trainable_variables")
    return CompiledReplica(options, parts, model.train_on_batch, weights)


def _torch_parts(model: Model, loss: Callable[..., torch.Tensor]) -> Parts:
    def forward(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss(labels, model(images, training=True))

    def gradients(images: torch.Tensor, labels: torch.Tensor) -> None:
        forward(images, labels).backward()
        model.zero_grad()

    return Parts(forward, gradients, torch.from_numpy)
