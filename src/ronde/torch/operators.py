"""Horovod's numbers for reductions, and which dtypes each is defined for."""

import warnings

import torch

from ronde.collectives import ReduceOp
from ronde.errors import UsageError

Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

REDUCE_OPS = {
    Average: ReduceOp.AVERAGE,
    Sum: ReduceOp.SUM,
    Min: ReduceOp.MIN,
    Max: ReduceOp.MAX,
    Product: ReduceOp.PRODUCT,
}

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = frozenset(
    {
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    }
)
_NUMBERS = _FLOATS | _INTEGERS
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_ORDERED = _NUMBERS | {torch.bool}

REDUCIBLE = {
    Average: _NUMBERS | _COMPLEX,
    Sum: _NUMBERS | _COMPLEX,
    Adasum: _FLOATS,
    Min: _ORDERED,
    Max: _ORDERED,
    Product: _NUMBERS | _COMPLEX | {torch.bool},
}
"""The dtypes that each reduction is defined for."""


def which_op(op: int | None, average: bool | None) -> int:
    """Return the reduction that is meant by ``op`` and its deprecated ``average``.

    Raises:
        UsageError: Both are given, or there is no such reduction.
    """
    if average is None:
        if op is None:
            return Average
        if op not in REDUCIBLE:
            raise UsageError(
                f"op must be Average, Sum, Adasum, Min, Max or Product, got {op}."
            )
        return op
    if op is not None:
        raise UsageError(
            "The op parameter supersedes average. Please provide only one of them."
        )
    warnings.warn(
        "average is deprecated; say op=hvd.Average or op=hvd.Sum.",
        DeprecationWarning,
        stacklevel=3,
    )
    return Average if average else Sum
