"""A rank of the tests of ``ronde.jax``; it exits with non-zero if a check fails."""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ronde.jax as hvd
from ronde.jax import ffi

DTYPES = "uint8 int8 int32 float16 bfloat16 float32 complex64"
NUM_STEPS = 20


def check(given: object, wanted: object) -> None:
    np.testing.assert_array_equal(np.asarray(given), np.asarray(wanted))


def values() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = sum(range(1, size + 1))
    for name in DTYPES.split():
        x = jnp.full((3, 2), rank + 1).astype(name)
        for run in (lambda x: x, jax.jit):
            reduce = run(lambda x: hvd.allreduce(x, op=hvd.Sum))
            assert reduce(x).dtype == x.dtype
            check(reduce(x), jnp.full((3, 2), total).astype(name))
            check(x, jnp.full((3, 2), rank + 1).astype(name))
            gathered = run(hvd.allgather)(x)
            assert gathered.shape == (3 * size, 2)
            check(gathered[3 * (size - 1)], jnp.full(2, size).astype(name))
            check(run(lambda x: hvd.broadcast(x, size - 1))(x), gathered[-3:])
    for run in (lambda x: x, jax.jit):
        is_any = run(lambda x: hvd.allreduce(x, op=hvd.Max))(jnp.array([rank == 0]))
        check(is_any, [True])
        check(run(hvd.allgather)(jnp.float32(rank)), np.arange(size))
        rows = jnp.arange(size * 2.0).reshape(size, 2) + rank
        check(run(hvd.reducescatter)(rows), [[2 * rank + mean(), 2 * rank + 1 + mean()]])
        check(run(hvd.alltoall)(rows)[:, 0], 2 * rank + np.arange(size))
        empty = run(lambda x: hvd.allreduce(x))(jnp.zeros((0, 2)))
        assert empty.shape == (0, 2)
        tree = {"a": jnp.ones(2) * rank, "b": [jnp.int32(rank)]}
        summed = run(lambda x: hvd.grouped_allreduce(x, op=hvd.Sum))(tree)
        check(summed["a"], [total - size] * 2)
        check(summed["b"][0], total - size)
    ragged = hvd.allgather(jnp.ones((rank + 1, 2)))
    assert ragged.shape == (total, 2)
    received, counts = hvd.alltoall(jnp.ones(size), splits=[1] * size)
    check(counts, [1] * size)
    assert received.shape == (size,)
    assert hvd.broadcast_object({"rank": rank}, 0) == {"rank": 0}
    assert hvd.allgather_object(rank) == list(range(size))


def mean() -> float:
    return (hvd.size() - 1) / 2


def memory() -> None:
    reduce = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum), donate_argnums=0)
    x = jnp.ones(1 << 16)
    address = x.unsafe_buffer_pointer()
    result = reduce(x)
    assert result.unsafe_buffer_pointer() == address
    check(result[:2], [hvd.size()] * 2)


def transformations() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = sum(range(1, size + 1))

    def loss(x: jax.Array) -> jax.Array:
        return (hvd.allreduce(x, op=hvd.Sum) ** 2).sum() * (rank + 1)

    x = jnp.arange(3.0)
    for run in (lambda x: x, jax.jit):
        check(run(jax.grad(loss))(x), 2 * size * total * x)
        value, tangent = run(lambda x: jax.jvp(loss, (x,), (jnp.ones(3),)))(x)
        check(tangent, 2 * size * size * x.sum() * (rank + 1))
        check(value, (size * x * size * x).sum() * (rank + 1))
        second = run(jax.grad(lambda x: jax.grad(loss)(x).sum()))(x)
        assert second.shape == (3,)
        batch = jnp.arange(6.0).reshape(2, 3)
        check(run(jax.vmap(hvd.allreduce, 1, 1))(batch), batch)
        gathered = run(jax.vmap(hvd.allgather, 1, 1))(batch)
        check(gathered, jnp.concatenate([batch] * size))
        rows = jnp.arange(4.0 * size).reshape(2 * size, 2)
        scattered = run(jax.vmap(hvd.reducescatter, 1, 1))(rows)
        check(scattered, rows[2 * rank : 2 * rank + 2])
        gradient = run(jax.grad(lambda x: hvd.allgather(x).sum() * (rank + 1)))(rows)
        check(gradient, jnp.full(rows.shape, 1 + mean()))
        gradient = run(jax.grad(lambda x: hvd.reducescatter(x).sum() * (rank + 1)))
        owner = jnp.repeat(jnp.arange(size), 2)[:, None] + 1.0
        check(gradient(rows), owner * jnp.ones(rows.shape))

    @jax.jit
    def loops(x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, _: object) -> tuple[jax.Array, jax.Array]:
            carry = hvd.allreduce(carry, op=hvd.Sum)
            return carry, carry

        carry, _ = jax.lax.scan(body, x, length=3)
        return jax.lax.cond(x[1] > 0, hvd.allreduce, lambda x: x, carry)

    check(loops(x), x * size**3)

    def scanned(x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, _: object) -> tuple[jax.Array, None]:
            return hvd.allreduce(carry, op=hvd.Sum) * 2, None

        return jax.lax.scan(body, x, length=2)[0].sum()

    check(jax.jit(jax.grad(scanned))(x), [4.0 * size**2] * 3)
    free = jax.checkpoint(
        lambda x: (hvd.allreduce(x, op=hvd.Sum, effect=False) ** 2).sum()
    )
    check(jax.jit(jax.grad(free))(x), 2 * size * size * x)


def names() -> None:
    """Ranks that compile a function a different number of times still match."""
    step = jax.jit(lambda x: hvd.allreduce(hvd.allreduce(x) + 1))
    if hvd.rank() == 0:
        for length in (1, 2, 3):
            step.lower(jnp.ones(length))
    check(step(jnp.ones(4)), [2.0] * 4)
    named = jax.jit(lambda x: hvd.allreduce(x, name="mine"))
    check(named(jnp.ones(4)), [1.0] * 4)


def mistakes() -> None:
    ragged = jax.jit(hvd.allgather)
    if hvd.size() > 1:
        fails(
            "equal shapes on all ranks", lambda: ragged(jnp.ones((hvd.rank() + 1, 2)))
        )
    fails("must be a multiple of", lambda: jax.jit(hvd.alltoall)(jnp.ones(7)))
    small = jnp.ones(2, jnp.float8_e4m3fn)
    fails("8-bit floats", lambda: jax.jit(hvd.allreduce)(small))


def fails(text: str, call: Callable[[], jax.Array]) -> None:
    try:
        call().block_until_ready()
    except Exception as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)


def training() -> None:
    rank, size = hvd.rank(), hvd.size()
    keys = jax.random.split(jax.random.key(rank), 2)
    params = {
        "hidden": jax.random.normal(keys[0], (4, 8)),
        "out": jax.random.normal(keys[1], (8, 1)),
    }
    params = hvd.broadcast_parameters(params, 0)
    for options in ({}, {"compression": hvd.Compression.bf16}):
        train(params, options)
    data = jax.random.normal(jax.random.key(rank + 10), (16, 4))
    value, gradient = jax.jit(hvd.value_and_grad(loss_of))(params, data)
    gradients = hvd.allgather(gradient["out"][None])
    check(gradients, np.repeat(gradients[:1], size, 0))
    assert value.shape == ()
    accumulating = hvd.DistributedOptimizer(
        optax.sgd(1.0), op=hvd.Sum, backward_passes_per_step=2
    )
    state = accumulating.init(jnp.ones(2))
    update = jax.jit(accumulating.update)
    for wanted in (0, -2 * size, 0, -2 * size):
        updates, state = update(jnp.ones(2), state)
        check(updates, [wanted] * 2)


def loss_of(params: dict[str, jax.Array], data: jax.Array) -> jax.Array:
    return ((jnp.tanh(data @ params["hidden"]) @ params["out"] - 1) ** 2).mean()


def train(params: dict[str, jax.Array], options: dict[str, object]) -> None:
    optimizer = hvd.DistributedOptimizer(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), **options
    )

    @jax.jit
    def step(params, state, data):  # noqa: ANN001, ANN202
        gradients = jax.grad(loss_of)(params, data)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    key, start = jax.random.key(hvd.rank()), params
    for i in range(NUM_STEPS):
        data = jax.random.normal(jax.random.fold_in(key, i), (16, 4))
        params, state = step(params, state, data)
    for name, leaf in params.items():
        assert not (leaf == start[name]).all()
        every = hvd.allgather(leaf[None])
        check(every, np.repeat(every[:1], hvd.size(), 0))


def main() -> None:
    if "fallback" in sys.argv:
        ffi.API_MAJOR = 99  # as if this XLA were of another time
    hvd.init()
    assert ffi.is_usable() is ("fallback" not in sys.argv)
    for part in (values, transformations, names, training):
        part()
    if "fallback" not in sys.argv:
        memory()
        mistakes()
    # Dispatched, but never waited for.
    jax.jit(hvd.allreduce)(jnp.ones(1 << 20))


main()
