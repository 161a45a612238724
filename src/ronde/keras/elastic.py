"""Elastic training with Keras 3 on any backend: state, callbacks, and ``run``."""

from importlib import import_module

from ronde.session.elastic_arrays import KerasState, elastic_callbacks
from ronde.session.frameworks import import_framework

keras = import_framework("keras")

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

(CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback) = (
    elastic_callbacks(keras.callbacks.Callback)
)

# The backend's own errors differ.
run = import_module(f"ronde.{keras.backend.backend()}.elastic").run
