"""Reduction of gradients in buckets over ranks, overlapped with backward."""

from ronde.data_parallel.buckets import (
    BucketLimits,
    GradientSpec,
    plan_buckets,
)
from ronde.data_parallel.compression import Compression, Compressor
from ronde.data_parallel.group import (
    GroupConnector,
    JoinParticipant,
    ReducerGroup,
    ReducerKey,
    participate_until_all_joined,
)
from ronde.data_parallel.reducer import Reducer
from ronde.data_parallel.rounds import ReducerOptions
from ronde.lazy_exports import lazy_exports

__all__ = [
    "BucketLimits",
    "Compression",
    "Compressor",
    "GradientSpec",
    "GroupConnector",
    "JoinParticipant",
    "Reducer",
    "ReducerGroup",
    "ReducerKey",
    "ReducerOptions",
    "participate_until_all_joined",
    "plan_buckets",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "buckets": "ALIGNMENT_BYTES candidate_limits",
    },
)
