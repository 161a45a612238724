"""The checks of ``ronde.keras`` on one backend, run by every rank."""

import json
import re
import sys
import tempfile
import zipfile
from pathlib import Path

BACKEND, LEVEL = sys.argv[1:]
if BACKEND != "tensorflow":
    # Keras imports TensorFlow wherever it finds it, which takes seconds.
    sys.modules["tensorflow"] = None  # pyright: ignore[reportArgumentType]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from numpy.testing import assert_allclose, assert_array_equal  # noqa: E402

import ronde.keras as hvd  # noqa: E402

STEPS, ROWS = 20, 4  # of a rank in a step
LOSS = "mean_squared_error"


def rank_and_size():
    return hvd.rank(), hvd.size()


def array_of(value):
    return np.array(keras.ops.convert_to_numpy(value))


def new_model(seed, *, dtype="float32"):
    init = keras.initializers.RandomNormal(seed=seed)
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(6, "tanh", kernel_initializer=init, dtype=dtype),
            keras.layers.Dense(2, kernel_initializer=init, dtype=dtype),
        ]
    )


def data_of_all(num_rows=ROWS):
    rows = STEPS * hvd.size() * num_rows
    random = np.random.default_rng(7)
    x = random.standard_normal((rows, 5)).astype("float32")
    return x, (x[:, :2] * 3 + 1).astype("float32")


def own_rows(values, num_rows=ROWS):
    rank, size = rank_and_size()
    parts = values.reshape(STEPS, size, num_rows, -1)
    return parts[:, rank].reshape(STEPS * num_rows, -1)


def check_equal_on_all(values, what):
    for number, others in enumerate(
        hvd.allgather_object([array_of(v) for v in values])
    ):
        for own, other in zip(values, others, strict=True):
            assert_array_equal(array_of(own), other, err_msg=f"{what}: rank {number}")


def fit(model, optimizer, x, y, batch, **options):
    model.compile(optimizer, LOSS)
    return model.fit(
        x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0, **options
    )


def check_training():
    """Compare 20 steps with those of one process on all ranks' rows."""
    x, y = data_of_all()
    cases = {
        "momentum": ({"momentum": 0.9}, {}, {}),
        "clipping": (
            {"clipnorm": 0.1, "weight_decay": 0.01},
            {"gradient_predivide_factor": 2.0, "groups": 2},
            {},
        ),
        "accumulation": ({"gradient_accumulation_steps": 4, "clipnorm": 0.1}, {}, {}),
        "passes": (
            {"momentum": 0.9},
            {"backward_passes_per_step": 4},
            {"gradient_accumulation_steps": 4, "learning_rate": 0.04},
        ),
    }
    for what, (own, options, reference) in cases.items():
        given = {"learning_rate": 0.01, **own}
        model, alone = new_model(3), new_model(3)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(**given), **options)
        fit(model, optimizer, own_rows(x), own_rows(y), ROWS)
        plain = keras.optimizers.SGD(**{**given, **reference})
        fit(alone, plain, x, y, ROWS * hvd.size())
        check_equal_on_all(model.weights + optimizer.variables, what)
        assert int(array_of(optimizer._iterations)) == STEPS
        for found, expected in zip(model.weights, alone.weights, strict=True):
            # Sums of some hundred terms, in another order, in each of the steps.
            tolerance = STEPS * 500 * np.finfo(np.float32).eps
            assert_allclose(
                array_of(found),
                array_of(expected),
                rtol=tolerance,
                atol=tolerance,
                err_msg=what,
            )


def check_mixed_precision():
    """Give one rank an infinite input in the fourth step; all skip that step."""
    rank, size = rank_and_size()
    x, y = data_of_all()
    x = x.copy()
    x[(3 * size + size - 1) * ROWS, 0] = np.inf  # of the last rank
    keras.config.set_dtype_policy("mixed_float16")
    for steps in (None, 2):
        model = new_model(3, dtype="mixed_float16")
        given = keras.optimizers.SGD(0.01, gradient_accumulation_steps=steps)
        if steps is not None:
            given = keras.optimizers.LossScaleOptimizer(given, initial_scale=256.0)
        optimizer = hvd.DistributedOptimizer(given)
        assert type(optimizer).__name__ == "LossScaleOptimizer"
        fit(model, optimizer, own_rows(x), own_rows(y), ROWS)
        assert model.optimizer is optimizer
        what = f"mixed precision, accumulating {steps}, rank {rank}"
        # Gradients that are not reduced yet belong to a rank.
        state = [v for v in optimizer.variables if "accumulator" not in v.name]
        check_equal_on_all(model.weights + state, what)
        assert all(np.isfinite(array_of(w)).all() for w in model.weights)
        # With the default scale, 2**15, other steps overflow too, on all ranks.
        skipped = np.log2(
            (256.0 if steps else 2.0**15) / array_of(optimizer.dynamic_scale)
        )
        assert skipped == 1 if steps else 1 <= skipped < STEPS
        assert array_of(optimizer.inner_optimizer._iterations) == STEPS - skipped
    keras.config.set_dtype_policy("float32")
    # Keras puts a loss scale of its own around the optimizer of such a model.
    model = new_model(3, dtype="mixed_float16")
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    fit(model, optimizer, own_rows(x), own_rows(y), ROWS)
    outer = model.optimizer
    assert outer is not optimizer
    check_equal_on_all(model.weights + list(outer.variables), "Keras' loss scale")
    assert all(np.isfinite(array_of(w)).all() for w in model.weights)
    assert 1 <= STEPS - array_of(optimizer._iterations) < STEPS


def check_state_and_saving(directory):
    """Wrap an optimizer that has state, save the model, and load it both ways."""
    x, y = data_of_all()
    model = new_model(3)
    plain = keras.optimizers.Adam(0.01)
    plain.exclude_from_weight_decay(var_names=["bias"])
    fit(model, plain, x[:8], y[:8], 4)
    optimizer = hvd.DistributedOptimizer(plain)
    for found, expected in zip(optimizer.variables, plain.variables, strict=True):
        assert_array_equal(array_of(found), array_of(expected))
    assert optimizer._exclude_from_weight_decay_pattern.pattern == "bias"
    assert len(optimizer.variables()) == len(optimizer.variables)
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    assert type(again) is type(optimizer)

    fit(model, optimizer, own_rows(x), own_rows(y), ROWS)
    path = directory / f"{hvd.rank()}.keras"
    model.save(path)
    config = zipfile.ZipFile(path).read("config.json").decode()
    saved = json.loads(config)["compile_config"]["optimizer"]
    assert "ronde" not in config
    assert saved["class_name"] == "Adam"
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is type(plain)
    assert not hasattr(loaded.optimizer, "_reduction")
    loaded = hvd.load_model(path)
    for found, expected in zip(
        loaded.optimizer.variables, optimizer.variables, strict=True
    ):
        assert_array_equal(array_of(found), array_of(expected))
    loaded.fit(own_rows(x), own_rows(y), batch_size=ROWS, verbose=0, shuffle=False)
    check_equal_on_all(loaded.weights, "loaded")


class Rates(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_begin(self, batch, logs=None):
        del batch, logs
        self.rates.append(float(array_of(self.model.optimizer.learning_rate)))


def check_callbacks(directory):
    """Train for some epochs from other weights on each rank."""
    rank, size = rank_and_size()
    x, y = data_of_all()
    model = new_model(rank)
    kept = array_of(model.layers[1].bias) + rank
    model.layers[1].bias.assign(kept)
    first = array_of(model.layers[0].kernel)
    [root] = hvd.allgather_object(first)[-1:]
    model.layers[1].trainable = False
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, LOSS)
    rates = Rates()

    class AtBegin(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            del logs
            if batch == 0 and not rates.rates:
                assert_array_equal(array_of(self.model.layers[0].kernel), root)

    best = hvd.callbacks.BestModelCheckpoint("loss")
    best.filepath = str(directory / f"best{rank}.keras")
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(
        size - 1, local_variables=[model.layers[1].bias]
    )
    schedule = hvd.callbacks.LearningRateScheduleCallback
    history = model.fit(
        own_rows(x),
        own_rows(y),
        batch_size=ROWS * STEPS // 4,
        epochs=4,
        verbose=0,
        callbacks=[
            broadcast,
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, verbose=1),
            schedule(0.1, 0.1, start_epoch=2, end_epoch=3),
            schedule(0.1, lambda epoch: epoch, start_epoch=3),
            AtBegin(),
            rates,
            best,
        ],
    ).history
    warm = [
        0.1 / size * ((epoch + (batch + 1) / 4) * (size - 1) / 2 + 1)
        for epoch in range(2)
        for batch in range(4)
    ]
    assert_allclose(rates.rates, warm + [0.1] * 4 + [0.3] * 4, rtol=1e-6)
    assert_allclose(history["lr"], [warm[3], 0.1, 0.1, 0.3], rtol=1e-6)
    assert len(set(map(tuple, hvd.allgather_object(history["loss"])))) == 1
    assert Path(best.filepath).exists()
    check_equal_on_all(model.layers[0].weights, "callbacks")
    assert_array_equal(array_of(model.layers[1].bias), kept)
    assert model.jit_compile is (BACKEND == "jax")


def check_local_layers():
    rank, size = rank_and_size()
    variables = [keras.Variable(np.zeros(3, "float32")) for _ in range(2)]
    layers = [keras.layers.Dense(1), keras.layers.Dense(1)]
    for layer, variable in zip(layers, variables, strict=True):
        layer._trainable_variables = [variable]
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), local_layers=layers[:1], groups=[[variables[1]]]
    )
    gradient = keras.ops.convert_to_tensor(np.full(3, rank + 1, "float32"))
    optimizer.apply([gradient, gradient], variables)
    assert_allclose(array_of(variables[0]), np.full(3, -(rank + 1) / size))
    assert_allclose(array_of(variables[1]), np.full(3, -(size + 1) / 2))


def check_functions():
    rank, size = rank_and_size()
    ranks = np.arange(1, size + 1)
    total = ranks.sum()
    found = hvd.allreduce([1.0 * rank + 1, 2], name="value")
    assert keras.ops.is_tensor(found)
    assert_allclose(array_of(found), [total / size, 2])
    found = hvd.allreduce([rank + 1.0], op=hvd.Sum, prescale_factor=2.0)
    assert_allclose(array_of(found), [2 * total])
    found = hvd.allreduce([rank + 1.0], compression=hvd.Compression.fp16)
    assert_allclose(array_of(found), [total / size], rtol=1e-3)
    assert_array_equal(array_of(hvd.allgather([rank + 1])), ranks)
    assert_array_equal(array_of(hvd.broadcast([rank], size - 1)), [size - 1])
    rows = array_of(hvd.reducescatter(np.ones((size, 2), "float32"), op=hvd.Sum))
    assert_array_equal(rows, np.full((1, 2), size))


def check_refusals():
    sgd = keras.optimizers.SGD(0.1)
    refused = {
        "op currently only supports Average and Sum": {"op": hvd.Adasum},
        "groups should be a non-negative integer": {"groups": -1},
        "backward_passes_per_step must be > 0": {"backward_passes_per_step": 0},
        "not supported with op != Average": {
            "op": hvd.Sum,
            "gradient_predivide_factor": 2.0,
        },
    }
    for text, options in refused.items():
        check_raises(
            ValueError, text, lambda o=options: hvd.DistributedOptimizer(sgd, **o)
        )
    distributed = hvd.DistributedOptimizer(sgd)
    legacy = "TF_USE_LEGACY_KERAS=1"
    check_raises(ValueError, legacy, lambda: hvd.DistributedOptimizer(object()))
    check_raises(ValueError, legacy, lambda: hvd.load_model("x", legacy_opts=True))
    check_raises(AttributeError, legacy, lambda: distributed.lr)
    check_raises(RuntimeError, "eager", lambda: hvd.broadcast_global_variables(0))
    check_raises(ValueError, "already", lambda: hvd.DistributedOptimizer(distributed))


def check_raises(error, text, call):
    with pytest.raises(error, match=re.escape(text)):
        call()


def main():
    hvd.init()
    with tempfile.TemporaryDirectory() as name:
        check_training()
        check_mixed_precision()
        if LEVEL == "all":
            check_state_and_saving(Path(name))
            check_callbacks(Path(name))
            check_local_layers()
            check_functions()
            check_refusals()
    hvd.shutdown()


main()
