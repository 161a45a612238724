"""Who sends how much to whom in ``alltoallv``; pure, and without torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ronde.bench.catalog import Shape
from ronde.errors import UsageError

_CHUNK_BYTES = 16

Matrix = tuple[tuple[int, ...], ...]
"""``matrix[i][j]`` bytes go from rank i to rank j."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What decides the matrix.

    Attributes:
        spread: 0 gives every pair the same, 1 in proportion to the distance of ranks.
        given: A matrix that somebody wrote down, at least as large as there are ranks;
            then ``spread`` does not count.
    """

    spread: float = 1.0
    given: Matrix = ()

    def matrix(self, total_bytes: int, size: int) -> Matrix:
        """Return the bytes of every pair, in chunks of 16.

        Args:
            total_bytes: What each rank sends, about.
            size: Number of ranks.
        """
        if self.given:
            return tuple(row[:size] for row in self.given[:size])
        return tuple(
            tuple(self._between(total_bytes, (j - i) % size, size) for j in range(size))
            for i in range(size)
        )

    def _between(self, total_bytes: int, distance: int, size: int) -> int:
        if size == 1:
            return _chunks(total_bytes)
        even = total_bytes / size
        weighted = distance * total_bytes / (size * (size - 1) // 2)
        return _chunks(int((1.0 - self.spread) * even + self.spread * weighted))


def shape_of_matrix(matrix: Matrix, item_bytes: int, count: int) -> Shape:
    """Return the largest shape that any rank has."""
    sent = max(sum(row) for row in matrix) // item_bytes
    received = max(sum(column) for column in zip(*matrix, strict=True)) // item_bytes
    return Shape(count, sent, received)


def read_matrix(text: str, scale: float) -> Matrix:
    """Read a square matrix of bytes, numbers between blanks, one row a line.

    Args:
        text: The file.
        scale: Multiplies every number before it is rounded down to 16.

    Raises:
        UsageError: It is not square, or something in it is no number of at least 0.
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if not lines or any(len(line) != len(lines) for line in lines):
        widths = sorted({len(line) for line in lines})
        raise UsageError(
            "the traffic matrix must be square, got "
            f"{len(lines)} rows of {widths or 'no'} numbers. Correct the file that "
            "NCCL_TESTS_ALLTOALLV_MATRIX_FILE names."
        )
    return tuple(_read_row(line, scale) for line in lines)


def _read_row(words: Sequence[str], scale: float) -> tuple[int, ...]:
    try:
        numbers = [float(word) * scale for word in words]
    except ValueError as error:
        raise UsageError(f"the traffic matrix must hold numbers: {error}.") from None
    if any(not math.isfinite(number) or number < 0 for number in numbers):
        raise UsageError(
            f"the traffic matrix must hold numbers of at least 0, got {' '.join(words)}"
        )
    return tuple(_chunks(int(number)) for number in numbers)


def _chunks(num_bytes: int) -> int:
    return num_bytes // _CHUNK_BYTES * _CHUNK_BYTES
