"""Parameters to buckets to reductions, overlapped with backward."""

from ronde.data_parallel.bond import Bond, Connector, Key
from ronde.data_parallel.bucket_tuning import BucketTuningOptions
from ronde.data_parallel.buckets import BucketLimits, GradientSpec, plan_buckets
from ronde.data_parallel.compression import (
    Compression,
    Compressor,
    GradientCompression,
    PowerSGD,
)
from ronde.data_parallel.options import ReducerOptions
from ronde.data_parallel.reducer import Reducer
from ronde.data_parallel.shadows import Follower, Standing, keep_up_until

__all__ = [
    "Bond",
    "BucketLimits",
    "BucketTuningOptions",
    "Compression",
    "Compressor",
    "Connector",
    "Follower",
    "GradientCompression",
    "GradientSpec",
    "Key",
    "PowerSGD",
    "Reducer",
    "ReducerOptions",
    "Standing",
    "keep_up_until",
    "plan_buckets",
]
