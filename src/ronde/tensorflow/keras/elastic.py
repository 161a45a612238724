"""Elastic training with ``tf.keras``, Keras 2 or 3: state, callbacks, and ``run``."""

from ronde.session.elastic_arrays import KerasState, elastic_callbacks
from ronde.session.frameworks import import_framework
from ronde.tensorflow.elastic import run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

(CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback) = (
    elastic_callbacks(import_framework("tensorflow").keras.callbacks.Callback)
)
