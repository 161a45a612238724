"""Replicas of JAX: ``ronde.jax`` and JAX's own ``psum`` on Gloo."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
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
    seeded_model,
)
from ronde.bench.training.outcome import TrainOptions, Variant
from ronde.bench.training.replica import Replica, free_address
from ronde.session.frameworks import import_framework

State = Sequence[Any]  # trained weights, other variables, the optimizer's state


@contextmanager
def jax_replicas(
    options: TrainOptions, _device: torch.device
) -> Generator[Callable[[Variant], Replica]]:
    jax, is_distributed = import_framework("jax"), options.is_peered and hvd.size() > 1
    jax.config.update("jax_platforms", "cpu")
    if is_distributed:
        address = hvd.broadcast_object(free_address())  # before the first operation
        jax.distributed.initialize(address, hvd.size(), hvd.rank())
    try:
        yield partial(_make_replica, options)
    finally:
        if is_distributed:
            jax.distributed.shutdown()


def _make_replica(options: TrainOptions, variant: Variant) -> Replica:
    jax, optax = import_framework("jax"), import_framework("optax")
    model = seeded_model(import_keras(options), options)
    is_adam = options.optimizer == "adam"
    optimizer = optax.adam(1e-4) if is_adam else optax.sgd(1e-3, momentum=0.9)
    if variant is Variant.ALL_RANKS:
        front_end, compression = front_end_of(options)
        optimizer = front_end.DistributedOptimizer(optimizer, compression=compression)
    loss_of = _make_loss(model)

    def train(state: State, images: Array, labels: Array) -> tuple[State, Array]:
        weights, others, moments = state
        differentiate = jax.value_and_grad(loss_of, has_aux=True)
        (loss, others), gradients = differentiate(weights, others, images, labels)
        if variant is Variant.PEER:
            gradients = jax.lax.pmean(gradients, "ranks")
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), others, moments), loss

    weights, others = _variables(model)
    state: State = (weights, others, optimizer.init(weights))
    parts = jax_parts(model, lambda: state[:2])
    if variant is Variant.PEER:
        train, state, to_device = _spread(train, state)
        parts = parts._replace(to_device=to_device)
    compiled = jax.jit(train, donate_argnums=0)

    def step(images: Array, labels: Array) -> Array:
        nonlocal state
        state, loss = compiled(state, images, labels)
        return loss

    def own_weights() -> list[Any]:
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


def _variables(model: Any) -> tuple[list[Any], list[Any]]:  # noqa: ANN401
    """Copy a model's variables, as steps donate theirs."""
    jax = import_framework("jax")
    kinds = (model.trainable_variables, model.non_trainable_variables)
    weights, others = ([jax.numpy.array(each.value) for each in kind] for kind in kinds)
    return weights, others


def _make_loss(model: Any) -> Callable[..., Any]:  # noqa: ANN401
    optax = import_framework("optax")

    def loss_of(
        weights: Sequence[Array], others: Sequence[Array], images: Array, labels: Array
    ) -> tuple[Array, Sequence[Array]]:
        logits, others = model.stateless_call(weights, others, images, training=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), others

    return loss_of


def jax_parts(model: Any, variables: Callable[[], Any] | None = None) -> Parts:  # noqa: ANN401
    """Compile the parts of a step, for the model's own variables or the given ones."""
    jax = import_framework("jax")
    loss_of = _make_loss(model)
    forward = jax.jit(loss_of)
    gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    current = variables or partial(_variables, model)

    def over(compiled: Any) -> Callable[[Array, Array], Array]:  # noqa: ANN401
        return lambda images, labels: compiled(*current(), images, labels)

    ways = (jax.device_put, jax.block_until_ready)
    return Parts(over(forward), over(gradients), *ways)
