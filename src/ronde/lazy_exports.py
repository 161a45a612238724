"""Lazy exports: a package's modules are imported at the first use of a name."""

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_exports(package: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """Return a ``__getattr__`` for a package, which imports a module when it is needed.

    Args:
        package: The package's ``__name__``.
        names: The exported names of each module, separated by spaces.
    """
    modules = {name: module for module, line in names.items() for name in line.split()}

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return find
