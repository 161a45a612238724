"""Inputs of which the exact result of every collective is known, whatever the order.

Pure functions of (seed, rank, index): every rank can make any part of any rank's input
and of any result by itself.

Note [Exact results]. A floating-point reduction depends on its order, unless no partial
result is ever rounded. So:

* Sums are of integers whose magnitudes add up to at most 2**p, p being the bits of the
  significand: every partial sum of any subset is an integer below that. At most
  2**(p-2) ranks contribute to an element, chosen anew for each, the others give +0. All
  contributions to an element have one sign, so that the total is not zero.
* Products are of one random significand and of powers of two, which only move the
  exponent; the exponents add up to less than the type's greatest.
* Averages are sums as above where the number of ranks is a power of two: the division
  is exact then. Else two ranks contribute, and the last bits may differ: see
  ``TOLERANCE``.
* Integers wrap, whatever the order. Their factors are odd: a product with an even one
  in it is soon zero. Their averages are of small numbers: whether the sum wraps is the
  engine's own affair.
* Copies are of random bytes, NaN with payloads included.

Rank and index go into every number, so that chunks that were swapped are wrong.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ronde.bench.dtypes import DType, Kind

TOLERANCE = 2
"""Representable numbers that an average may be away from the nearest to the truth."""

_LOW = 0xFFFFFFFF
_INT64_MAX = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True)
class Reduction:
    """The inputs of one reduction, and its result.

    Attributes:
        dtype: Type of the elements.
        op: nccl-tests' name of the operation.
        size: Number of ranks.
        seed: Another seed gives other numbers.
        device: Where the tensors are made.
    """

    dtype: DType
    op: str
    size: int
    seed: int
    device: torch.device

    @property
    def is_exact(self) -> bool:
        """Whether the result must be right to the last bit."""
        is_divided = self.op == "avg" and self.dtype.is_float
        return not is_divided or self.size & (self.size - 1) == 0

    def input_of(self, rank: int, start: int, count: int) -> Tensor:
        """Return elements ``start`` to ``start + count`` of a rank's input."""
        return _cast(self._wide(rank, start, count), self.dtype)

    def result(self, start: int, count: int) -> Tensor:
        """Return elements of what the reduction of all inputs must be."""
        total = self._scaled(0, start, count)
        for rank in range(1, self.size):
            total = self._combine(total, self._scaled(rank, start, count))
        if self.op == "avg":
            is_float = self.dtype.is_float
            total = total / self.size if is_float else total // self.size
        return _cast(total, self.dtype)

    def _scaled(self, rank: int, start: int, count: int) -> Tensor:
        wide = self._wide(rank, start, count)
        return wide * premultiplier(rank) if self.op == "mulsum" else wide

    def _combine(self, left: Tensor, right: Tensor) -> Tensor:
        if self.op == "prod":
            return left * right
        if self.op not in ("min", "max"):
            return left + right
        # torch orders no unsigned 64-bit integers; with the top bit turned, int64 does.
        is_turned = self.dtype.kind is Kind.UNSIGNED and self.dtype.num_bytes == 8
        turn = torch.iinfo(torch.int64).min if is_turned else None
        a, b = (left, right) if turn is None else (left ^ turn, right ^ turn)
        best = torch.minimum(a, b) if self.op == "min" else torch.maximum(a, b)
        return best if turn is None else best ^ turn

    def _wide(self, rank: int, start: int, count: int) -> Tensor:
        """Return a rank's input as float64 or int64, which hold it exactly."""
        draw = _Draw(self.seed, start, count, self.device)
        if self.dtype.is_float:
            return self._float(draw, rank)
        if self.op in {"avg", "mulsum"}:
            return self._small_integer(draw, rank)
        bits = _truncate(draw.bits(rank), self.dtype)
        return bits | 1 if self.op == "prod" else bits

    def _float(self, draw: "_Draw", rank: int) -> Tensor:
        if self.op == "prod":
            return self._factor(draw, rank)
        largest = 2**self.dtype.significand_bits
        if self.op in ("min", "max"):
            magnitude = 1 + draw.below(rank, largest)
            return (magnitude * draw.sign(rank)).to(torch.float64)
        factor = 2 if self.op == "mulsum" else 1
        if self.is_exact:
            num_giving = min(self.size, largest // 4 // factor)
        else:
            num_giving = min(self.size, 2)
        magnitude = 1 + draw.below(rank, largest // factor // num_giving)
        # What one index has in common for all ranks is drawn with no rank's number.
        sign = draw.sign(_NOBODY) if self.is_exact else 1
        given = torch.where(
            draw.turn(rank, self.size) < num_giving, magnitude * sign, 0
        )
        return given.to(torch.float64)

    def _factor(self, draw: "_Draw", rank: int) -> Tensor:
        """Return one rank's random significand, or another's power of two."""
        bits, room = self.dtype.significand_bits, self.dtype.max_exponent
        half = 2 ** (bits - 1)
        significand = (half + draw.below(rank, half)).to(torch.float64) / half
        place = draw.turn(rank, self.size)
        each = max(1, min(3, room // max(1, self.size - 1)))
        power = torch.where(place * each <= room, draw.below(rank, each + 1), 0)
        factor = torch.where(place == 0, significand, torch.exp2(power.double()))
        return factor * draw.sign(rank)

    def _small_integer(self, draw: "_Draw", rank: int) -> Tensor:
        """Return numbers of at least 0 that can be added up, or doubled, unharmed."""
        is_unsigned = self.dtype.kind is Kind.UNSIGNED
        highest = 2 ** (8 * self.dtype.num_bytes - (0 if is_unsigned else 1)) - 1
        if self.op == "mulsum":
            # The doubling goes by way of float64.
            return draw.below(rank, min(highest // 2, 2**50) + 1)
        each = min(highest, _INT64_MAX) // self.size
        if each:
            return draw.below(rank, min(each + 1, _INT64_MAX))
        return (draw.turn(rank, self.size) < highest).to(torch.int64)


def premultiplier(rank: int) -> int:
    """Return what ``mulsum`` multiplies a rank's input by before it is summed."""
    return 1 + rank % 2


def random_bytes(
    seed: int, rank: int, start: int, count: int, device: torch.device
) -> Tensor:
    """Return bytes ``start`` to ``start + count`` of a rank's endless random string."""
    first = start // 8
    num_words = -(-(start + count) // 8) - first
    words = _Draw(seed, first, num_words, device).bits(rank)
    offset = start - 8 * first
    return words.view(torch.uint8)[offset : offset + count]


_NOBODY = -1


class _Draw:
    """Random numbers for a run of indices: equal arguments give equal numbers."""

    def __init__(self, seed: int, start: int, count: int, device: torch.device) -> None:
        index = torch.arange(start, start + count, dtype=torch.int64, device=device)
        self._seed = seed
        self._mixed = _mix((index & _LOW) ^ _mix((index >> 32) & _LOW))

    def bits(self, rank: int) -> Tensor:
        """Return 64 random bits, as int64."""
        return (self._half(rank, 1) << 32) | self._half(rank, 2)

    def below(self, rank: int, limit: int) -> Tensor:
        """Return random numbers in ``0..limit-1``."""
        return (self.bits(rank) & _INT64_MAX) % limit

    def sign(self, rank: int) -> Tensor:
        """Return 1 or -1."""
        return 1 - 2 * (self._half(rank, 3) & 1)

    def turn(self, rank: int, size: int) -> Tensor:
        """Return the rank's place in an order of the ranks that each index turns."""
        return (rank - self._half(_NOBODY, 4) % size) % size

    def _half(self, rank: int, stream: int) -> Tensor:
        salt = (self._seed + 2) * 0x9E3779B1 + rank * 0x85EBCA6B
        salt = (salt ^ (stream * 0xC2B2AE35)) & _LOW
        return _mix(self._mixed ^ salt)


def _mix(values: Tensor) -> Tensor:
    """Scramble 32-bit numbers held in int64, one to one. Source: lowbias32, Wellons."""
    mixed = (values ^ (values >> 16)) * 0x7FEB352D & _LOW
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B & _LOW
    return mixed ^ (mixed >> 16)


def _truncate(bits: Tensor, dtype: DType) -> Tensor:
    """Return the low bits as the integer that they are in ``dtype``."""
    if dtype.num_bytes == 8:
        return bits
    modulus = 2 ** (8 * dtype.num_bytes)
    low = bits & (modulus - 1)
    if dtype.kind is Kind.UNSIGNED:
        return low
    return torch.where(low >= modulus // 2, low - modulus, low)


def _cast(wide: Tensor, dtype: DType) -> Tensor:
    """Return int64 or float64 as ``dtype``; integers wrap."""
    target = getattr(torch, dtype.torch_name)
    if wide.is_floating_point():
        return wide.to(target)
    signed = {1: torch.int8, 4: torch.int32, 8: torch.int64}[dtype.num_bytes]
    narrow = _truncate(wide, DType("", "", dtype.num_bytes, Kind.SIGNED)).to(signed)
    return narrow.view(target)
