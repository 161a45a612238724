"""Elastic training with JAX: the state of trees of arrays, and ``run``."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ronde.session.elastic import ObjectState, State
from ronde.session.elastic_arrays import Arrays, ArrayState, run_compiled
from ronde.session.frameworks import import_framework

jax = import_framework("jax")

__all__ = ["JaxState", "ObjectState", "State", "run"]

R = TypeVar("R")
_ARRAYS = (jax.Array, np.ndarray)
_SAVED = (*_ARRAYS, np.generic, bool, int, float, complex)


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorate a training function to continue after failures and changes of hosts.

    As ``ronde.torch.elastic.run``, also if a collective fails in compiled code.
    """
    # Also of an array that was donated to a call that failed.
    return run_compiled(func, RuntimeError, ValueError)


class JaxState(ArrayState):
    """State of trees of arrays, and of other values, as attributes.

    An argument with arrays is a tree. Its arrays and numbers are saved on the host, and
    become arrays on their devices again; its structure must stay. Other arguments are
    pickled.
    """

    def __init__(self, **trees: Any) -> None:
        leaves = {name: jax.tree.leaves(tree) for name, tree in trees.items()}
        self._names = [
            n for n in trees if any(isinstance(x, _ARRAYS) for x in leaves[n])
        ]
        for name in self._names:
            setattr(self, name, trees.pop(name))
        super().__init__(**trees)

    def read_arrays(self) -> Arrays:
        leaves = jax.tree.leaves([getattr(self, name) for name in self._names])
        return [_to_host(leaf) for leaf in leaves if isinstance(leaf, _SAVED)]

    def write_arrays(self, arrays: Arrays) -> None:
        left = iter(arrays)
        for name in self._names:
            leaves, structure = jax.tree.flatten(getattr(self, name))
            new = [_like(x, next(left)) if isinstance(x, _SAVED) else x for x in leaves]
            setattr(self, name, structure.unflatten(new))


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def _to_host(leaf: Any) -> Any:
    return np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _like(leaf: Any, array: Any) -> Any:
    """Return a copy of an array, of the kind and on the device of ``leaf``."""
    if isinstance(leaf, np.ndarray):
        return array.copy()
    if _is_key(leaf):
        key = jax.numpy.array(array)
        return jax.random.wrap_key_data(key, impl=jax.random.key_impl(leaf))
    device = leaf.sharding if getattr(leaf, "committed", False) else None
    return jax.device_put(array.copy(), device)
