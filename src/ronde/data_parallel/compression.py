"""What gradients are sent as, by the names that Horovod gives it, and PowerSGD.

Note [A round of PowerSGD]
    A gradient is unfolded into a matrix M (m x n). With Q (n x r) left from the round
    before, and sums over ranks:

        M <- gradient + error        P <- sum of M Q        orthonormalize P
        error <- M - P (M' P)'       Q <- sum of M' P       gradient <- P Q'

    So r (m + n) numbers travel instead of m n, in sums: all P of a bucket in one
    collective, with what is not compressed, and all Q in a second one. One step of
    power iteration a round suffices, since gradients change slowly. What it misses
    stays in ``error``, on each rank its own part, and enters the next round.

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
from ronde.data_parallel.buckets import GradientBucket, Slot, Sum
from ronde.errors import UsageError


class Compressor(Protocol):
    """Two static functions, deterministic; they keep the number of elements."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what travels, and what ``decompress`` needs."""
        ...

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor: ...  # noqa: ANN401 - the user's


class NoneCompressor:
    """Send gradients as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: None) -> Tensor:  # noqa: ARG004 - the interface
        return tensor


class FP16Compressor:
    """Send floating point as float16: half the bytes, range up to 65504."""

    wire_dtype = torch.float16

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        wire = tensor.to(cls.wire_dtype) if tensor.is_floating_point() else tensor
        return wire, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Send floating point as bfloat16: half the bytes, float32's range, 8 bits."""

    wire_dtype = torch.bfloat16


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """Low-rank gradients with error feedback; equal on all ranks.

    Takes memory for one more copy of the gradients that it compresses; float16 and
    bfloat16 ones are kept and sent in float32. What was not sent yet is no part of the
    ``state_dict()``. Vectors, scalars and complex gradients travel as they are.

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
        for name, least in (("rank", 1), ("num_plain_rounds", 0)):
            if (value := getattr(self, name)) < least:
                raise UsageError(f"{name} must be >= {least}, got {value}.")
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
        """Return the shape of the matrix that a gradient is unfolded into, or None."""
        real = [d for d in range(parameter.dim()) if parameter.shape[d] > 1]
        if not parameter.is_floating_point() or not parameter.numel() or len(real) < 2:
            return None
        # A row for each index of the dimension that lies outermost in memory: so it is
        # a view of the gradient, whatever its layout.
        strides = torch.empty_like(parameter, device="meta").stride()
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
    compression: GradientCompression, unsent: dict[Tensor, Tensor]
) -> Callable[[GradientBucket, Communicator], Sum]:
    """Return a function that sums buckets, and keeps its errors in ``unsent``."""
    if isinstance(compression, PowerSGD):
        return _LowRankSums(compression, unsent).sum
    if hasattr(compression, "compress") and hasattr(compression, "decompress"):
        return partial(_sum_compressed, compression)
    raise UsageError(
        "compression must be Compression.none, fp16, bf16, powersgd(rank=4) or a class "
        f"with compress and decompress, got {compression!r}. Choose one of these."
    )


def _sum_compressed(
    compressor: type[Compressor], bucket: GradientBucket, communicator: Communicator
) -> Sum:
    """Sum what a compressor makes of a whole bucket."""
    # Control numbers travel with the values where the compressor is one of ours, which
    # keep small integers; not where only the values are to be scaled.
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


class _LowRankSums:
    """Sums the buckets of one reducer by PowerSGD."""

    def __init__(self, options: PowerSGD, unsent: dict[Tensor, Tensor]) -> None:
        self._options, self._unsent = options, unsent
        self._factors: dict[Tensor, _Matrix | None] = {}
        self._random = torch.Generator().manual_seed(options.seed)

    def sum(self, bucket: GradientBucket, communicator: Communicator) -> Sum:
        matrices: list[_Matrix] = []
        for slot, gradient in zip(bucket.slots, bucket.gradients, strict=True):
            # Made in the order of the buckets, which is that of all ranks: so every
            # rank draws the same numbers.
            parameter = gradient.parameter
            if parameter not in self._factors:
                self._factors[parameter] = self._make(parameter)
            matrix = self._factors[parameter]
            if matrix is not None:
                matrix.num_rounds += 1
                if matrix.num_rounds > self._options.num_plain_rounds:
                    matrix.begin(bucket.memory, slot, was_used=gradient.was_used)
                    matrices.append(matrix)
        if not matrices:
            return _sum_compressed(NoneCompressor, bucket, communicator)
        return _sum_low_rank(bucket.memory, matrices, communicator)

    def _make(self, parameter: Tensor) -> "_Matrix | None":
        shape = self._options.shape_of(parameter)
        if shape is None:
            return None
        dtype, rank = _factor_dtype(parameter.dtype), min(self._options.rank, *shape)
        right = torch.randn(
            shape[1], rank, generator=self._random, dtype=dtype, device="cpu"
        )
        error = torch.zeros(shape, dtype=dtype, device=parameter.device)
        self._unsent[parameter] = error
        return _Matrix(right.to(parameter.device), error)


class _Matrix:
    """One parameter's gradient in the round under way, and what lasts between rounds.

    Where this rank has no such gradient its error stays: it may not be applied.
    """

    slot: Slot
    place: Tensor  # the gradient's elements in the bucket, as a matrix
    values: Tensor  # M; the memory of ``place`` where the dtypes are equal
    left: Tensor  # P

    def __init__(self, right: Tensor, error: Tensor) -> None:
        self.right, self.error = right, error
        self.num_rounds = 0
        self._was_used = False

    def begin(self, buffer: Tensor, slot: Slot, *, was_used: bool) -> None:
        self.slot, self._was_used = slot, was_used
        self.place = buffer[slot.offset : slot.offset + slot.numel].view_as(self.error)
        self.values = self.place.to(self.error.dtype)
        if was_used:
            self.values.add_(self.error)
        self.left = self.values @ self.right

    def project(self, *, is_finite: bool) -> Tensor:
        """Return this rank's M' P; keep what that misses."""
        if not is_finite:
            self.left = torch.full_like(self.left, math.nan)
            return self.values.T @ self.left
        self.left = cast("Tensor", torch.linalg.qr(self.left).Q)
        right = self.values.T @ self.left
        if self._was_used:
            torch.addmm(self.values, self.left, right.T, alpha=-1, out=self.error)
        return right

    def put_back(self, right: Tensor, *, is_finite: bool) -> None:
        if self.values is self.place:
            torch.mm(self.left, right.T, out=self.place)
        else:
            self.place.copy_(self.left @ right.T)
        if is_finite:
            self.right = right
        del self.place, self.values, self.left


def _sum_low_rank(
    buffer: Tensor, matrices: Sequence[_Matrix], communicator: Communicator
) -> Sum:
    rest: list[Tensor] = []  # the parts between and behind the matrices
    start = 0
    for slot in [each.slot for each in matrices]:
        rest.append(buffer[start : slot.offset])
        start = slot.offset + slot.numel
    rest.append(buffer[start:])
    lefts = [matrix.left for matrix in matrices]
    work = communicator.all_reduce(_joined([*lefts, *rest]))
    yield (work,) if buffer.is_cpu else ()
    parts = _split(work.wait(), [*lefts, *rest])
    for matrix, left in zip(matrices, parts, strict=False):
        matrix.left = left
    for place, part in zip(rest, parts[len(lefts) :], strict=True):
        place.copy_(part)
    # Infinite gradients come out as NaN, for whoever looks for them, GradScaler for
    # one; but they must not stay in what lasts.
    is_finite = bool(_joined(parts[: len(lefts)]).isfinite().all())
    yield ()
    rights = [matrix.project(is_finite=is_finite) for matrix in matrices]
    work = communicator.all_reduce(_joined(rights))
    yield (work,) if buffer.is_cpu else ()
    for matrix, right in zip(matrices, _split(work.wait(), rights), strict=True):
        matrix.put_back(right, is_finite=is_finite)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _split(wire: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = cast("tuple[Tensor, ...]", wire.split([part.numel() for part in like]))
    return [part.view_as(old) for part, old in zip(parts, like, strict=True)]


def _factor_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else dtype
