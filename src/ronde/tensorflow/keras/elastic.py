"""Elastic training with ``tf.keras``, Keras 2 or 3: state, callbacks, and ``run``."""

from ronde.session import elastic_arrays
from ronde.tensorflow import elastic
from ronde.tensorflow.elastic import tf

KerasState, run = elastic_arrays.KerasState, elastic.run
globals().update(elastic_arrays.elastic_callbacks(tf.keras.callbacks.Callback))
