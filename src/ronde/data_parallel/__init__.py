"""Reduction of gradients in buckets over ranks, overlapped with backward."""

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
from ronde.parallel.buckets import (
    ALIGNMENT_BYTES,
    BucketLimits,
    GradientSpec,
    candidate_limits,
    plan_buckets,
)

__all__ = [
    "ALIGNMENT_BYTES",
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
    "candidate_limits",
    "participate_until_all_joined",
    "plan_buckets",
]
