"""The compressors by the names that Horovod gives them."""

from ronde.data_parallel.bucket_reduction import BucketReduction, CompressingReduction
from ronde.data_parallel.compressor import (
    BF16Compressor,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)
from ronde.data_parallel.powersgd import PowerSGD

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
    """Make what sums the buckets of one reducer."""
    if isinstance(compression, PowerSGD):
        return compression.reduction()
    return CompressingReduction(compression)
