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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor

from ronde.collectives import Communicator, ReduceOp, Work
from ronde.collectives.arithmetic import HALVES
from ronde.data_parallel.bucket import Gradient, GradientBucket, Sum
from ronde.data_parallel.buckets import Slot
from ronde.errors import UsageError


class Compressor(Protocol):
    """A pair of static functions; any class that has them serves.

    Both must be deterministic and keep the number of elements.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what travels, and what ``decompress`` needs."""
        ...

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:  # noqa: ANN401 - the user's own
        """Turn the reduced ``tensor`` back into the original dtype."""
        ...


class NoneCompressor:
    """Send gradients as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: None) -> Tensor:  # noqa: ARG004 - the interface
        return tensor


class _CastCompressor:
    wire_dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Cast floating point to the wire's dtype; leave the rest alone."""
        wire = tensor.to(cls.wire_dtype) if tensor.is_floating_point() else tensor
        return wire, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Send floating point as float16: half the bytes, range up to 65504."""

    wire_dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Send floating point as bfloat16: half the bytes, float32's range, 8 bits."""

    wire_dtype = torch.bfloat16


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """Low-rank gradients with error feedback; equal on all ranks.

    Takes memory for one more copy of the gradients that it compresses; float16 and
    bfloat16 ones are kept and sent in float32. What was not sent yet is no part of the
    optimizer's ``state_dict()``. Vectors, scalars and complex gradients travel as they
    are.

    Attributes:
        rank: Columns of the factors: more are closer to the gradient, and cost more.
        num_plain_rounds: Exact reductions of a parameter before its first approximate
            one. The first gradients of a training change fastest.
        min_saving: How many times fewer bytes the factors must be than the gradient.
        seed: Of the first factors.
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
        """Refuse: a single call has no next step to make up for what is missed."""
        raise UsageError(
            "compression must be none, fp16, bf16 or a class with compress and "
            f"decompress here, got {self} for a tensor of shape "
            f"{tuple(tensor.shape)}. Give it to DistributedOptimizer."
        )

    def shape_of(self, parameter: Tensor) -> tuple[int, int] | None:
        """Return the shape of the matrix that a gradient is unfolded into, or None.

        It has one row for each index of the dimension that lies outermost in memory,
        and is a view of the gradient therefore, whatever its layout.
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


def sum_by(
    compression: GradientCompression,
) -> Callable[[GradientBucket, Communicator], Sum]:
    """Make what sums the buckets of one reducer."""
    if isinstance(compression, PowerSGD):
        return _LowRankSums(compression).sum
    if hasattr(compression, "compress") and hasattr(compression, "decompress"):
        return partial(_sum_compressed, compression)
    raise UsageError(
        "compression must be Compression.none, fp16, bf16, powersgd(rank=4) or a class "
        f"with compress and decompress, got {compression!r}. Choose one of these."
    )


def _sum_compressed(
    compressor: type[Compressor], bucket: GradientBucket, communicator: Communicator
) -> Sum:
    """Sum what a compressor makes of a whole bucket.

    The control numbers travel with the values where the compressor is one of ours,
    which keep small integers. What a user's own makes of them nobody knows: they travel
    by themselves then, and also where only the values are to be scaled.
    """
    prescale, values = bucket.prescale, bucket.values
    works: list[Work[Tensor]] = []
    is_ours = compressor in (NoneCompressor, FP16Compressor, BF16Compressor)
    if is_ours and prescale is None:
        values = bucket.memory
    else:
        works.append(communicator.all_reduce(bucket.control, ReduceOp.SUM))
        if not values.numel():
            compressor = NoneCompressor
    context: Any
    wire, context = compressor.compress(values)
    works.append(communicator.all_reduce(wire, ReduceOp.SUM, prescale=prescale or 1.0))
    yield works if values.is_cpu else ()
    results = [work.wait() for work in works]
    result = compressor.decompress(results[-1], context)
    if result is not values:
        values.copy_(result)
    yield ()


@dataclass(slots=True)
class _Factors:
    """What lasts from round to round for one parameter."""

    right: Tensor  # the last Q, (columns, rank)
    error: Tensor  # what this rank did not send yet, (rows, columns)
    num_rounds: int = 0


class _LowRankSums:
    """Sums the buckets of one reducer by PowerSGD."""

    def __init__(self, options: PowerSGD) -> None:
        self._options = options
        self._factors: dict[Tensor, _Factors | None] = {}
        self._random = torch.Generator().manual_seed(options.seed)

    def sum(self, bucket: GradientBucket, communicator: Communicator) -> Sum:
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
            return _sum_compressed(NoneCompressor, bucket, communicator)
        return _sum_low_rank(bucket.memory, matrices, communicator)

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
    """One gradient in one round: ``values`` is M, ``left`` P.

    ``place`` is its elements in the bucket as a matrix, the memory of ``values`` too
    where the dtypes are equal. Where this rank has no such gradient its error stays for
    later, since a gradient that nobody has is not applied.
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


def _sum_low_rank(
    buffer: Tensor, matrices: Sequence[_Matrix], communicator: Communicator
) -> Sum:
    # The parts between and behind the matrices.
    bounds = [0, *(bound for m in matrices for bound in (m.start, m.stop))]
    ends = [*bounds[1:], buffer.numel()]
    pairs = list(zip(bounds, ends, strict=True))[::2]
    rest = [buffer[start:stop] for start, stop in pairs if start < stop]
    wire = torch.cat([*(m.left.reshape(-1) for m in matrices), *rest])
    work = communicator.all_reduce(wire)
    yield (work,) if wire.is_cpu else ()
    wire = work.wait()
    lefts = [matrix.left for matrix in matrices]
    parts = _split(wire, [part.numel() for part in [*lefts, *rest]])
    for matrix, left in zip(matrices, parts, strict=False):
        matrix.left = left.view_as(matrix.left)
    for place, part in zip(rest, parts[len(lefts) :], strict=True):
        place.copy_(part)
    # Infinite gradients come out as NaN, for whoever looks for them, GradScaler for
    # one; but they must not stay in what lasts.
    num_left = sum(left.numel() for left in lefts)
    is_finite = bool(wire[:num_left].isfinite().all())
    yield ()
    rights = [m.project(is_finite=is_finite) for m in matrices]
    work = communicator.all_reduce(torch.cat([right.reshape(-1) for right in rights]))
    yield (work,) if wire.is_cpu else ()
    summed = _split(work.wait(), [right.numel() for right in rights])
    for matrix, right in zip(matrices, summed, strict=True):
        shape = matrix.factors.right.shape
        matrix.put_back(right.view(shape), is_finite=is_finite)


def _split(wire: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    return cast("tuple[Tensor, ...]", wire.split(sizes))


def _factor_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else dtype
