"""How a reducer reduces."""

from dataclasses import dataclass, field

from ronde.data_parallel.bucket_tuning import BucketTuningOptions
from ronde.data_parallel.buckets import BucketLimits
from ronde.data_parallel.compression import GradientCompression, NoneCompressor
from ronde.data_parallel.gradient import Scaling


@dataclass(frozen=True, slots=True)
class ReducerOptions:
    """How gradients are reduced.

    Attributes:
        is_average: Average over ranks, else sum.
        predivide: Part of the average's divisor that is applied before the sum.
        passes: Backward passes to accumulate before a reduction.
        is_passes_average: Divide by ``passes`` too.
        compressor: What travels.
        limits: Bucket sizes.
        is_fusing: Have backward write large weight gradients into their buckets, where
            nobody can see a difference: see ``fusion``.
        tuning: How to find better ones than ``limits``; None keeps those.
        groups: Indices of gradients that must be reduced together.
        is_sparse_densified: Reduce sparse gradients as dense ones.
    """

    is_average: bool = True
    predivide: float = 1.0
    passes: int = 1
    is_passes_average: bool = False
    compressor: GradientCompression = NoneCompressor
    limits: BucketLimits = field(default_factory=BucketLimits)
    groups: tuple[tuple[int, ...], ...] = ()
    is_sparse_densified: bool = False
    is_fusing: bool = True
    tuning: BucketTuningOptions | None = None

    def scaling(self, size: int) -> Scaling:
        """Return the factors for ``size`` ranks."""
        return Scaling.of(
            size,
            is_average=self.is_average,
            predivide=self.predivide,
            passes=self.passes if self.is_passes_average else 1,
        )
