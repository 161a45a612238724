"""The front end of Keras 3, on its three backends, with Horovod's API.

``import ronde.keras as hvd`` replaces ``import horovod.keras as hvd``. Optimizers of
tf-keras (Keras 2) are handed to ``ronde.tensorflow.keras``.
"""

from ronde.keras.functions import exports_of

# Lazy, as ``ronde.tensorflow.keras`` uses modules of this package without Keras 3.
__getattr__ = exports_of(__name__, "backends")
