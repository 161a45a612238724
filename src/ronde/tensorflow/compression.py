"""Compression of TensorFlow's tensors for sending, with Horovod's names."""

from typing import Any

from ronde.tensorflow.operations import tf

Tensor = Any


class _None:
    """Sends tensors unchanged."""

    wire_dtype: Any = None

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and its dtype if that has changed."""
        wire = cls.wire_dtype
        if wire is None or not tensor.dtype.is_floating or tensor.dtype == wire:
            return tensor, None
        return tf.cast(tensor, wire), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return a received tensor in its former dtype."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class _FP16(_None):
    """Sends floating-point tensors as float16; values above 65504 overflow."""

    wire_dtype = tf.float16


class _BF16(_None):
    """Sends floating-point tensors as bfloat16, with 8 bits of precision."""

    wire_dtype = tf.bfloat16


class Compression:
    """The formats for sending tensors."""

    none = _None
    fp16 = _FP16
    bf16 = _BF16
