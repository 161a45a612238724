"""Adapters, by which the table of ``cases.py`` runs over each front end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from tests.frameworks.cases import Array, Case

Call = Callable[..., Any]


def all_cases(case: Case) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Adapter:
    """A front end, plain or compiled."""

    module: Any
    to_value: Callable[[Array], Any]
    to_array: Callable[[Any], Array] = np.asarray
    compiled: Callable[[Call], Call] | None = None
    supports: Callable[[Case], bool] = all_cases
    refusals: tuple[type[Exception], ...] = (ValueError,)


def numpy_arrays() -> Adapter:
    import ronde.numpy

    def read_only(array: Array) -> Array:
        given = array.copy()
        given.flags.writeable = False
        return given

    return Adapter(ronde.numpy, read_only, lambda value: value)


def tensorflow_eager() -> Adapter:
    import tensorflow as tf

    module = import_module("ronde.tensorflow")
    refusals = (ValueError, tf.errors.InvalidArgumentError)
    return Adapter(module, tf.constant, refusals=refusals)


def tensorflow_function() -> Adapter:
    import tensorflow as tf

    module = import_module("ronde.tensorflow")
    return Adapter(module, tf.constant, compiled=tf.function)


def is_in_jax(case: Case) -> bool:
    return case.operation not in ("grouped_allgather", "grouped_reducescatter")


def jax_arrays() -> Adapter:
    import jax

    jax.config.update("jax_enable_x64", val=True)
    module = import_module("ronde.jax")
    return Adapter(module, jax.numpy.asarray, supports=is_in_jax)


def jax_jit() -> Adapter:
    import jax

    jax.config.update("jax_enable_x64", val=True)
    module = import_module("ronde.jax")
    # Shapes of results are known when a function is compiled.
    return Adapter(
        module,
        jax.numpy.asarray,
        compiled=jax.jit,
        supports=lambda case: is_in_jax(case) and not case.is_ragged,
    )


ADAPTERS: Mapping[str, Callable[[], Adapter]] = {
    "numpy": numpy_arrays,
    "tensorflow": tensorflow_eager,
    "tensorflow-function": tensorflow_function,
    "jax": jax_arrays,
    "jax-jit": jax_jit,
}
FRONT_ENDS = ["numpy", "tensorflow", "tensorflow-function", "jax", "jax-jit"]
"""The adapters whose front ends are there."""
