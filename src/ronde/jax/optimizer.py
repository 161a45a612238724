"""An optax optimizer that reduces gradients over the ranks before it uses them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ronde.jax.operations import Tree, allreduce
from ronde.jax.primitive import jax, jnp
from ronde.session.frameworks import import_framework
from ronde.session.operations import Average
from ronde.session.session import ProcessSet, global_process_set


class _Compression:
    """The formats for sending floating-point gradients; None sends them unchanged."""

    none = None
    fp16 = jnp.float16
    bf16 = jnp.bfloat16


Compression = _Compression
"""The formats, by Horovod's name."""


class AccumulatedState(NamedTuple):
    """The state of the wrapped optimizer, and gradients not yet reduced."""

    inner: Any
    num_passes: Any
    gradients: Any


def DistributedOptimizer(  # noqa: N802  Horovod's name
    tx: Any,
    *,
    op: int = Average,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
    backward_passes_per_step: int = 1,
) -> Any:
    """Return a gradient transformation that reduces all gradients in one call.

    With ``backward_passes_per_step`` k it sums the gradients of k updates, reduces the
    sum, and returns zero updates in between.
    """
    optax = import_framework("optax")
    tx = optax.with_extra_args_support(tx)

    def reduce(gradients: Tree) -> Tree:
        return _reduce(gradients, op, compression, process_set)

    def update(gradients: Tree, state: Any, params: Any = None, **extra: Any) -> Any:
        return tx.update(reduce(gradients), state, params, **extra)

    if backward_passes_per_step == 1:
        return optax.GradientTransformationExtraArgs(tx.init, update)

    def begin(params: Tree) -> AccumulatedState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AccumulatedState(tx.init(params), jnp.zeros((), jnp.int32), zeros)

    def accumulate(
        gradients: Tree, state: AccumulatedState, params: Any = None, **extra: Any
    ) -> Any:
        total = jax.tree.map(jnp.add, state.gradients, gradients)
        zeros = jax.tree.map(jnp.zeros_like, gradients)
        num_passes = state.num_passes + 1

        def step() -> Any:
            updates, inner = update(total, state.inner, params, **extra)
            return updates, AccumulatedState(inner, jnp.zeros_like(num_passes), zeros)

        def wait() -> Any:
            return zeros, AccumulatedState(state.inner, num_passes, total)

        return jax.lax.cond(num_passes == backward_passes_per_step, step, wait)

    return optax.GradientTransformationExtraArgs(begin, accumulate)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    op: int = Average,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Callable[..., Any]:
    """Return ``jax.value_and_grad(fun)`` with gradients reduced over the ranks."""
    differentiate = jax.value_and_grad(fun, argnums, has_aux)

    def reduced(*args: Any, **kwargs: Any) -> Any:
        value, gradients = differentiate(*args, **kwargs)
        return value, _reduce(gradients, op, compression, process_set)

    return reduced


def _reduce(
    gradients: Tree,
    op: int,
    dtype: Any,
    process_set: ProcessSet,
) -> Tree:
    def compress(gradient: Any) -> Any:
        is_float = jnp.issubdtype(gradient.dtype, jnp.floating)
        return gradient.astype(dtype) if dtype is not None and is_float else gradient

    sent = jax.tree.map(compress, gradients)
    received = allreduce(sent, op=op, process_set=process_set)

    def restore(new: Any, old: Any) -> Any:
        return new.astype(old.dtype)

    return jax.tree.map(restore, received, gradients)
