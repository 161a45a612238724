"""Batch normalization over the batches of all ranks."""

from typing import Any

from ronde.errors import UsageError
from ronde.session.frameworks import import_framework
from ronde.session.operations import Sum
from ronde.session.session import size
from ronde.tensorflow.mpi_ops import _allreduce  # pyright: ignore[reportPrivateUsage]

tf = import_framework("tensorflow")
_BatchNormalization: Any = tf.keras.layers.BatchNormalization  # of Keras 2 or 3
_IS_KERAS_2 = hasattr(_BatchNormalization, "_fused_batch_norm")


class SyncBatchNormalization(_BatchNormalization):
    """Batch normalization with statistics computed over the batches of all ranks.

    The numbers of rows may differ from rank to rank, down to 0. In training, all ranks
    must run the layer the same number of times.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise UsageError("SyncBatchNormalization does not support fused=True.")
        if _IS_KERAS_2:
            kwargs["fused"] = False
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the mean and the variance of each channel; collective.

        One reduction sums the ranks' counts, means times counts, and mean squares times
        counts, in float64, so that a large mean does not cost precision.
        """
        base: Any = super()
        moments: Any = base._moments(inputs, *args, **kwargs)
        if size() == 1:
            return moments
        mean, variance = (tf.cast(each, tf.float64) for each in moments)
        count = tf.cast(tf.size(inputs) / tf.size(mean), tf.float64)
        mask = kwargs.get("mask") if _IS_KERAS_2 else args[0]
        if mask is not None:
            count *= tf.reduce_mean(tf.cast(mask, tf.float64))
        terms = [mean, variance + tf.square(mean)]
        terms = [tf.math.multiply_no_nan(each, count) for each in terms]
        stacked = tf.stack([*terms, tf.broadcast_to(count, tf.shape(mean))])
        mean, squares, count = tf.unstack(_allreduce(stacked, op=Sum))
        mean, squares = mean / count, squares / count
        variance = tf.maximum(squares - tf.square(mean), 0.0)
        return tf.cast(mean, moments[0].dtype), tf.cast(variance, moments[1].dtype)
