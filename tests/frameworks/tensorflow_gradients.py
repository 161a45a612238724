"""Checks of the gradients of ronde.tensorflow; a program for 2 or more ranks."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.testing import assert_allclose, assert_array_equal

import ronde.tensorflow as hvd

NUM_STEPS = 20
RANK, SIZE = -1, 0  # set when the program starts
Run = Callable[[Callable[..., Any]], Callable[..., Any]]


class Counted:
    """An optimizer that counts its steps."""

    def __init__(self, iterations: Any) -> None:
        self.iterations = iterations


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


MODES: list[Run] = [plain, tf.function]


def constants(*values: object) -> list[Any]:
    return [tf.constant(value, tf.float32) for value in values]


def dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient).numpy()


def mean_of(value: Callable[[int], Any]) -> Any:
    return sum(value(rank) for rank in range(SIZE)) / SIZE


def weights() -> list[Any]:
    random = np.random.default_rng(3)
    shapes = {(5, 4): np.float32, (4,): np.float32, (4, 3): np.float64}
    return [
        tf.Variable(random.standard_normal(shape).astype(dtype))
        for shape, dtype in shapes.items()
    ]


def train(
    run: Run, rows: slice, wrap: Callable[[Any], Any], op_scale: float = 1.0
) -> list[np.ndarray]:
    """Return the weights after some steps on rows of every batch."""
    variables = weights()
    first, bias, second = variables

    @run
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            hidden = tf.cast(tf.tanh(x @ first + bias), tf.float64)
            loss = tf.reduce_mean((hidden @ second - y) ** 2)
        gradients = wrap(tape).gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(gradient * 0.1 * op_scale)

    random = np.random.default_rng(5)
    for _ in range(NUM_STEPS):
        x = random.standard_normal((4 * SIZE, 5)).astype(np.float32)
        y = random.standard_normal((4 * SIZE, 3))
        step(tf.constant(x[rows]), tf.constant(y[rows]))
    return [variable.numpy() for variable in variables]


def check_training() -> None:
    """Compare 20 steps across ranks and with one process on the joint batch."""
    own = slice(4 * RANK, 4 * RANK + 4)
    expected = train(plain, slice(None), plain)
    cases: list[tuple[dict[str, Any], float]] = [
        ({}, 1.0),
        ({"op": hvd.Sum, "groups": 2}, 1 / SIZE),
        ({"gradient_predivide_factor": 2.0}, 1.0),
    ]
    for run in MODES:
        for options, scale in cases:
            found = train(
                run,
                own,
                lambda t, o=options: hvd.DistributedGradientTape(t, **o),
                scale,
            )
            every = hvd.allgather_object([each.tobytes() for each in found])
            assert every == every[:1] * SIZE, options
            # The float32 layer limits the precision of the float64 one.
            tolerance = 8 * NUM_STEPS * np.finfo(np.float32).eps
            for one, other in zip(found, expected, strict=True):
                assert_allclose(one, other, rtol=0, atol=tolerance)


def check_tapes() -> None:
    """Check local sources, structures, None, classes and a persistent tape."""
    a, b, unused = (tf.Variable([float(RANK + 1)]) for _ in range(3))
    for run in MODES:

        @run
        def compute(*, scale: bool) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                loss = a * a * b
            made = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
            assert type(made).__name__ == "GradientTape"
            assert isinstance(made, tf.GradientTape)
            made.register_local_source(b)
            found = made.gradient(loss, {"a": a, "more": (b, [unused])})
            assert found["more"][1] == [None]
            local, others = made.get_local_and_global_gradients(loss, [a, b])
            assert [s is v for (s, _), v in zip(local + others, [b, a], strict=True)]
            return found["a"], found["more"][0], local[0][1], others[0][1]

        for scale in (True, False):
            found = compute(scale=scale)
            one = [mean_of(lambda r: 2 * (r + 1) ** 2)]
            other = [(RANK + 1) ** 2 / (SIZE if scale else 1)]
            for gradient, expected in zip(found, (one, other, other, one), strict=True):
                assert_allclose(gradient.numpy(), expected, rtol=1e-6)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1), tf.keras.layers.Dense(1)])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.fill([1, 2], float(RANK))))
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[0])
    local, others = tape.get_local_and_global_gradients(loss, model.trainable_variables)
    assert (len(local), len(others)) == (2, 2)
    assert_array_equal(others[1][1], [1.0])  # of a bias, on all ranks
    # TensorFlow divides by a scalar with its inverse, which rounds.
    kernel = model.layers[1].kernel[0]
    assert_allclose(local[0][1][0] * SIZE, RANK * kernel, rtol=1e-6)


def check_other_steps() -> None:
    """Check steps with other None gradients, and groups of variables."""
    a, b, c = (tf.Variable([1.0]) for _ in range(3))
    for chosen in ([a, b, c], [a], [b, c], [c], [a, b, c]):
        for groups in (None, 2, [[a, b]], [[c]]):
            with tf.GradientTape() as tape:
                loss = sum((i + 1.0) * (RANK + 1) * v for i, v in enumerate(chosen))
            tape = hvd.DistributedGradientTape(tape, groups=groups)
            found = tape.gradient(loss, [a, b, c])
            for variable, gradient in zip([a, b, c], found, strict=True):
                index = [i for i, v in enumerate(chosen) if v is variable]
                assert (gradient is None) == (not index)
                if index:
                    expected = mean_of(lambda r, i=index[0]: (i + 1.0) * (r + 1))
                    assert_allclose(gradient.numpy(), [expected], rtol=1e-6)


def check_sparse() -> None:
    table = tf.Variable(np.ones((4, 2), np.float32))
    bias = tf.Variable([0.0, 0.0])

    def compute(rows: Any, options: dict[str, Any]) -> Any:
        with tf.GradientTape() as tape:
            found = tf.gather(table, rows) * float(RANK + 1) + bias
            loss = tf.reduce_sum(found)
        made = hvd.DistributedGradientTape(tape, **options)
        return made.gradient(loss, [table, bias])

    expected = np.zeros((4, 2))
    for rank in range(SIZE):  # of unequal numbers of rows
        np.add.at(expected, [1, 1, 2][: rank + 1], (rank + 1) / SIZE)
    for run, as_dense in product(MODES, (False, True)):
        options = {"sparse_as_dense": as_dense, "compression": hvd.Compression.fp16}
        rows = tf.constant([1, 1, 2][: RANK + 1])
        gradients = run(partial(compute, options=options))(rows)
        assert isinstance(gradients[0], tf.IndexedSlices) != as_dense
        precision = np.finfo(np.float16).eps * 2
        assert_allclose(dense(gradients[0]), expected, rtol=precision)
        average = mean_of(lambda r: r + 1.0)  # the bias is added to r + 1 rows
        assert_allclose(gradients[1].numpy(), [average] * 2, rtol=precision)
    # Averages of integers truncate toward zero, as those of dense tensors do.
    values = tf.constant([[-3, 3 * SIZE + 1]])
    slices = tf.IndexedSlices(values, tf.constant([RANK]), tf.constant([SIZE, 2]))
    averaged = hvd.allreduce(slices)
    assert averaged.values.dtype == tf.int32
    assert_array_equal(averaged.values, [[int(-3 / SIZE), 3]] * SIZE)


def check_aggregation() -> None:
    """Check sums of 3 passes, in 7 passes, with a local and an unused variable."""
    for run, is_average in product(MODES, (False, True)):
        a, b, unused = (tf.Variable([0.0]) for _ in range(3))
        reduce = hvd._make_allreduce_grads_fn(
            "test",
            "",
            "",
            hvd.Compression.none,
            False,
            hvd.Average,
            1.0,
            None,
            hvd.global_process_set,
        )
        helper = hvd.LocalGradientAggregationHelperEager(3, reduce, False, is_average)
        helper.register_local_var(b)
        applied, counted = tf.Variable(0), tf.Variable(0)
        optimizer = Counted(counted)

        def step(x: Any, helper: Any, apply: Any, optimizer: Any, given: Any) -> Any:
            found = helper.compute_gradients([x, x, None], given)
            assert found.pop() is None
            helper.apply_gradients(apply, optimizer)
            return found

        bound = partial(
            step,
            helper=helper,
            apply=partial(applied.assign_add, 1),
            optimizer=optimizer,
            given=[a, b, unused],
        )
        call = run(bound)
        for number in range(1, 8):
            one, other = call(tf.constant([RANK + 1.0]))
            passes = (number - 1) % 3 + 1
            divisor = 3 if is_average and passes == 3 else 1
            reduced = mean_of(lambda r: r + 1.0) if passes == 3 else RANK + 1
            scaled = (RANK + 1) / (SIZE if passes == 3 else 1)
            assert_allclose(one.numpy(), [passes * reduced / divisor], rtol=1e-6)
            assert_allclose(other.numpy(), [passes * scaled / divisor], rtol=1e-6)
            assert (int(applied), int(counted)) == (number // 3, number - number // 3)


def check_sync_batch_norm() -> None:
    """Compare a step on rows of unequal number with one process on all rows."""
    random = np.random.default_rng(7)
    rows = random.standard_normal((SIZE * (SIZE + 1) // 2, 6, 3)) * 2 + 1
    rows = rows.astype(np.float32)
    begin = RANK * (RANK + 1) // 2
    own = tf.constant(rows[begin : begin + RANK + 1])
    targets = random.standard_normal(rows.shape).astype(np.float32)
    joint = tf.keras.layers.BatchNormalization()
    for run in MODES:
        joint = tf.keras.layers.BatchNormalization()
        synced = hvd.SyncBatchNormalization()
        kernels = [tf.Variable(np.eye(3, dtype=np.float32)) for _ in range(2)]
        joint.build(rows.shape)
        synced.build(rows.shape)

        def compute(layer: Any, kernel: Any, x: Any, y: Any, wrap: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((layer(x @ kernel, training=True) - y) ** 2)
            return wrap(tape).gradient(loss, [kernel, *layer.trainable_variables])

        def summed(tape: Any) -> Any:
            return hvd.DistributedGradientTape(tape, op=hvd.Sum)

        expected = compute(joint, kernels[0], rows, targets, plain)
        y = tf.constant(targets[begin : begin + RANK + 1])
        found = run(compute)(synced, kernels[1], own, y, summed)
        tolerance = 16 * rows.size * np.finfo(np.float32).eps
        for one, other in zip(found, expected, strict=True):
            assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=tolerance)
        for name in ("moving_mean", "moving_variance"):
            one, other = (getattr(layer, name).numpy() for layer in (synced, joint))
            assert_allclose(one, other, rtol=1e-5)
    assert_array_equal(synced(own, training=False).shape, own.shape)
    for fused in (True, None):
        with pytest.raises(ValueError, match="does not support fused=True"):
            hvd.SyncBatchNormalization(fused=fused)


def check_legacy() -> None:
    """Check optimizers of TensorFlow 1 in graphs, with and without aggregation."""
    v1 = tf.compat.v1
    for passes in (1, 2):
        with tf.Graph().as_default(), v1.Session() as session:
            variables = [v1.Variable([0.0], use_resource=True) for _ in range(2)]
            loss = variables[0] * float(RANK + 1) + variables[1] * float(RANK + 1)
            inner = v1.train.MomentumOptimizer(1.0, 0.0)
            optimizer = hvd.DistributedOptimizer(
                inner,
                backward_passes_per_step=passes,
                average_aggregated_gradients=True,
            )
            optimizer.register_local_var(variables[1])
            pairs = optimizer.compute_gradients(loss, variables)
            count = v1.train.get_or_create_global_step()
            update = optimizer.apply_gradients(pairs, count)
            assert optimizer.get_slot_names() == ["momentum"]
            session.run(v1.global_variables_initializer())
            session.run(v1.local_variables_initializer())
            for step in range(1, 6):
                session.run(update)
                found, number = session.run([variables, count])
                done = step // passes
                expected = [-done * mean_of(lambda r: r + 1), -done * (RANK + 1) / SIZE]
                assert number == step
                assert_allclose(np.ravel(found), expected, rtol=1e-6)
    variable = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
    optimizer.minimize(lambda: variable * float(RANK + 1), var_list=[variable])
    assert_allclose(variable.numpy(), [-mean_of(lambda r: r + 1)], rtol=1e-6)


def check_adasum() -> None:
    """Check deltas of 2 local steps: orthogonal ones add up, equal ones average."""
    if SIZE != 2:
        return
    v1 = tf.compat.v1
    slopes = [np.eye(2, dtype=np.float32)[RANK], np.ones(1, np.float32)]

    def loss_of(variables: Any) -> Any:
        terms = zip(variables, slopes, strict=True)
        return tf.add_n([tf.reduce_sum(v * s) for v, s in terms])

    def made() -> tuple[list[Any], Any]:
        variables = [v1.Variable(tf.zeros(n), use_resource=True) for n in (2, 1)]
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0),
            op=hvd.Adasum,
            backward_passes_per_step=2,
        )
        return variables, optimizer

    def check(found: list[Any], step: int) -> None:
        joint, ahead = step // 2 * 2, step % 2
        assert_allclose(found[0], -joint * np.ones(2) - ahead * slopes[0], rtol=1e-6)
        assert_allclose(found[1], [-float(step)], rtol=1e-6)

    variables, optimizer = made()
    for step in range(1, 6):
        optimizer.minimize(lambda v=variables: loss_of(v), var_list=variables)
        check([variable.numpy() for variable in variables], step)
    with tf.Graph().as_default(), v1.Session() as session:
        variables, optimizer = made()
        update = optimizer.minimize(loss_of(variables), var_list=variables)
        session.run(v1.global_variables_initializer())
        session.run(v1.local_variables_initializer())
        for step in range(1, 6):
            session.run(update)
            check(session.run(variables), step)


def check_process_set(pair: Any) -> None:
    """Reduce over two of three ranks; the third keeps its gradients."""
    variable = tf.Variable([1.0])
    for run in MODES:

        @run
        def compute() -> Any:
            with tf.GradientTape() as tape:
                loss = variable * float(RANK + 1)
            made = hvd.DistributedGradientTape(tape, process_set=pair)
            return made.gradient(loss, [variable])[0]

        assert_array_equal(compute(), [1.5 if RANK < 2 else RANK + 1])


def check_bad_input() -> None:
    tape, legacy = tf.GradientTape(), tf.compat.v1.train.GradientDescentOptimizer(1.0)
    average = {"average_aggregated_gradients": True}
    refused: list[tuple[Callable[..., Any], Any, dict[str, Any], str]] = [
        (hvd.DistributedGradientTape, tape, {"groups": 0}, "groups should be"),
        (
            hvd.DistributedGradientTape,
            tape,
            {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
            "not supported with op != Average",
        ),
        (
            hvd.PartialDistributedGradientTape,
            tape,
            {"local_layers": [3]},
            "All local layers must be",
        ),
        (
            hvd.DistributedOptimizer,
            legacy,
            {"backward_passes_per_step": 2},
            "not yet supported for _LegacyOptimizer",
        ),
        (
            hvd.DistributedOptimizer,
            legacy,
            {"op": hvd.Adasum, **average},
            "Adasum does not support average",
        ),
        (hvd.DistributedOptimizer, None, {"op": hvd.Adasum}, "with Keras"),
        (
            partial(hvd.LocalGradientAggregationHelperEager, 0),
            plain,
            {"sparse_as_dense": False, **average},
            "must be > 0",
        ),
    ]
    for function, argument, options, text in refused:
        with pytest.raises(ValueError, match=text):
            function(argument, **options)
    with pytest.warns(DeprecationWarning, match="has been replaced by `groups`"):
        hvd.DistributedGradientTape(tape, num_groups=2)


def main() -> None:
    global RANK, SIZE
    pair = hvd.ProcessSet([0, 1])
    hvd.init()
    RANK, SIZE = hvd.rank(), hvd.size()
    if SIZE > 2:
        hvd.add_process_set(pair)
    check_training()
    check_tapes()
    check_other_steps()
    check_sparse()
    check_aggregation()
    check_sync_batch_norm()
    check_legacy()
    check_adasum()
    check_process_set(pair if SIZE > 2 else hvd.global_process_set)
    check_bad_input()
    hvd.shutdown()


if __name__ == "__main__":
    main()
