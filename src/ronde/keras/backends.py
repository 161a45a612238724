"""Keras 3 and the front end of its backend."""

from importlib import import_module
from typing import Any

from ronde.errors import UsageError
from ronde.keras.functions import ValueFunctions
from ronde.session.frameworks import import_framework

keras = import_framework("keras")
BACKEND = keras.backend.backend()
if BACKEND not in ("tensorflow", "jax", "torch"):
    raise UsageError(
        f"the backend of Keras must be tensorflow, jax or torch, got {BACKEND}. Set "
        "KERAS_BACKEND."
    )
front_end: Any = import_module(f"ronde.{BACKEND}")
functions = ValueFunctions(keras, front_end, keras.ops.convert_to_tensor)
