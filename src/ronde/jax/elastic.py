"""Elastic training with JAX: the state of trees of arrays, and ``run``."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ronde.session.elastic_arrays import Arrays, ArrayState, run_compiled
from ronde.session.frameworks import import_framework
from ronde.session.session import rank, size

jax = import_framework("jax")

__all__ = ["JaxState", "run"]

R = TypeVar("R")
_ARRAYS = (jax.Array, np.ndarray)
_SAVED = (*_ARRAYS, np.generic, int, float, complex)


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorate a training function to continue after failures and changes of hosts.

    As ``ronde.torch.elastic.run``, also if a collective fails in compiled code. When
    this process's rank or the number of ranks has changed, all code is traced anew.
    """
    sizes: list[tuple[int, int]] = []

    @functools.wraps(func)
    def train(*args: Any, **kwargs: Any) -> R:
        sizes[:] = [*sizes[-1:], (rank(), size())]
        if sizes[0] != sizes[-1]:
            jax.clear_caches()
        return func(*args, **kwargs)

    return run_compiled(train, RuntimeError, ValueError)  # ValueError: of callbacks


class JaxState(ArrayState):
    """State of trees of arrays, and of other values, as attributes.

    An argument with arrays is a tree, whose structure must stay: its arrays and numbers
    are saved on the host, and become arrays again. Other arguments are pickled.
    """

    def __init__(self, **trees: Any) -> None:
        self._names: list[str] = []
        for name, tree in list(trees.items()):
            if any(isinstance(leaf, _ARRAYS) for leaf in jax.tree.leaves(tree)):
                self._names.append(name)
                setattr(self, name, trees.pop(name))
        super().__init__(**trees)

    def read_arrays(self) -> Arrays:
        """Return the leaves of all trees, as copies on the host."""
        leaves = jax.tree.leaves([getattr(self, name) for name in self._names])
        saved = [leaf for leaf in leaves if isinstance(leaf, _SAVED)]
        return [np.array(jax.random.key_data(x) if _is_key(x) else x) for x in saved]

    def write_arrays(self, arrays: Arrays) -> None:
        """Replace the leaves of all trees."""
        left = iter(arrays)
        for name in self._names:
            leaves, structure = jax.tree.flatten(getattr(self, name))
            new = [_like(x, next(left)) if isinstance(x, _SAVED) else x for x in leaves]
            setattr(self, name, structure.unflatten(new))


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _like(leaf: Any, array: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return array.copy()
    if _is_key(leaf):
        impl = jax.random.key_impl(leaf)
        return jax.random.wrap_key_data(jax.numpy.array(array), impl=impl)
    device = leaf.sharding if getattr(leaf, "committed", False) else None
    return jax.device_put(array.copy(), device)
