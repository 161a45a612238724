"""Corresponding elements of all ranks, in memory, become one: by torch's kernels."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ronde.collectives.arithmetic import HALVES, reduce_stack, scale_
from ronde.collectives.engine import ReduceOp

Kernel = Callable[..., Tensor]
_KERNELS: dict[ReduceOp, Kernel] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVERAGE: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}
_FLOATS = frozenset({torch.float32, torch.float64})
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})


class Scratch:
    """Memory for sums of 16-bit floats, for one at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32, device="cpu")

    def take(self, numel: int) -> Tensor:
        """Return ``numel`` elements of any value."""
        if self._memory.numel() < numel:
            with torch.inference_mode(mode=False):
                self._memory = torch.empty(numel, dtype=torch.float32, device="cpu")
        return self._memory[:numel]


class ReduceKernel:
    """One reduction of one dtype over a fixed number of ranks.

    The ranks' elements are taken in rank order, so every rank that combines the same
    elements gets the same bits. 16-bit floats are rounded once.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        op: ReduceOp,
        size: int,
        postscale: float,
        scratch: Scratch,
    ) -> None:
        self._op = op
        self._size = size
        self._postscale = postscale
        self._kernel = _KERNELS[op]
        self._divisor = size if op is ReduceOp.AVERAGE else 1
        self._scratch = scratch
        if dtype in _FLOATS or (dtype in _INTEGERS and op is not ReduceOp.AVERAGE):
            is_plain = size == 2 and self._divisor == 1 and postscale == 1.0
            self.combine = self._combine_two if is_plain else self._combine_directly
        elif dtype in HALVES:
            self.combine = self._combine_widened
        else:
            self.combine = self._combine_stacked

    combine: Callable[[Sequence[Tensor], Tensor], None]
    """Combine one flat tensor a rank into ``out``, which may be one of them."""

    def _combine_two(self, sources: Sequence[Tensor], out: Tensor) -> None:
        self._kernel(sources[0], sources[1], out=out)

    def _combine_directly(self, sources: Sequence[Tensor], out: Tensor) -> None:
        kernel = self._kernel
        if self._size > 2:
            address = out.data_ptr()
            if any(source.data_ptr() == address for source in sources[2:]):
                # It would be overwritten before its turn.
                sources = [s.clone() if s.data_ptr() == address else s for s in sources]
        kernel(sources[0], sources[1], out=out)
        for source in sources[2:]:
            kernel(out, source, out=out)
        if self._divisor != 1:
            out.div_(self._divisor)
        if self._postscale != 1.0:
            scale_(out, self._postscale)

    def _combine_widened(self, sources: Sequence[Tensor], out: Tensor) -> None:
        wide = self._scratch.take(out.numel())
        kernel = self._kernel
        wide.copy_(sources[0])
        for source in sources[1:]:
            kernel(wide, source, out=wide)
        if self._divisor != 1:
            wide.div_(self._divisor)
        if self._postscale != 1.0:
            wide.mul_(self._postscale)
        out.copy_(wide)

    def _combine_stacked(self, sources: Sequence[Tensor], out: Tensor) -> None:
        # By bytes: torch stacks not every dtype.
        stack = torch.stack([source.view(torch.uint8) for source in sources])
        out.copy_(reduce_stack(stack.view(out.dtype), self._op, self._postscale))
