"""Whether a result is what it must be, bit for bit.

Before the operation every element of the result is set to the complement of the right
answer: what is not written is wrong, zeros included. Bytes on both sides are watched.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ronde.bench.buffers import Views
from ronde.bench.catalog import Collective, Shape
from ronde.bench.dtypes import DType
from ronde.bench.movement import REDUCED, Piece, Place, pieces_of
from ronde.bench.patterns import TOLERANCE, Reduction, random_bytes

_CHUNK_ELEMENTS = 1 << 16
_CANARY = 0xA5
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Canaries = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Checker:
    """Makes the inputs of one row and examines its results.

    Attributes:
        test: The collective.
        shape: Its sizes.
        place: This rank; the matrix in elements.
        reduction: The inputs where something is reduced; type, seed and device always.
    """

    test: Collective
    shape: Shape
    place: Place
    reduction: Reduction

    def prepare(self, views: Views, canaries: Canaries) -> list[Tensor]:
        """Write the inputs, and what the result must not be.

        Returns:
            What the result must be, in parts, for ``count_wrong``.
        """
        for canary in canaries:
            canary.fill_(_CANARY)
        expected: list[Tensor] = []
        for result, right in self._chunks(views.receive):
            _bits(result, self._dtype).copy_(~_bits(right, self._dtype))
            expected.append(right)
        send = views.send
        for start in range(0, send.numel(), _CHUNK_ELEMENTS):
            count = min(_CHUNK_ELEMENTS, send.numel() - start)
            made = self._input_of(self.place.rank, start, count)
            send[start : start + count].view(made.dtype).copy_(made)
        return expected

    def count_wrong(
        self, views: Views, canaries: Canaries, expected: Sequence[Tensor]
    ) -> int:
        """Return the elements of this rank's result that are wrong.

        Bytes beside the result that were touched count as one each.

        Args:
            views: The operation's.
            canaries: As they were prepared.
            expected: From ``prepare``.
        """
        is_exact = not self.test.has_op or self.reduction.is_exact
        wrong = 0
        for result, right in zip(self._parts(views.receive), expected, strict=True):
            got, bits = _bits(result, self._dtype), _bits(right, self._dtype)
            if not torch.equal(got, bits):
                wrong += _count_unequal(got, bits, 0 if is_exact else TOLERANCE)
        return wrong + sum(int((each != _CANARY).sum()) for each in canaries)

    @property
    def _dtype(self) -> DType:
        return self.reduction.dtype

    def _chunks(self, receive: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of the result with what they must be."""
        for piece, done, count in self._cuts():
            part = receive[piece.start + done : piece.start + done + count]
            yield part, self._expected(piece, done, count)

    def _parts(self, receive: Tensor) -> Iterator[Tensor]:
        for piece, done, count in self._cuts():
            yield receive[piece.start + done : piece.start + done + count]

    def _cuts(self) -> Iterator[tuple[Piece, int, int]]:
        """Yield runs of elements that are made at a time, which the cache can hold."""
        for piece in pieces_of(self.test, self.shape, self.place):
            for done in range(0, piece.count, _CHUNK_ELEMENTS):
                yield piece, done, min(_CHUNK_ELEMENTS, piece.count - done)

    def _expected(self, piece: Piece, done: int, count: int) -> Tensor:
        start = piece.source_start + done
        if piece.source == REDUCED:
            return self.reduction.result(start, count)
        return self._input_of(piece.source, start, count)

    def _input_of(self, rank: int, start: int, count: int) -> Tensor:
        if self.test.has_op:
            return self.reduction.input_of(rank, start, count)
        width = self._dtype.num_bytes
        seed, device = self.reduction.seed, self.reduction.device
        made = random_bytes(seed, rank, start * width, count * width, device)
        return made.view(_SIGNED[width])


def _count_unequal(got: Tensor, right: Tensor, tolerance: int) -> int:
    if not tolerance:
        return int((got != right).sum())
    # Neighbouring floats of one sign are neighbouring integers.
    distance = (got.to(torch.int64) - right.to(torch.int64)).abs()
    return int((distance > tolerance).sum())


def _bits(values: Tensor, dtype: DType) -> Tensor:
    return values.view(_SIGNED[dtype.num_bytes])
