"""Tensors as the row-major vectors that engines cut up and reduce, and back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ronde.collectives.arithmetic import HALVES, decode, encode, scale_
from ronde.collectives.communicator import ReduceOp

_ROUNDING = (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.PRODUCT)


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is to be done to the elements of all ranks.

    Attributes:
        op: How they become one.
        prescale: Multiplies each rank's.
        postscale: Multiplies the result.
        size: Number of ranks.
    """

    op: ReduceOp
    prescale: float
    postscale: float
    size: int

    @property
    def travelling_op(self) -> ReduceOp:
        """What is done to what travels: an average's sum is divided at the end."""
        return ReduceOp.SUM if self.op is ReduceOp.AVERAGE else self.op

    def encode(self, tensor: Tensor, *, is_kept: bool) -> Tensor:
        """Return what travels, of any shape and row-major.

        16-bit floats travel as 32-bit ones where the result would be rounded more than
        once.

        Args:
            tensor: This rank's.
            is_kept: ``tensor`` may not be changed, nor may its memory travel.
        """
        values = tensor.detach()
        if values.dtype in HALVES and self._rounds_often(values.dtype):
            values = values.to(torch.float32)
        if self.prescale != 1.0:
            if is_kept and values.dtype is tensor.dtype:
                values = values.clone()
            scale_(values, self.prescale)
        encoded = encode(values, self.op)
        if is_kept and _shares_memory(encoded, tensor):
            encoded = encoded.clone()
        return encoded

    def decode(self, reduced: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the result in ``dtype``; it may share ``reduced``'s memory."""
        wide = dtype
        if dtype in HALVES and reduced.dtype is torch.float32:
            wide = torch.float32
        result = decode(reduced, wide, self.op, self.size, self.postscale)
        return result.to(dtype)

    def _rounds_often(self, dtype: torch.dtype) -> bool:
        """Say whether two ranks' elements may not be combined in their own dtype.

        The sum of two float16 may overflow where their average fits.
        """
        if self.op not in _ROUNDING:
            return False
        if self.op is ReduceOp.AVERAGE and dtype is torch.float16:
            return True
        return self.size > 2


def flat(tensor: Tensor) -> Tensor:
    """View a row-major tensor as a vector."""
    # reshape() would keep the stride of a single element cut out of a larger tensor.
    return tensor.as_strided((tensor.numel(),), (1,))


def _shares_memory(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
