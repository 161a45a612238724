"""Elastic training with Keras 3 on any backend: state, callbacks, and ``run``."""

from importlib import import_module

from ronde.session import elastic_arrays
from ronde.session.frameworks import import_framework

keras = import_framework("keras")
KerasState = elastic_arrays.KerasState
globals().update(elastic_arrays.elastic_callbacks(keras.callbacks.Callback))
# The backend's own errors differ.
run = import_module(f"ronde.{keras.backend.backend()}.elastic").run
