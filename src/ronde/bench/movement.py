"""Where every element of a result comes from; pure, and without torch.

A result is a list of pieces. A copying collective's piece is somebody's input, a
reducing one's is the reduction of the same elements of all inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ronde.bench.catalog import Collective, Shape
from ronde.bench.traffic import Matrix

REDUCED = -1
"""Instead of a source: the elements of all ranks, reduced."""

_ROOT_ONLY = frozenset({"reduce", "gather"})


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of one rank's result.

    Attributes:
        start: Where it begins in the result.
        count: How many elements.
        source: The rank whose input it is, or ``REDUCED``.
        source_start: Where it begins in the input.
    """

    start: int
    count: int
    source: int
    source_start: int


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of how many, and what is special.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        root: The root, or -1.
        matrix: Elements from rank to rank, for ``alltoallv``; else empty.
    """

    rank: int
    size: int
    root: int = -1
    matrix: Matrix = ()


def pieces_of(test: Collective, shape: Shape, place: Place) -> list[Piece]:
    """Return what the result of ``place.rank`` must be; nothing where it has none."""
    rank, size, count = place.rank, place.size, shape.count
    if test.name in _ROOT_ONLY and rank != place.root:
        return []
    match test.name:
        case "all_reduce" | "reduce":
            pieces = [Piece(0, count, REDUCED, 0)]
        case "reduce_scatter":
            pieces = [Piece(0, count, REDUCED, rank * count)]
        case "broadcast":
            pieces = [Piece(0, count, place.root, 0)]
        case "all_gather" | "hypercube" | "gather":
            pieces = [Piece(s * count, count, s, 0) for s in range(size)]
        case "scatter":
            pieces = [Piece(0, count, place.root, rank * count)]
        case "alltoall":
            pieces = [Piece(s * count, count, s, rank * count) for s in range(size)]
        case "alltoallv":
            pieces = _from_matrix(place.matrix, rank)
        case _:
            pieces = [Piece(0, count, (rank - 1) % size, 0)]
    return [piece for piece in pieces if piece.count]


def _from_matrix(matrix: Matrix, rank: int) -> list[Piece]:
    column = [row[rank] for row in matrix]
    starts = [0, *accumulate(column)]
    return [
        Piece(starts[source], column[source], source, sum(row[:rank]))
        for source, row in enumerate(matrix)
    ]


def in_elements(matrix: Sequence[Sequence[int]], item_bytes: int) -> Matrix:
    """Turn a matrix of bytes into one of elements."""
    return tuple(tuple(b // item_bytes for b in row) for row in matrix)
