"""Checks of ronde.tensorflow: a program for 3 ranks, or for 2 of which one fails."""

import os
import signal
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.testing import assert_array_equal

import ronde.tensorflow as hvd

MODES = [lambda function: function, tf.function]


def check_lazy_modules() -> None:
    assert hvd.elastic.__name__ == "ronde.tensorflow.elastic"
    assert hvd.keras.__name__ == "ronde.tensorflow.keras"


def check_slices() -> None:
    """Gather slices of unequal number, alone and in a group."""
    rank, size = hvd.rank(), hvd.size()
    slices = tf.IndexedSlices(
        tf.fill([rank + 1, 2], float(rank + 1)), tf.range(rank + 1), tf.constant([4, 2])
    )
    values = [[r + 1.0] * 2 for r in range(size) for _ in range(r + 1)]
    indices = [i for r in range(size) for i in range(r + 1)]
    for run in MODES:
        summed = run(lambda: hvd.allreduce(slices, op=hvd.Sum))()
        first, second = run(lambda: hvd.grouped_allreduce([slices, slices]))()
        for found, divisor in ((summed, 1), (first, size), (second, size)):
            assert_array_equal(found.indices, indices)
            assert_array_equal(found.values, np.float32(values) / np.float32(divisor))
            assert_array_equal(found.dense_shape, [4, 2])
        for options in ({"op": hvd.Max}, {"op": hvd.Sum, "prescale_factor": 2.0}):
            with pytest.raises(NotImplementedError, match="IndexedSlices"):
                run(lambda options=options: hvd.allreduce(slices, **options))()


def check_names() -> None:
    """Match calls after a retrace on rank 0 alone, with and without names."""

    @tf.function
    def reduce(x: Any) -> Any:
        total = hvd.allreduce(x, op=hvd.Sum, name="mine")
        return total + hvd.allreduce(x, op=hvd.Sum)

    reduce(tf.ones(2))
    before = reduce.experimental_get_tracing_count()
    x = tf.ones([1, 3])
    if hvd.rank() == 0:  # traced for other dtypes, and not called
        reduce.get_concrete_function(tf.TensorSpec([2], tf.float64))
        reduce.get_concrete_function(tf.TensorSpec([2, 2], tf.int32))
    assert_array_equal(reduce(x), tf.fill([1, 3], 2.0 * hvd.size()))
    extra = 3 if hvd.rank() == 0 else 1
    assert reduce.experimental_get_tracing_count() == before + extra
    graph = reduce.get_concrete_function(tf.TensorSpec([2])).graph
    names = {op.name for op in graph.get_operations() if op.type == "EagerPyFunc"}
    assert names == {"mine", "HorovodAllreduce_x_0"}


def check_errors() -> None:
    errors = tf.errors
    apart = hvd.ProcessSet([0, 1])  # unknown to the session
    cases: list[tuple[type[Exception], Any]] = [
        (
            errors.FailedPreconditionError,
            lambda: hvd.allreduce(tf.ones(hvd.rank() + 1), name="shapes"),
        ),
        (
            errors.InvalidArgumentError,
            lambda: hvd.alltoall(tf.ones(2), splits=[2] * hvd.size()),
        ),
        (
            (errors.InvalidArgumentError, ValueError),
            lambda: hvd.allreduce(tf.ones(2), process_set=apart),
        ),
    ]
    for run in MODES:
        for expected, function in cases:
            with pytest.raises(expected):
                run(function)()
        assert_array_equal(run(lambda: hvd.allreduce(tf.ones(1)))(), [1.0])


def check_variables() -> None:
    for kind in (tf.Variable, tf.keras.Variable):
        for run in MODES:
            variables = [kind([float(hvd.rank()), 1.0]), kind(float(hvd.rank()))]
            run(broadcast(variables))()
            first, second = (np.asarray(each) for each in variables)
            assert_array_equal(first, [1.0, 1.0])
            assert_array_equal(second, 1.0)


def broadcast(variables: list[Any]) -> Any:
    def call() -> None:
        hvd.broadcast_variables(variables, root_rank=1)

    return call


def check_session() -> None:
    """Run two collectives and a broadcast of global variables in a session."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [2])
        variable = v1.Variable([float(hvd.rank())], use_resource=True)
        fetches = [hvd.allreduce(x, op=hvd.Sum), hvd.allgather(x), hvd.size_op()]
        session.run(v1.global_variables_initializer())
        session.run(hvd.broadcast_global_variables(2))
        feed = {x: [1.0, float(hvd.rank())]}
        for _ in range(3):
            total, rows, size = session.run(fetches, feed)
            assert_array_equal(total, [3.0, 3.0])
            assert_array_equal(rows, [1, 0, 1, 1, 1, 2])
            assert size == 3
        assert session.run(variable) == [2.0]


def check_strategy() -> None:
    devices = tf.config.list_logical_devices("CPU")
    strategy = tf.distribute.MirroredStrategy([device.name for device in devices])
    with strategy.scope(), pytest.raises(ValueError, match=r"one replica .* got 2"):
        hvd.allreduce(tf.ones(1))


def check_join() -> None:
    for run in MODES:
        if hvd.rank() == 0:
            assert_array_equal(run(partial(hvd.size_op))(), 3)
        if hvd.rank() > 0:
            total = run(lambda: hvd.allreduce(tf.ones(2), op=hvd.Sum, name="rest"))()
            assert_array_equal(total, [2.0, 2.0])
        last = run(partial(hvd.join))()
        assert last.dtype == tf.int32
        assert 0 <= int(last) < 3


def check_all() -> None:
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    hvd.init()
    check_lazy_modules()
    check_slices()
    check_names()
    check_errors()
    check_variables()
    check_session()
    check_strategy()
    check_join()
    hvd.shutdown()


def fail(how: str) -> None:
    """Leave rank 0 alone with a collective, and end it with the error."""
    hvd.init()

    @tf.function
    def reduce(x: Any) -> Any:
        return hvd.allreduce(x, name="lasting")

    reduce(tf.ones(2))
    if hvd.rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        # Another order of tracing: this name first.
        tf.function(lambda: hvd.allreduce(tf.ones(2), name="other"))()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to see the error
    try:
        reduce(tf.ones(2))
    except tf.errors.UnknownError as error:
        sys.exit(f"raised {error}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        fail(sys.argv[1])
    else:
        check_all()
