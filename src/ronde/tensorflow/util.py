"""Names of Horovod's ``util``, which scripts import although they are private."""

from collections.abc import Callable
from typing import Any

from ronde.session.frameworks import import_framework

tf: Any = import_framework("tensorflow")


def executing_eagerly() -> bool:
    """Return True outside of graphs."""
    return tf.executing_eagerly()


def make_subgraph(function: Callable[..., Any]) -> Any:
    """Compile a function to a graph."""
    return tf.function(function)


def cache_by_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a cache, which has eager results and others apart."""
    results: dict[Any, Any] = {}

    def find(*args: Any) -> Any:
        key = args, executing_eagerly()
        if key not in results:
            results[key] = function(*args)
        return results[key]

    return find


def vars_to_refs(variables: Any) -> Any:
    """Return hashable references: a tuple for a list, also a nested one."""
    if isinstance(variables, list):
        return tuple(map(vars_to_refs, variables))  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    return variables.ref()


def refs_to_vars(references: Any) -> Any:
    """Return the variables of references: a list for a tuple, also a nested one."""
    if isinstance(references, tuple):
        return list(map(refs_to_vars, references))  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    return references.deref()


_executing_eagerly = executing_eagerly
_make_subgraph = make_subgraph
_cache = cache_by_mode
