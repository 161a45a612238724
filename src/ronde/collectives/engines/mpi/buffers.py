"""Tensors as MPI sees them: an address, a count and a datatype.

MPI counts in 32 bits: a count, and the place of a rank's part in a whole, must be below
2**31. What is longer goes in several calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ronde.collectives.engines.mpi.library import MPI

MAX_COUNT = 1 << 30
"""Elements in one call."""

_DATATYPES = {
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
"""The dtypes that ``arithmetic.encode`` leaves to be reduced."""


def flat(tensor: Tensor) -> Tensor:
    """View a row-major tensor as a vector."""
    # reshape() would keep the stride of a single element cut out of a larger tensor.
    return tensor.as_strided((tensor.numel(),), (1,))


def memory(vector: Tensor) -> MPI.buffer:
    """Return the memory of a dense vector; the vector must outlive its use."""
    return MPI.buffer.fromaddress(vector.data_ptr(), vector.nbytes)


def datatype(vector: Tensor) -> MPI.Datatype:
    """Return the datatype of a vector that is to be reduced."""
    return _DATATYPES[vector.dtype]


def pieces(vector: Tensor, max_count: int) -> Iterator[Tensor]:
    """Cut a vector into parts that one call can take."""
    for first in range(0, vector.numel(), max_count):
        yield vector[first : first + max_count]


@dataclass(frozen=True, slots=True)
class Parts:
    """Consecutive parts of a vector, one a rank.

    Attributes:
        counts: Elements of each.
        starts: Where each begins.
    """

    counts: tuple[int, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, counts: Sequence[int]) -> "Parts":
        """Lay parts one after the other."""
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        return cls(tuple(counts), tuple(starts[:-1]))

    def of_rank(self, vector: Tensor, rank: int) -> Tensor:
        """Return one rank's part."""
        start = self.starts[rank]
        return vector[start : start + self.counts[rank]]
