"""A rank of an elastic job that trains a model of Keras 2 or 3, and may be killed.

``python elastic_keras.py tf_keras|keras``; Keras 3 reads ``KERAS_BACKEND``. Worker 1 is
killed in a step of the second epoch.
"""

import hashlib
import os
import signal
import sys
from importlib import import_module

import numpy as np
import torch

from ronde.membership import own_member
from ronde.session import (
    Allreduce,
    Average,
    allgather_object,
    global_process_set,
    init,
    rank,
    size,
)

EPOCHS, BATCHES, FATAL_CALL = 3, 4, 6

name = sys.argv[1]
keras = import_module(name)
backend = "tensorflow" if name == "tf_keras" else keras.backend.backend()
framework = import_module(backend)
front_end = {"tf_keras": "tensorflow.keras", "keras": "keras"}[name]
elastic = import_module(f"ronde.{front_end}.elastic")
calls: list[int] = []
traced: list[int] = []
places: list[tuple[int, int]] = []


def reduce(*gradients):
    """Average gradients over the ranks."""
    calls.append(len(gradients))
    if len(calls) == FATAL_CALL and own_member().number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    given = [torch.tensor(np.asarray(each)) for each in gradients]
    collective = Allreduce(global_process_set, "grads", is_group=True, op=Average)
    return tuple(each.numpy() for each in collective.run(given))


def reduce_compiled(gradients):
    """Call ``reduce`` in the backend's compiled code."""
    traced.append(size())
    if backend == "torch":
        return [torch.from_numpy(each) for each in reduce(*gradients)]
    if backend == "jax":
        jax = framework
        forms = tuple(jax.ShapeDtypeStruct(g.shape, g.dtype) for g in gradients)
        return list(jax.pure_callback(reduce, forms, *gradients))
    dtypes = [each.dtype for each in gradients]
    results = framework.py_function(reduce, gradients, dtypes)
    for result, gradient in zip(results, gradients, strict=True):
        result.set_shape(gradient.shape)
    return results


class Keras2Optimizer:
    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        gradients, variables = zip(*grads_and_vars, strict=True)
        pairs = zip(reduce_compiled(list(gradients)), variables, strict=True)
        return super().apply_gradients(pairs, *args, **kwargs)


class Keras3Optimizer:
    def apply(self, grads, trainable_variables=None):
        return super().apply(reduce_compiled(grads), trainable_variables)


class RecordedState(elastic.KerasState):
    """Compares each restored state with the last commit."""

    restored = 0

    def numbers(self) -> bytes:
        return b"".join(array.tobytes() for array in self.read_arrays())

    def save(self) -> None:
        super().save()
        self.committed = self.numbers(), self.epoch, self.batch

    def sync(self) -> None:
        super().sync()
        self.committed = self.numbers(), self.epoch, self.batch

    def restore(self) -> None:
        super().restore()
        assert (self.numbers(), self.epoch, self.batch) == self.committed
        RecordedState.restored += 1


def make_state() -> RecordedState:
    keras.utils.set_random_seed(own_member().number)
    dense = keras.layers.Dense
    model = keras.Sequential([dense(3, activation="relu"), dense(1)])
    model.build((None, 2))
    mixin = Keras2Optimizer if name == "tf_keras" else Keras3Optimizer
    optimizer = type("Adam", (mixin, keras.optimizers.Adam), {})(0.01)
    model.compile(optimizer, "mse")
    return RecordedState(model, epoch=0, batch=0)


def check_others() -> None:
    """Copy the other states of a framework from rank 0, and restore them."""
    if backend == "tensorflow":
        variables = [framework.Variable([float(rank())]), framework.Variable(rank())]
        tensorflow = import_module("ronde.tensorflow.elastic")
        state = tensorflow.TensorFlowState(variables, step=rank())
        state.sync()
        variables[0].assign([9.0])
        state.step = 9
        state.restore()
        assert ([v.numpy() for v in variables], state.step) == ([0.0, 0], 0)
        return
    if backend == "jax":
        jax = framework
        tree = {"w": jax.numpy.full(3, rank(), jax.numpy.bfloat16), "n": rank()}
        jaxes = import_module("ronde.jax.elastic")
        key = jax.random.key(rank())
        state = jaxes.JaxState(tree=tree, key=key, seen=[rank()])
        state.sync()
        double = jax.jit(
            lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0
        )
        state.tree = double(double(jax.tree.map(lambda x: x + 1, state.tree)))
        state.seen.append(9)
        state.key = jax.random.split(key)[0]
        state.restore()
        assert state.tree["w"].tolist() == [0, 0, 0]
        assert (int(state.tree["n"]), state.seen) == (0, [0])
        assert jax.random.key_data(state.key).tolist() == [0, 0]


@elastic.run
def train(state) -> None:
    assert len(set(allgather_object(state.numbers()))) == 1
    if state.epoch == 0:
        check_others()
    x = np.linspace(rank(), 1, 2 * 8 * BATCHES, dtype=np.float32).reshape(-1, 2)
    callbacks = [
        elastic.UpdateBatchStateCallback(state),
        elastic.UpdateEpochStateCallback(state),
        elastic.CommitStateCallback(state),
    ]
    epochs = EPOCHS - state.epoch
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    traced.clear()
    places.append((rank(), size()))
    state.model.fit(x, x.sum(1), epochs=epochs, callbacks=callbacks, **options)
    # TensorFlow traces anew after each change, JAX if rank or size has changed.
    assert set(traced) <= {size()}
    assert traced or (backend == "jax" and places[-2] == places[-1])


init()
state = make_state()
train(state)
digest = hashlib.sha256(state.numbers()).hexdigest()
counts = f"{state.epoch} {state.batch} {len(calls)} {RecordedState.restored}"
print(f"done {digest} {counts}")  # noqa: T201
