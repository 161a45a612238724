"""Import of the frameworks that front ends convert arrays of."""

import re
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ronde.errors import FrameworkError

_LEAST = {
    "tensorflow": "2.16",
    "keras": "3.0",
    "tf_keras": "2.16",
    "jax": "0.10",
    "optax": "0.2",
}
"""The oldest versions that work, by module."""
_PACKAGES = {
    "keras": "keras",
    "optax": "optax",
    "tf_keras": "tf-keras",
}  # others are extras of ronde


def import_framework(name: str) -> Any:  # noqa: ANN401  it has no types of its own
    """Import a framework by its module's name, such as ``tensorflow``.

    Raises:
        FrameworkError: It is not installed or too old; an ``ImportError``.
    """
    least = _LEAST[name]
    install = "pip install '{}'".format(_PACKAGES.get(name, f"ronde[{name}]"))
    if find_spec(name) is None:
        raise FrameworkError(
            f"{name} must be installed for this front end, got none. Type: {install}",
            name=name,
        )
    module = import_module(name)
    version = str(getattr(module, "__version__", ""))
    if _numbers(version) < _numbers(least):
        raise FrameworkError(
            f"{name} must be version {least} or newer, got {version}. Type: {install}",
            name=name,
        )
    return module


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
