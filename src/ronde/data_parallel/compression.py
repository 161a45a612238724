"""The compressors by the names that Horovod gives them."""

from ronde.data_parallel.bucket_reduction import BucketReduction, CompressingReduction
from ronde.data_parallel.compressor import (
    BF16Compressor,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)
from ronde.data_parallel.powersgd import PowerSGD
from ronde.errors import UsageError

__all__ = [
    "BF16Compressor",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "GradientCompression",
    "NoneCompressor",
    "PowerSGD",
    "reduction_of",
]

GradientCompression = type[Compressor] | PowerSGD
"""What an optimizer may be told to send its gradients by."""


class Compression:
    """What travels instead of a gradient.

    ==================  ==========================================================
    ``none``            the gradient itself
    ``fp16``            float16: half of float32's bytes; what exceeds 65504 becomes
                        infinite, what is below 6e-8 zero
    ``bf16``            bfloat16: half the bytes, float32's range, 8 bits of mantissa
    ``powersgd(rank)``  the factors of a low-rank approximation; what it misses is
                        added to the next step's gradient. For ``DistributedOptimizer``
    ==================  ==========================================================
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    powersgd = PowerSGD


def reduction_of(compression: GradientCompression) -> BucketReduction:
    """Make what sums the buckets of one reducer.

    Raises:
        UsageError: ``compression`` is none of those.
    """
    if isinstance(compression, PowerSGD):
        return compression.reduction()
    if hasattr(compression, "compress") and hasattr(compression, "decompress"):
        return CompressingReduction(compression)
    raise UsageError(
        "compression must be Compression.none, fp16, bf16, powersgd(rank=4) or a class "
        f"with compress and decompress, got {compression!r}. Choose one of these."
    )
