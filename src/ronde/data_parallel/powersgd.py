"""PowerSGD: sends the factors of low-rank approximations, and makes up for the rest.

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
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from ronde.collectives import Communicator, Work
from ronde.collectives.arithmetic import HALVES
from ronde.data_parallel.bucket_reduction import (
    BucketContent,
    BucketReduction,
    CompressingReduction,
    PendingSum,
)
from ronde.data_parallel.buckets import Slot
from ronde.data_parallel.compressor import NoneCompressor
from ronde.data_parallel.gradient import Gradient
from ronde.errors import UsageError


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

    def reduction(self) -> "PowerSGDReduction":
        """Make what sums one reducer's buckets."""
        return PowerSGDReduction(self)

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
        and is a view of the gradient therefore, whatever its layout.

        Returns:
            Rows and columns, or None where a gradient travels as it is.
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


class PowerSGDReduction(BucketReduction):
    """Sums the buckets of one reducer by PowerSGD."""

    def __init__(self, options: PowerSGD) -> None:
        self._options = options
        self._plain = CompressingReduction(NoneCompressor)
        self._memories: dict[Tensor, _Memory | None] = {}
        self._random = torch.Generator().manual_seed(options.seed)

    def launch(self, content: BucketContent, communicator: Communicator) -> PendingSum:
        """Start the sums of the left factors and of what is not compressed."""
        matrices: list[_Matrix] = []
        for slot, gradient in zip(content.slots, content.gradients, strict=True):
            memory = self._memory_of(gradient.parameter)
            if memory is not None and memory.starts_round(self._options):
                matrices.append(_Matrix.of(content.memory, slot, gradient, memory))
        if not matrices:
            return self._plain.launch(content, communicator)
        return _LowRankSum(content.memory, matrices, communicator)

    def _memory_of(self, parameter: Tensor) -> "_Memory | None":
        # Made in the order of the buckets, which is that of all ranks: so every rank
        # draws the same numbers.
        if parameter not in self._memories:
            shape = self._options.shape_of(parameter)
            memory = None
            if shape is not None:
                memory = _Memory.of(parameter, shape, self._options, self._random)
            self._memories[parameter] = memory
        return self._memories[parameter]


@dataclass(slots=True)
class _Memory:
    """What lasts from round to round for one parameter.

    Attributes:
        right: The last Q, (columns, rank).
        error: What this rank did not send yet, (rows, columns).
        num_rounds: Rounds that it took part in.
    """

    right: Tensor
    error: Tensor
    num_rounds: int = 0

    @classmethod
    def of(
        cls,
        parameter: Tensor,
        shape: tuple[int, int],
        options: PowerSGD,
        random: torch.Generator,
    ) -> "_Memory":
        dtype = _factor_dtype(parameter.dtype)
        rank = min(options.rank, *shape)
        right = torch.randn(shape[1], rank, generator=random, dtype=dtype, device="cpu")
        error = torch.zeros(shape, dtype=dtype, device=parameter.device)
        return cls(right.to(parameter.device), error)

    def starts_round(self, options: PowerSGD) -> bool:
        """Count a round, and say whether it is an approximate one."""
        self.num_rounds += 1
        return self.num_rounds > options.num_plain_rounds


@dataclass(slots=True)
class _Matrix:
    """One gradient in one round.

    Attributes:
        start: Where it begins in the bucket.
        stop: Where it ends.
        place: Its elements in the bucket, as a matrix.
        values: M; shares memory with ``place`` where the dtypes are equal.
        left: P.
        memory: Of its parameter.
        was_used: Whether this rank has that gradient; else its error stays for later,
            since a gradient that nobody has is not applied.
    """

    start: int
    stop: int
    place: Tensor
    values: Tensor
    left: Tensor
    memory: _Memory
    was_used: bool

    @classmethod
    def of(
        cls, buffer: Tensor, slot: Slot, gradient: Gradient, memory: _Memory
    ) -> "_Matrix":
        stop = slot.offset + slot.numel
        place = buffer[slot.offset : stop].view(memory.error.shape)
        values = place.to(memory.error.dtype)
        if gradient.was_used:
            values.add_(memory.error)
        left = values @ memory.right
        used = gradient.was_used
        return cls(slot.offset, stop, place, values, left, memory, used)

    def orthonormalize(self, *, is_finite: bool) -> None:
        if is_finite:
            self.left = torch.linalg.qr(self.left).Q
        else:
            self.left = torch.full_like(self.left, math.nan)

    def project(self, *, is_kept: bool) -> Tensor:
        """Return this rank's M' P; keep what that misses, if it is to be kept."""
        right = self.values.T @ self.left
        if is_kept and self.was_used:
            torch.addmm(
                self.values, self.left, right.T, alpha=-1, out=self.memory.error
            )
        return right

    def put_back(self, right: Tensor, *, is_kept: bool) -> None:
        """Make the bucket hold P Q'."""
        if self.values is self.place:
            torch.mm(self.left, right.T, out=self.place)
        else:
            self.place.copy_(self.left @ right.T)
        if is_kept:
            self.memory.right = right


class _LowRankSum(PendingSum):
    def __init__(
        self, buffer: Tensor, matrices: Sequence[_Matrix], communicator: Communicator
    ) -> None:
        self._matrices = matrices
        self._rest = _rest(buffer, matrices)
        self._communicator = communicator
        lefts = [matrix.left.reshape(-1) for matrix in matrices]
        wire = torch.cat([*lefts, *self._rest])
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
        sums = parts[: len(lefts)]
        for matrix, left in zip(self._matrices, sums, strict=True):
            matrix.left = left.view_as(matrix.left)
        for place, part in zip(self._rest, parts[len(lefts) :], strict=True):
            place.copy_(part)
        # Infinite gradients come out as NaN, for whoever looks for them, GradScaler for
        # one; but they must not stay in what lasts.
        num_left = sum(left.numel() for left in lefts)
        self._is_finite = bool(wire[:num_left].isfinite().all())

    def advance(self) -> None:
        if self._second is not None:
            return
        self.arrive()
        rights: list[Tensor] = []
        for matrix in self._matrices:
            matrix.orthonormalize(is_finite=self._is_finite)
            rights.append(matrix.project(is_kept=self._is_finite).reshape(-1))
        self._second = self._communicator.all_reduce(torch.cat(rights))

    def finish(self) -> None:
        self.advance()
        assert self._second is not None  # noqa: S101  advance() has set it
        wire = self._second.wait()
        shapes = [matrix.memory.right.shape for matrix in self._matrices]
        rights = _split(wire, [shape.numel() for shape in shapes])
        for matrix, right, shape in zip(self._matrices, rights, shapes, strict=True):
            matrix.put_back(right.view(shape), is_kept=self._is_finite)


def _rest(buffer: Tensor, matrices: Sequence[_Matrix]) -> list[Tensor]:
    """Return the parts of ``buffer`` between and behind the matrices."""
    bounds = [0, *(bound for m in matrices for bound in (m.start, m.stop))]
    ends = [*bounds[1:], buffer.numel()]
    pairs = list(zip(bounds, ends, strict=True))[::2]
    return [buffer[start:stop] for start, stop in pairs if start < stop]


def _split(wire: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    return cast("tuple[Tensor, ...]", wire.split(sizes))


def _factor_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else dtype
