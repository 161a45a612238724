"""Verification of results against their exact values.

Inputs are pure functions of (seed, rank, index): every rank can compute any part of any
rank's input and of any result. A result is a list of pieces, each a part of one rank's
input or the reduction of all inputs. Before the operation every element of the result
is set to the complement of the right value, so that an unwritten element is wrong. The
bytes on both sides of the result are checked, too.

Note [Exact results]. A floating-point reduction depends on its order unless no partial
result is rounded. So the inputs are chosen as follows:

* Sums add integers whose magnitudes total at most 2**p, where p is the number of bits
  of the significand. So every partial sum is an integer of at most 2**p. At most
  2**(p-2) ranks, chosen anew for each element, contribute to it; the others give +0.
  All contributions to an element have the same sign, so that the sum is not zero.
* Products multiply one random significand by powers of two, which change only the
  exponent. The exponents add up to less than the type's largest exponent.
* Averages use the inputs of sums if the number of ranks is a power of two, as the
  division is exact then. Otherwise two ranks contribute, and the last bits may differ:
  see ``TOLERANCE``.
* Integer results do not depend on the order, as integers wrap. Factors are odd, as a
  product with many even factors is zero. Averages use small numbers, as engines may or
  may not wrap the sum.
* Copies use random bytes, which include NaN with payloads.

Every number depends on rank and index, so that swapped chunks are detected.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ronde.bench.catalog import DType, premultiplier
from ronde.bench.operations import CallSpec, Views

REDUCED = -1  # as ``source``: the reduction of all ranks' elements
_ROOT_ONLY = frozenset({"reduce", "gather"})


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of a rank's result that come from the same source."""

    start: int  # first index in the result
    count: int  # number of elements
    source: int  # the rank whose input is copied, or ``REDUCED``
    source_start: int  # first index in the input


def pieces_of(spec: CallSpec) -> list[Piece]:
    """Return the pieces of this rank's result; none if it has no result."""
    name, rank, size, count = spec.test.name, spec.rank, spec.size, spec.shape.count
    if name in _ROOT_ONLY and rank != spec.root:
        return []
    match name:
        case "all_reduce" | "reduce":
            pieces = [Piece(0, count, REDUCED, 0)]
        case "reduce_scatter":
            pieces = [Piece(0, count, REDUCED, rank * count)]
        case "broadcast":
            pieces = [Piece(0, count, spec.root, 0)]
        case "all_gather" | "hypercube" | "gather":
            pieces = [Piece(s * count, count, s, 0) for s in range(size)]
        case "scatter":
            pieces = [Piece(0, count, spec.root, rank * count)]
        case "alltoall":
            pieces = [Piece(s * count, count, s, rank * count) for s in range(size)]
        case "alltoallv":
            starts = [0, *accumulate(row[rank] for row in spec.matrix)]
            pieces = [
                Piece(starts[source], row[rank], source, sum(row[:rank]))
                for source, row in enumerate(spec.matrix)
            ]
        case _:
            pieces = [Piece(0, count, (rank - 1) % size, 0)]
    return [piece for piece in pieces if piece.count]


TOLERANCE = 2  # allowed error of an average, in units in the last place
_LOW = 0xFFFFFFFF
_INT32_MAX = torch.iinfo(torch.int32).max
_INT64_MAX = torch.iinfo(torch.int64).max
_ALL_RANKS = -1  # instead of a rank, for numbers that are equal on all ranks


@dataclass(frozen=True, slots=True)
class ReductionInputs:
    """The inputs of one reduction, and its exact result."""

    dtype: DType
    op: str  # nccl-tests' name of the operation
    size: int  # number of ranks
    seed: int  # another seed gives other numbers
    device: torch.device

    @property
    def tolerance(self) -> int:
        return 0 if self.is_exact else TOLERANCE

    @property
    def is_exact(self) -> bool:
        is_divided = self.op == "avg" and self.dtype.is_float
        return not is_divided or self.size.bit_count() == 1

    def input_of(self, rank: int, start: int, count: int) -> Tensor:
        draw = Draw(self.seed, start, count, self.device)
        return _cast(self._wide(draw, rank), self.dtype)

    def result(self, start: int, count: int) -> Tensor:
        draw = Draw(self.seed, start, count, self.device)
        total = self._scaled(draw, 0)
        for rank in range(1, self.size):
            total = self._combine(total, self._scaled(draw, rank))
        if self.op == "avg":
            is_float = self.dtype.is_float
            total = total.double() / self.size if is_float else total // self.size
        return _cast(total, self.dtype)

    def _scaled(self, draw: "Draw", rank: int) -> Tensor:
        wide = self._wide(draw, rank)
        return wide * premultiplier(rank) if self.op == "mulsum" else wide

    def _combine(self, left: Tensor, right: Tensor) -> Tensor:
        if self.op == "prod":
            return left.mul_(right)
        if self.op not in ("min", "max"):
            return left.add_(right)
        # torch compares no unsigned integers. With the top bit flipped, signed ones do.
        is_turned = self.dtype.is_unsigned and self.dtype.num_bytes >= 4
        turn = torch.iinfo(left.dtype).min if is_turned else 0
        choose = torch.minimum if self.op == "min" else torch.maximum
        return choose(left ^ turn, right ^ turn) ^ turn

    def _wide(self, draw: "Draw", rank: int) -> Tensor:
        """Return a rank's input in a type that is wide enough to reduce it."""
        if self.dtype.is_float:
            if self.op == "prod":
                return self._factor(draw, rank)
            return self._whole_float(draw, rank)
        if self.op in {"avg", "mulsum"}:
            return self._small_integer(draw, rank)
        bits = draw.bits(rank) if self.dtype.num_bytes == 8 else draw.half(rank)
        bits = _narrow(bits, self.dtype)
        return bits | 1 if self.op == "prod" else bits

    def _whole_float(self, draw: "Draw", rank: int) -> Tensor:
        largest = 2**self.dtype.significand_bits
        if self.op in ("min", "max"):
            return draw.below(rank, largest).add_(1).mul_(draw.sign(rank))
        factor = 2 if self.op == "mulsum" else 1
        num_giving = min(self.size, largest // 4 // factor if self.is_exact else 2)
        limit = _power_of_two(largest // factor // num_giving)
        given = draw.below(rank, limit).add_(1)
        if self.is_exact:
            given.mul_(draw.sign(_ALL_RANKS))
        if num_giving < self.size:
            given.mul_(draw.turn(rank, self.size) < num_giving)
        return given

    def _factor(self, draw: "Draw", rank: int) -> Tensor:
        """Return a rank's factors: significands at its turns, else powers of two."""
        bits, room = self.dtype.significand_bits, self.dtype.max_exponent
        half = 2 ** (bits - 1)
        significand = (draw.below(rank, half) + half).double() / half
        turn = draw.turn(rank, self.size)
        each = max(1, min(3, room // max(1, self.size - 1)))
        power = draw.half(rank).bitwise_and_(3).clamp_(max=each)
        power = torch.where(turn * each <= room, power, 0)
        # Shifted, since not every device's exp2() is exact.
        powers = (torch.ones_like(power) << power).double()
        factor = torch.where(turn == 0, significand, powers)
        return factor * draw.sign(rank)

    def _small_integer(self, draw: "Draw", rank: int) -> Tensor:
        """Return numbers >= 0 that cannot overflow when they are summed or doubled."""
        num_bytes = self.dtype.num_bytes
        highest = 2 ** (8 * num_bytes - (0 if self.dtype.is_unsigned else 1)) - 1
        if self.op == "mulsum":
            # The numbers are doubled in float64.
            return draw.below(rank, min(_power_of_two(highest // 2 + 1), 2**50))
        held = _INT64_MAX if num_bytes == 8 else _INT32_MAX
        each = min(highest, held) // self.size
        if each:
            return draw.below(rank, _power_of_two(each))
        return (draw.turn(rank, self.size) < highest).to(torch.int32)


def random_bytes(
    seed: int, rank: int, start: int, count: int, device: torch.device
) -> Tensor:
    """Return ``count`` bytes from ``start`` of a rank's random sequence."""
    first = start // 8
    num_words = -(-(start + count) // 8) - first
    words = Draw(seed, first, num_words, device).bits(rank)
    offset = start - 8 * first
    return words.view(torch.uint8)[offset : offset + count]


class Draw:
    """Counter-based random number generator for a range of indices."""

    # 32-bit arithmetic is faster.

    def __init__(self, seed: int, start: int, count: int, device: torch.device) -> None:
        index = torch.arange(start, start + count, dtype=torch.int64, device=device)
        self._seed = seed
        self._mixed = _mix(index.bitwise_and(_LOW).to(torch.int32))
        if start + count > 1 << 32:
            # Zero is hashed to zero, so below 2**32 this changes nothing.
            self._mixed ^= _mix((index >> 32).to(torch.int32))

    def half(self, rank: int, stream: int = 1) -> Tensor:
        """Return 32 random bits per index as int32, different for each stream."""
        salt = (self._seed + 2) * 0x9E3779B1 + rank * 0x85EBCA6B
        return _mix(self._mixed ^ _signed((salt ^ (stream * 0xC2B2AE35)) & _LOW))

    def bits(self, rank: int) -> Tensor:
        high = self.half(rank, 1).to(torch.int64) << 32
        return high | self.half(rank, 2).to(torch.int64).bitwise_and_(_LOW)

    def below(self, rank: int, limit: int) -> Tensor:
        """Return random numbers in ``0..limit-1``; ``limit`` is a power of two."""
        if limit <= _INT32_MAX:
            return self.half(rank).bitwise_and_(limit - 1)
        return self.bits(rank).bitwise_and_(limit - 1)

    def sign(self, rank: int) -> Tensor:
        return self.half(rank, 3).bitwise_and_(2).neg_().add_(1)

    def turn(self, rank: int, size: int) -> Tensor:
        """Rotate the ranks randomly at each index; return this rank's positions."""
        first = self.half(_ALL_RANKS, 4).bitwise_and_(_INT32_MAX).remainder_(size)
        return first.neg_().add_(rank + size).remainder_(size)


def _mix(values: Tensor) -> Tensor:
    """Hash int32 values in place and bijectively. Source: lowbias32, Wellons."""
    # torch's right shift copies the sign bit, so mask the copies.
    values ^= (values >> 16).bitwise_and_(0xFFFF)
    values *= 0x7FEB352D
    values ^= (values >> 15).bitwise_and_(0x1FFFF)
    values *= _signed(0x846CA68B)
    values ^= (values >> 16).bitwise_and_(0xFFFF)
    return values


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits > _INT32_MAX else bits


def _power_of_two(limit: int) -> int:
    return 1 << (limit.bit_length() - 1)


def _narrow(bits: Tensor, dtype: DType) -> Tensor:
    """Reduce random bits to the values of a one-byte type."""
    if dtype.num_bytes > 1:
        return bits
    low = bits.bitwise_and_(0xFF)
    return low if dtype.is_unsigned else low.sub_(128)


def _cast(wide: Tensor, dtype: DType) -> Tensor:
    target = getattr(torch, dtype.torch_name)
    if dtype.is_float:
        return wide.to(target)
    signed = {1: torch.int8, 4: torch.int32, 8: torch.int64}[dtype.num_bytes]
    return wide.to(signed).view(target)


_CHUNK_ELEMENTS = 1 << 16
_CANARY = 0xA5
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Expected = list[tuple[Tensor, Tensor]]
"""Chunks of a result, small enough for the cache, each with its expected bits."""


def prepare(
    spec: CallSpec, inputs: ReductionInputs, views: Views, canaries: Sequence[Tensor]
) -> Expected:
    """Fill the input, overwrite the result with wrong values, return the right ones.

    If nothing is reduced, only the type, seed and device of ``inputs`` are used.
    """
    for canary in canaries:
        canary.fill_(_CANARY)
    signed = _SIGNED[spec.dtype.num_bytes]
    expected: Expected = []
    for piece in pieces_of(spec):
        for done in range(0, piece.count, _CHUNK_ELEMENTS):
            count = min(_CHUNK_ELEMENTS, piece.count - done)
            start = piece.source_start + done
            if piece.source == REDUCED:
                right = inputs.result(start, count).view(signed)
            else:
                right = _input_of(spec, inputs, piece.source, start, count)
            first = piece.start + done
            result = views.receive[first : first + count].view(signed)
            result.copy_(~right)
            expected.append((result, right))
    for start in range(0, views.send.numel(), _CHUNK_ELEMENTS):
        part = views.send[start : start + _CHUNK_ELEMENTS].view(signed)
        part.copy_(_input_of(spec, inputs, spec.rank, start, part.numel()))
    return expected


def count_wrong(canaries: Sequence[Tensor], expected: Expected, tolerance: int) -> int:
    """Count this rank's wrong elements and the changed bytes next to the result."""
    wrong = sum(int((each != _CANARY).sum()) for each in canaries)
    for got, right in expected:
        if torch.equal(got, right):
            continue
        is_wrong = got != right
        if tolerance:
            # Neighbouring floats of one sign are neighbouring integers.
            distance = (got.to(torch.int64) - right.to(torch.int64)).abs()
            is_wrong = distance > tolerance
        wrong += int(is_wrong.sum())
    return wrong


def _input_of(
    spec: CallSpec, inputs: ReductionInputs, rank: int, start: int, count: int
) -> Tensor:
    width = spec.dtype.num_bytes
    if spec.test.has_op:
        made = inputs.input_of(rank, start, count)
    else:
        first, num_bytes = start * width, count * width
        made = random_bytes(inputs.seed, rank, first, num_bytes, inputs.device)
    return made.view(_SIGNED[width])
