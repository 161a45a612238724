"""What gradients are sent as, by the names that Horovod gives it, and PowerSGD.

Note [A round of PowerSGD]
    A gradient is unfolded into a matrix M (m x n). With Q (n x r) left from the round
    before, and sums over ranks:

        M <- gradient + error        P <- sum of M Q        orthonormalize P
        error <- M - P (M' P)'       Q <- sum of M' P       gradient <- P Q'

    So r (m + n) numbers travel instead of m n, in sums, which any all-reduce makes.
    One step of power iteration a round suffices, since gradients change slowly. What
    the approximation misses stays in ``error``, on each rank its own part, and enters
    the next round: nothing is lost, only late.

    All P of a bucket travel in one collective, with what is not compressed, and all Q
    in a second one.

    Source: Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient
    Compression for Distributed Optimization. NeurIPS 2019, algorithms 1 and 2.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from ronde.collectives import Communicator, Work
from ronde.collectives.arithmetic import HALVES
from ronde.data_parallel.bucket import (
    BF16Compressor,
    CompressedSum,
    Compressor,
    FP16Compressor,
    Gradient,
    GradientBucket,
    NoneCompressor,
    PendingSum,
    SumBucket,
)
from ronde.data_parallel.buckets import Slot
from ronde.errors import UsageError

__all__ = [
    "BF16Compressor",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "GradientCompression",
    "NoneCompressor",
    "PowerSGD",
    "sum_by",
]


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """Low-rank gradients with error feedback; equal on all ranks.

    Takes memory for one more copy of the gradients that it compresses; float16 and
    bfloat16 ones are kept and sent in float32. What was not sent yet is no part of the
    optimizer's ``state_dict()``.

    Attributes:
        rank: Columns of the factors: more are closer to the gradient, and cost more.
        num_plain_rounds: Reductions of a parameter that are exact, before its first
            approximate one. The first gradients of a training change fastest.
        min_saving: How many times fewer bytes the factors must be; what saves less
            travels as it is. So do vectors, scalars, and complex gradients.
        seed: Of the first factors.

    Raises:
        UsageError: A value is out of range.
    """

    rank: int = 4
    num_plain_rounds: int = 0
    min_saving: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(f"rank must be >= 1, got {self.rank}.")
        if self.num_plain_rounds < 0:
            raise UsageError(
                f"num_plain_rounds must be >= 0, got {self.num_plain_rounds}."
            )
        if not 1.0 <= self.min_saving < math.inf:
            raise UsageError(
                f"min_saving must be a finite number >= 1, got {self.min_saving}."
            )

    def compress(self, tensor: Tensor) -> NoReturn:
        """Refuse: a single call has no next step to make up for what is missed.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "compression must be none, fp16, bf16 or a class with compress and "
            f"decompress here, got {self} for a tensor of shape "
            f"{tuple(tensor.shape)}. Give it to DistributedOptimizer."
        )

    def shape_of(self, parameter: Tensor) -> tuple[int, int] | None:
        """Return the shape of the matrix that a gradient is unfolded into.

        It has one row for each index of the dimension that lies outermost in memory,
        and is a view of the gradient therefore, whatever its layout. None where a
        gradient travels as it is.
        """
        if not parameter.is_floating_point() or parameter.numel() == 0:
            return None
        strides = torch.empty_like(parameter, device="meta").stride()
        real = [d for d in range(parameter.dim()) if parameter.shape[d] > 1]
        if len(real) < 2:
            return None
        num_rows = parameter.shape[max(real, key=lambda d: strides[d])]
        num_columns = parameter.numel() // num_rows
        rank = min(self.rank, num_rows, num_columns)
        num_sent = rank * (num_rows + num_columns)
        sent_bytes = num_sent * _factor_dtype(parameter.dtype).itemsize
        plain_bytes = parameter.numel() * parameter.element_size()
        if sent_bytes * self.min_saving > plain_bytes:
            return None
        return num_rows, num_columns


GradientCompression = type[Compressor] | PowerSGD
"""What an optimizer can send its gradients by."""


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


def sum_by(compression: GradientCompression) -> SumBucket:
    """Make what sums the buckets of one reducer.

    Raises:
        UsageError: ``compression`` is none of those.
    """
    if isinstance(compression, PowerSGD):
        return _LowRankSums(compression).start
    if hasattr(compression, "compress") and hasattr(compression, "decompress"):
        return partial(CompressedSum, compression)
    raise UsageError(
        "compression must be Compression.none, fp16, bf16, powersgd(rank=4) or a class "
        f"with compress and decompress, got {compression!r}. Choose one of these."
    )


@dataclass(slots=True)
class _Factors:
    """What lasts from round to round for one parameter.

    Attributes:
        right: The last Q, (columns, rank).
        error: What this rank did not send yet, (rows, columns).
    """

    right: Tensor
    error: Tensor
    num_rounds: int = 0


class _LowRankSums:
    """Sums the buckets of one reducer by PowerSGD."""

    def __init__(self, options: PowerSGD) -> None:
        self._options = options
        self._factors: dict[Tensor, _Factors | None] = {}
        self._random = torch.Generator().manual_seed(options.seed)

    def start(self, bucket: GradientBucket, communicator: Communicator) -> PendingSum:
        """Start the sums of the left factors and of what is not compressed."""
        matrices: list[_Matrix] = []
        for slot, gradient in zip(bucket.slots, bucket.gradients, strict=True):
            # Made in the order of the buckets, which is that of all ranks: so every
            # rank draws the same numbers.
            if gradient.parameter not in self._factors:
                self._factors[gradient.parameter] = self._make(gradient.parameter)
            factors = self._factors[gradient.parameter]
            if factors is not None:
                factors.num_rounds += 1
                if factors.num_rounds > self._options.num_plain_rounds:
                    matrix = _Matrix(bucket.memory, slot, gradient, factors)
                    matrices.append(matrix)
        if not matrices:
            return CompressedSum(NoneCompressor, bucket, communicator)
        return _LowRankSum(bucket.memory, matrices, communicator)

    def _make(self, parameter: Tensor) -> _Factors | None:
        shape = self._options.shape_of(parameter)
        if shape is None:
            return None
        dtype, rank = _factor_dtype(parameter.dtype), min(self._options.rank, *shape)
        right = torch.randn(
            shape[1], rank, generator=self._random, dtype=dtype, device="cpu"
        )
        error = torch.zeros(shape, dtype=dtype, device=parameter.device)
        return _Factors(right.to(parameter.device), error)


class _Matrix:
    """One gradient in one round.

    Attributes:
        place: Its elements in the bucket, from ``start`` to ``stop``, as a matrix.
        values: M; shares memory with ``place`` where the dtypes are equal.
        left: P.
        was_used: Whether this rank has that gradient; else its error stays for later,
            since a gradient that nobody has is not applied.
    """

    def __init__(
        self, buffer: Tensor, slot: Slot, gradient: Gradient, factors: _Factors
    ) -> None:
        self.start, self.stop = slot.offset, slot.offset + slot.numel
        self.place = buffer[self.start : self.stop].view(factors.error.shape)
        self.values = self.place.to(factors.error.dtype)
        self.was_used = gradient.was_used
        if self.was_used:
            self.values.add_(factors.error)
        self.left = self.values @ factors.right
        self.factors = factors

    def project(self, *, is_finite: bool) -> Tensor:
        """Return this rank's M' P, P orthonormal; keep what that misses."""
        if not is_finite:
            self.left = torch.full_like(self.left, math.nan)
            return self.values.T @ self.left
        self.left = cast("Tensor", torch.linalg.qr(self.left).Q)
        right = self.values.T @ self.left
        if self.was_used:
            error = self.factors.error
            torch.addmm(self.values, self.left, right.T, alpha=-1, out=error)
        return right

    def put_back(self, right: Tensor, *, is_finite: bool) -> None:
        """Make the bucket hold P Q'."""
        if self.values is self.place:
            torch.mm(self.left, right.T, out=self.place)
        else:
            self.place.copy_(self.left @ right.T)
        if is_finite:
            self.factors.right = right


class _LowRankSum(PendingSum):
    def __init__(
        self, buffer: Tensor, matrices: Sequence[_Matrix], communicator: Communicator
    ) -> None:
        self._matrices = matrices
        # The parts between and behind the matrices.
        bounds = [0, *(bound for m in matrices for bound in (m.start, m.stop))]
        ends = [*bounds[1:], buffer.numel()]
        pairs = list(zip(bounds, ends, strict=True))[::2]
        self._rest = [buffer[start:stop] for start, stop in pairs if start < stop]
        self._communicator = communicator
        wire = torch.cat([*(m.left.reshape(-1) for m in matrices), *self._rest])
        self._is_cpu = wire.is_cpu
        self._first: Work[Tensor] | None = communicator.all_reduce(wire)
        self._second: Work[Tensor] | None = None
        self._is_finite = True

    def works(self) -> Iterable[Work[Any]]:
        work = self._second if self._first is None else self._first
        return (work,) if work is not None and self._is_cpu else ()

    def arrive(self) -> None:
        if self._first is None:
            return
        wire = self._first.wait()
        self._first = None
        lefts = [matrix.left for matrix in self._matrices]
        parts = _split(wire, [part.numel() for part in [*lefts, *self._rest]])
        for matrix, left in zip(self._matrices, parts, strict=False):
            matrix.left = left.view_as(matrix.left)
        for place, part in zip(self._rest, parts[len(lefts) :], strict=True):
            place.copy_(part)
        # Infinite gradients come out as NaN, for whoever looks for them, GradScaler for
        # one; but they must not stay in what lasts.
        num_left = sum(left.numel() for left in lefts)
        self._is_finite = bool(wire[:num_left].isfinite().all())

    def advance(self) -> None:
        self._start_second()

    def _start_second(self) -> Work[Tensor]:
        if self._second is None:
            self.arrive()
            is_finite = self._is_finite
            rights = [m.project(is_finite=is_finite) for m in self._matrices]
            wire = torch.cat([right.reshape(-1) for right in rights])
            self._second = self._communicator.all_reduce(wire)
        return self._second

    def finish(self) -> None:
        wire = self._start_second().wait()
        shapes = [matrix.factors.right.shape for matrix in self._matrices]
        rights = _split(wire, [shape.numel() for shape in shapes])
        for matrix, right, shape in zip(self._matrices, rights, shapes, strict=True):
            matrix.put_back(right.view(shape), is_finite=self._is_finite)


def _split(wire: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    return cast("tuple[Tensor, ...]", wire.split(sizes))


def _factor_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else dtype
