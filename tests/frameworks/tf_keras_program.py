"""The checks of ``ronde.tensorflow.keras`` with tf-keras, run by every rank."""

import tempfile
from pathlib import Path

import keras as keras_3
import numpy as np
import tensorflow as tf
from numpy.testing import assert_allclose, assert_array_equal

import ronde.keras
import ronde.tensorflow.keras as hvd

keras = tf.keras
STEPS, ROWS = 20, 4
LEGACY = keras.optimizers.legacy


def new_model(seed):
    init = keras.initializers.RandomNormal(seed=seed)
    return keras.Sequential(
        [
            keras.layers.Dense(6, "tanh", kernel_initializer=init, input_shape=(5,)),
            keras.layers.Dense(2, kernel_initializer=init),
        ]
    )


def data_of_all():
    random = np.random.default_rng(7)
    x = random.standard_normal((STEPS * hvd.size() * ROWS, 5)).astype("float32")
    return x, (x[:, :2] * 3 + 1).astype("float32")


def own_rows(values):
    parts = values.reshape(STEPS, hvd.size(), ROWS, -1)
    return parts[:, hvd.rank()].reshape(STEPS * ROWS, -1)


def check_equal_on_all(weights, what):
    for others in hvd.allgather_object(weights):
        for own, other in zip(weights, others, strict=True):
            assert_array_equal(own, other, err_msg=what)


def fit(model, optimizer, x, y, batch, **options):
    model.compile(optimizer, "mse")
    return model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, **options)


def check_training(directory):
    """Compare 20 steps with those of one process; save, load and train again."""
    x, y = data_of_all()
    for kind in (keras.optimizers.SGD, LEGACY.SGD):
        model, alone = new_model(3), new_model(3)
        optimizer = hvd.DistributedOptimizer(kind(0.01, momentum=0.9))
        assert type(optimizer).__name__ == "SGD"
        fit(model, optimizer, own_rows(x), own_rows(y), ROWS)
        fit(alone, kind(0.01, momentum=0.9), x, y, ROWS * hvd.size())
        what = kind.__module__
        check_equal_on_all(model.get_weights(), what)
        for found, expected in zip(
            model.get_weights(), alone.get_weights(), strict=True
        ):
            # Sums of some hundred terms, in another order, in each of the steps.
            tolerance = STEPS * 500 * np.finfo(np.float32).eps
            assert_allclose(found, expected, tolerance, tolerance, err_msg=what)
        path = directory / f"{hvd.rank()}.h5"
        model.save(path)
        plain = keras.models.load_model(path).optimizer
        assert not hasattr(plain, "register_local_var")
        loaded = hvd.load_model(path)
        assert hasattr(loaded.optimizer, "register_local_var")
        assert loaded.optimizer.iterations.numpy() == STEPS
        state = [v.numpy() for v in loaded.optimizer.variables]
        for found, expected in zip(state, optimizer.variables, strict=True):
            assert_array_equal(found, expected.numpy())
        fit(loaded, loaded.optimizer, own_rows(x), own_rows(y), ROWS)
        check_equal_on_all(loaded.get_weights(), f"{what}, loaded")


def check_mixed_precision():
    """Give one rank an infinite input in the fourth step; all skip that step."""
    x, y = data_of_all()
    x = x.copy()
    x[(4 * hvd.size() - 1) * ROWS, 0] = np.inf  # of the last rank
    keras.mixed_precision.set_global_policy("mixed_float16")
    for kind in (keras.optimizers.SGD, LEGACY.SGD):
        model = new_model(3)
        fit(model, hvd.DistributedOptimizer(kind(0.01)), own_rows(x), own_rows(y), ROWS)
        check_equal_on_all(model.get_weights(), "mixed precision")
        assert all(np.isfinite(each).all() for each in model.get_weights())
        assert model.optimizer.loss_scale.numpy() < 2**15  # steps were skipped
    keras.mixed_precision.set_global_policy("float32")


def check_callbacks():
    x, y = data_of_all()
    model = new_model(hvd.rank())
    optimizer = hvd.DistributedOptimizer(LEGACY.SGD(0.1, momentum=0.9))
    history = fit(
        model,
        optimizer,
        own_rows(x),
        own_rows(y),
        ROWS * STEPS // 4,
        epochs=3,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(hvd.size() - 1),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2),
            hvd.callbacks.LearningRateScheduleCallback(0.1, 0.1, start_epoch=2),
        ],
    ).history
    assert_allclose(history["lr"][1:], [0.1, 0.1], rtol=1e-6)
    assert_allclose(optimizer.momentum.numpy(), 0.9, rtol=1e-6)
    assert len(set(map(tuple, hvd.allgather_object(history["loss"])))) == 1
    check_equal_on_all(model.get_weights(), "callbacks")
    assert not model.jit_compile


def check_functions():
    rank, size = hvd.rank(), hvd.size()
    found = hvd.allreduce([rank + 1.0], name="value", op=hvd.Sum)
    assert isinstance(found, tf.Tensor)
    assert_allclose(found, [size * (size + 1) / 2])
    assert_array_equal(hvd.broadcast([rank], size - 1), [size - 1])
    assert_array_equal(hvd.allgather([rank]), range(size))


def check_both_versions():
    """Accept optimizers of both versions in every front end."""
    for package in (hvd, ronde.keras):
        for version, name in ((keras, "tf_keras"), (keras_3, "keras")):
            optimizer = package.DistributedOptimizer(version.optimizers.SGD(0.1))
            assert type(optimizer).__module__.split(".")[0] == name


def main():
    hvd.init()
    with tempfile.TemporaryDirectory() as name:
        check_training(Path(name))
    check_mixed_precision()
    check_callbacks()
    check_functions()
    check_both_versions()
    hvd.shutdown()


main()
