"""The front end of ``tf.keras``, with Horovod's API.

``tf.keras`` is Keras 2 (tf-keras) if ``TF_USE_LEGACY_KERAS=1``, otherwise Keras 3.
Optimizers of both are accepted.
"""

from ronde.keras.functions import exports_of

__getattr__ = exports_of(__name__, "optimizer")
