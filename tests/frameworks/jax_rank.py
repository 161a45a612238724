"""A rank of the tests of ``ronde.jax``; it exits with non-zero if a check fails."""

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ronde.jax as hvd
from ronde.jax import ffi

Tree = Any
DTYPES = "uint8 int8 int32 float16 bfloat16 float32 complex64"
NUM_STEPS = 20


def check(given: object, wanted: object) -> None:
    np.testing.assert_array_equal(np.asarray(given), np.asarray(wanted))


def values() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = sum(range(1, size + 1))
    tree = {name: np.full((3, 2), rank + 1).astype(name) for name in DTYPES.split()}
    tree = jax.tree.map(jnp.asarray, tree)

    def move(tree: Tree) -> Tree:
        return hvd.allgather(tree), hvd.broadcast(tree, size - 1)

    def exchange(rows: jax.Array) -> Tree:
        flag, scalar = jnp.array([rank == 0]), jnp.float32(rank)
        empty = hvd.allreduce(jnp.zeros((0, 2)))
        found = hvd.allreduce(flag, op=hvd.Max), hvd.allgather(scalar), empty
        return *found, hvd.reducescatter(rows), hvd.alltoall(rows)

    for run in (lambda x: x, jax.jit):
        reduced = run(lambda x: hvd.grouped_allreduce(x, op=hvd.Sum))(tree)
        gathered, copied = run(move)(tree)
        for name, x in tree.items():
            assert reduced[name].dtype == gathered[name].dtype == x.dtype
            check(reduced[name], np.full((3, 2), total))
            check(x, np.full((3, 2), rank + 1))
            check(gathered[name][:, 0], np.repeat(np.arange(size) + 1, 3))
            check(copied[name], np.full((3, 2), size))
        rows = jnp.asarray(np.arange(size * 2.0, dtype="f").reshape(size, 2) + rank)
        is_any, ranks, empty, own, received = run(exchange)(rows)
        check(is_any, [True])
        check(ranks, np.arange(size))
        assert empty.shape == (0, 2)
        check(own, [[2 * rank + mean(), 2 * rank + 1 + mean()]])
        check(received[:, 0], 2 * rank + np.arange(size))
    assert hvd.allgather(jnp.ones((rank + 1, 2))).shape == (total, 2)
    received, counts = hvd.alltoall(jnp.ones(size), splits=[1] * size)
    check(counts, [1] * size)
    assert received.shape == (size,)
    assert hvd.broadcast_object({"rank": rank}, 0) == {"rank": 0}
    assert hvd.allgather_object(rank) == list(range(size))


def mean() -> float:
    return (hvd.size() - 1) / 2


def memory() -> None:
    for jit in (jax.jit, hvd.jit):
        reduce = jit(lambda x: hvd.allreduce(x, op=hvd.Sum), donate_argnums=0)
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

    x, batch = jnp.arange(3.0), jnp.arange(6.0).reshape(2, 3)
    rows = jnp.arange(4.0 * size).reshape(2 * size, 2)
    ones = jnp.ones(3)
    check(jax.grad(loss)(x), 2 * size * total * np.arange(3))

    @jax.jit
    def compiled(x: jax.Array, batch: jax.Array, rows: jax.Array) -> Tree:
        gradient = jax.grad(loss)(x)
        second = jax.jvp(jax.grad(loss), (x,), (ones,))[1]
        tangent = jax.jvp(loss, (x,), (ones,))[1]
        batches = [
            jax.vmap(hvd.allreduce, 1, 1)(batch),
            jax.vmap(hvd.allgather, 1, 1)(batch),
            jax.vmap(hvd.reducescatter, 1, 1)(rows),
        ]
        of_rows = [
            jax.grad(lambda x, move=move: move(x).sum() * (rank + 1))(rows)
            for move in (hvd.allgather, hvd.reducescatter, hvd.alltoall)
        ]
        of_copy = jax.grad(lambda x: hvd.broadcast(x, size - 1).sum() * (rank + 1))(x)
        return gradient, second, tangent, batches, of_rows, of_copy

    results = compiled(x, batch, rows)
    gradient, second, tangent, batches, of_rows, of_copy = results
    check(gradient, 2 * size * total * np.arange(3))
    check(second, [2 * size * total] * 3)
    check(tangent, 2 * size * size * 3 * (rank + 1))
    check(batches[0], batch)
    check(batches[1], np.concatenate([batch] * size))
    check(batches[2], rows[2 * rank : 2 * rank + 2])
    check(of_rows[0], np.full(rows.shape, 1 + mean()))
    owner = np.repeat(np.arange(size), 2)[:, None] + np.ones(rows.shape)
    check(of_rows[1], owner)
    check(of_rows[2], owner)
    check(of_copy, [(1 + mean()) * (rank == size - 1)] * 3)

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


def whole_functions() -> None:
    rank, size = hvd.rank(), hvd.size()
    table = np.arange(64.0 * 64).reshape(64, 64)
    nested = jax.jit(lambda x: hvd.allreduce(x + 1, op=hvd.Sum))

    def step(x: jax.Array, length: int, *, state: Tree) -> Tree:
        hvd.allreduce(x * 5)  # not used

        def body(carry: jax.Array, _: object) -> tuple[jax.Array, None]:
            return hvd.allreduce(carry, op=hvd.Sum), None

        # Independent calls, which differ between ranks by more than constants.
        free = nested(x), jax.lax.scan(body, x, length=length)[0]
        if rank == 0:
            free = free[::-1]
        jax.debug.print("{}", x.sum(), ordered=True)
        return free, {"sum": hvd.allreduce(state["x"]) + table.sum()}, None

    compiled = hvd.jit(step, static_argnums=1, donate_argnames="state")
    for _ in range(3):
        state = {"x": jnp.ones(1 << 16)}
        pair, new, nothing = compiled(jnp.ones(2), 3, state=state)
        assert state["x"].is_deleted()
        assert nothing is None
        check(new["sum"][:2], [1 + np.float32(table.sum())] * 2)
        check(pair[::-1] if rank == 0 else pair, [[2 * size] * 2, [size**3] * 2])
    assert compiled.__name__ == "step"
    with jax.disable_jit():
        check(hvd.jit(hvd.allreduce)(jnp.ones(2)), [1] * 2)
    inner = hvd.jit(hvd.allreduce)
    fails("hvd.jit must compile the outermost", lambda: jax.jit(inner)(jnp.ones(2)))


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
    size = hvd.size()
    for move in (hvd.allgather, hvd.alltoall):
        # At three ranks, rank 1 has the mean of the rows.
        rows, ragged = jnp.ones((size * (hvd.rank() + 1), 2)), jax.jit(move)
        text = fails("equal shapes on all ranks", partial(ragged, rows))
        assert set(hvd.allgather_object(text)) == {text}
    fails("must be a multiple of", lambda: jax.jit(hvd.alltoall)(jnp.ones(7)))
    small = jnp.ones(2, jnp.float8_e4m3fn)
    fails("8-bit floats", lambda: jax.jit(hvd.allreduce)(small))


def fails(text: str, call: Callable[[], jax.Array]) -> str:
    with pytest.raises((RuntimeError, ValueError), match=re.escape(text)) as caught:
        call().block_until_ready()
    return str(caught.value)


def training() -> None:
    rank, size = hvd.rank(), hvd.size()
    keys = jax.random.split(jax.random.key(rank), 2)
    params = {
        "hidden": jax.random.normal(keys[0], (4, 8)),
        "out": jax.random.normal(keys[1], (8, 1)),
    }
    params = hvd.broadcast_parameters(params, 0)
    train(params, {"compression": hvd.Compression.bf16})
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

    @hvd.jit
    def step(params, state, data):
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
    parts = [values, transformations]
    if "fallback" not in sys.argv:
        parts += [memory, whole_functions, names, mistakes, training]
    for part in parts:
        part()
    # Dispatched, but never waited for.
    jax.jit(hvd.allreduce)(jnp.ones(1 << 20))


main()
