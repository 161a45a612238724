"""Arithmetic of reductions, the same for all engines.

Engines reduce only a few dtypes. ``encode`` converts tensors of other dtypes to one of
these before the reduction, and ``decode`` converts the result back.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ronde.collectives.engine import ReduceOp
from ronde.errors import UsageError

HALVES = frozenset({torch.float16, torch.bfloat16})
FLOATS = HALVES | {torch.float32, torch.float64}
_SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
_UNSIGNED = frozenset({torch.uint8, torch.uint16, torch.uint32, torch.uint64})
INTEGERS = _SIGNED | _UNSIGNED
COMPLEX = frozenset({torch.complex64, torch.complex128})
PLAIN = FLOATS - HALVES | {torch.int8, torch.uint8, torch.int32, torch.int64}
"""Dtypes that engines reduce directly, except for averages of integers."""
_I32, _I64 = torch.int32, torch.int64
_WIDENED = {torch.int16: _I32, torch.uint16: _I32, torch.uint32: _I64}
_SIGN_BIT = torch.iinfo(torch.int64).min
_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)
_ADDED = (ReduceOp.SUM, ReduceOp.AVERAGE)
KERNELS: dict[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVERAGE: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}  # combine two ranks' elements; AVERAGE divides the sum afterwards


def require_reducible(
    dtype: torch.dtype, op: ReduceOp, prescale: float, postscale: float
) -> None:
    """Raise UsageError if ``op`` or a factor is not defined for ``dtype``."""
    if dtype is torch.bool:
        if op in _ADDED:
            raise UsageError(
                f"op must be min, max or product for torch.bool, got {op}. "
                "Convert the tensor to an integer dtype to count."
            )
        if prescale != 1.0 or postscale != 1.0:
            raise UsageError(
                "prescale and postscale must be 1 for torch.bool, "
                f"got {prescale} and {postscale}."
            )
    elif dtype in COMPLEX:
        if op in _ORDERED:
            raise UsageError(
                f"op must be sum, average or product for {dtype}, got {op}: complex "
                "numbers have no order."
            )
    elif dtype not in FLOATS and dtype not in INTEGERS:
        raise UsageError(
            "dtype must be a float of 16 to 64 bits, an integer, bool or complex to be "
            f"reduced, got {dtype}. Convert the tensor first."
        )


def rounds_often(dtype: torch.dtype, op: ReduceOp, size: int) -> bool:
    """Return True for 16-bit floats if pairwise reduction needs a wider dtype."""
    # Every pairwise sum would be rounded, and the sum of two float16 may overflow
    # although their average does not.
    if dtype not in HALVES or op in _ORDERED:
        return False
    return size > 2 or (op is ReduceOp.AVERAGE and dtype is torch.float16)


def dense(tensor: Tensor) -> Tensor:
    """Return a detached, row-major tensor: a copy only if it is necessary."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat(tensor: Tensor) -> Tensor:
    # reshape() would keep the stride of a single element cut out of a larger tensor.
    return tensor.as_strided((tensor.numel(),), (1,))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a row-major tensor as a 1-D view."""
    if tensor.dim() != 1 or tensor.stride(0) != 1 or tensor.requires_grad:
        tensor = flat(tensor.detach())
    return tensor.view(torch.uint8)


def put_back(values: Tensor, tensor: Tensor) -> Tensor:
    """Copy ``values`` into ``tensor`` unless they share memory."""
    if values.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.detach().copy_(values.reshape(tensor.shape))
    return tensor


def scale_(tensor: Tensor, factor: float) -> None:
    """Multiply in place; for integers, in float64 with truncation toward zero."""
    if factor == 1.0:
        return
    values = tensor.detach()
    if tensor.dtype in INTEGERS:
        values.copy_(values.to(torch.float64) * factor)
    else:
        values.mul_(factor)


def encode(tensor: Tensor, op: ReduceOp) -> Tensor:
    """Return a row-major tensor that every engine can reduce; may share memory.

    For AVERAGE, engines reduce by SUM, and ``decode`` divides.
    """
    values = dense(tensor)
    dtype = values.dtype
    if dtype is torch.bool:
        return values.view(torch.uint8)
    if dtype in COMPLEX and op in _ADDED:
        return torch.view_as_real(values)
    if dtype is torch.uint64:
        signed = values.view(torch.int64)
        return signed ^ _SIGN_BIT if op in _ORDERED else signed
    if dtype in INTEGERS and op is ReduceOp.AVERAGE:
        return values.to(torch.int64)
    return values.to(_WIDENED.get(dtype, dtype))


def decode(
    reduced: Tensor, dtype: torch.dtype, op: ReduceOp, size: int, postscale: float
) -> Tensor:
    """Convert the reduction of encoded tensors back to ``dtype``.

    Divides by ``size`` for AVERAGE, then scales. May overwrite ``reduced``.
    """
    if op is ReduceOp.AVERAGE:
        _divide_(reduced, dtype, size)
    if dtype is torch.bool:
        result = reduced.view(torch.bool)
    elif dtype in COMPLEX and op in _ADDED:
        result = torch.view_as_complex(reduced)
    elif dtype is torch.uint64:
        signed = reduced ^ _SIGN_BIT if op in _ORDERED else reduced
        result = signed.view(torch.uint64)
    else:
        result = reduced.to(dtype)
    scale_(result, postscale)
    return result


def reduce_stack(stack: Tensor, op: ReduceOp, postscale: float = 1.0) -> Tensor:
    """Reduce dimension 0, which has an entry per rank; round 16-bit floats once."""
    size, dtype = stack.shape[0], stack.dtype
    wide = stack.to(torch.float32) if dtype in HALVES else stack
    encoded = encode(wide, op)
    if op in _ADDED:
        reduced = encoded.sum(0, dtype=encoded.dtype)
    elif op is ReduceOp.PRODUCT:
        reduced = encoded.prod(0, dtype=encoded.dtype)
    else:
        reduced = encoded.amin(0) if op is ReduceOp.MIN else encoded.amax(0)
    return decode(reduced, wide.dtype, op, size, postscale).to(dtype)


def _divide_(total: Tensor, dtype: torch.dtype, size: int) -> None:
    if dtype is torch.uint64:
        # torch cannot divide uint64. Half of each number fits into int64; twice the
        # quotient of the halves is at most one too small.
        half = (total >> 1) & torch.iinfo(torch.int64).max
        quotient = half.div(size, rounding_mode="trunc") * 2
        total.copy_(quotient + (total - quotient * size >= size))
    elif total.is_floating_point() or total.is_complex():
        total.div_(size)
    else:
        total.div_(size, rounding_mode="trunc")
