"""Parameters to buckets to reductions, overlapped with backward."""

from ronde.data_parallel.buckets import BucketLimits, GradientSpec, plan_buckets
from ronde.data_parallel.compression import (
    Compression,
    Compressor,
    GradientCompression,
    PowerSGD,
)
from ronde.data_parallel.reducer import Reducer, ReducerOptions

__all__ = [
    "BucketLimits",
    "Compression",
    "Compressor",
    "GradientCompression",
    "GradientSpec",
    "PowerSGD",
    "Reducer",
    "ReducerOptions",
    "plan_buckets",
]
