"""Collectives on NumPy arrays; the other functions are those of ``ronde.torch``.

An argument is an array of NumPy or of another library with DLPack, a number or a list;
it is not changed. Results are new NumPy arrays, and tuples of them for groups. Other
arguments, handles and errors are those of ``ronde.torch.mpi_ops``.
"""

from collections.abc import Callable, Iterable
from functools import update_wrapper
from operator import index
from typing import Any, Generic, ParamSpec, cast

import numpy as np
import torch
from torch import Tensor

from ronde.errors import UsageError
from ronde.session import front_end, operations
from ronde.session.frameworks import import_framework
from ronde.session.front_end import *  # noqa: F403
from ronde.session.lifetime import init, shutdown
from ronde.session.operations import (
    Average,
    allgather_object,
    broadcast_object,
    poll,
    synchronize,
)
from ronde.session.session import ProcessSet, global_process_set

__all__: list[str] = ["allgather", "allgather_async", "allgather_object", "allreduce"]
__all__ += ["allreduce_async", "alltoall", "alltoall_async", "broadcast", "broadcast_"]
__all__ += ["broadcast_async", "broadcast_object", "grouped_allgather"]
__all__ += ["grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_async"]
__all__ += ["grouped_reducescatter", "grouped_reducescatter_async", "init", "poll"]
__all__ += ["reducescatter", "reducescatter_async", "shutdown", "synchronize"]
__all__ += front_end.__all__

Arrays = Any  # an array-like, or in groups several
Call = tuple[operations.NamedCollective, Arrays]
Name = str | None
P = ParamSpec("P")
_ALL = global_process_set
_DTYPES = "?bBhHiIlLqQefdFD"  # NumPy's characters of the dtypes that torch has too


class _Operation(Generic[P]):
    """A function that executes the collective that ``prepare`` returns."""

    def __init__(self, prepare: Callable[P, Call], *, is_group: bool = False) -> None:
        self._prepare, self._is_group = prepare, is_group
        update_wrapper(self, prepare)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Arrays:
        collective, tensors = self._convert(*args, **kwargs)
        results = collective.run(tensors) if tensors else ()
        if isinstance(collective, operations.Alltoall) and collective.splits is None:
            results = results[:1]
        return _to_arrays(collective.result(results))

    def start(self, *args: P.args, **kwargs: P.kwargs) -> int:
        """Start the operation; return a handle for ``poll`` and ``synchronize``."""
        collective, tensors = self._convert(*args, **kwargs)
        return collective.start_handle(tensors, convert=_to_arrays)

    def grouped(self) -> "_Operation[P]":
        """Return the same function of a sequence of arrays, for a tuple."""
        return _Operation(self._prepare, is_group=True)

    def _convert(self, *args: P.args, **kwargs: P.kwargs) -> tuple[Any, list[Tensor]]:
        collective, given = self._prepare(*args, **kwargs)
        collective.is_group = self._is_group
        arrays = given if self._is_group else [given]
        return collective, [_to_tensor(array) for array in arrays]


@_Operation
def allreduce(
    array: Arrays,
    name: Name = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> Call:
    """Return the reduction of ``array`` over all ranks."""
    op = operations.choose_op(op, None)
    collective = operations.Allreduce(process_set, name, op=op)
    collective.prescale, collective.postscale = prescale_factor, postscale_factor
    return collective, array


@_Operation
def allgather(array: Arrays, name: Name = None, process_set: ProcessSet = _ALL) -> Call:
    """Return the arrays of all ranks, concatenated; the first axis may differ."""
    return operations.Allgather(process_set, name), array


@_Operation
def broadcast(
    array: Arrays, root_rank: int, name: Name = None, process_set: ProcessSet = _ALL
) -> Call:
    """Return the array of ``root_rank``, which is global even in a process set."""
    return operations.Broadcast(process_set, name, root_rank=root_rank), array


@_Operation
def reducescatter(
    array: Arrays,
    name: Name = None,
    op: int = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Call:
    """Reduce by Average or Sum and return this rank's rows of the first axis."""
    collective = operations.Reducescatter(process_set, name, op=op)
    collective.prescale, collective.postscale = prescale_factor, postscale_factor
    return collective, array


@_Operation
def alltoall(
    array: Arrays,
    splits: Iterable[int] | None = None,
    name: Name = None,
    process_set: ProcessSet = _ALL,
) -> Call:
    """Send ``splits[r]`` rows to each rank r, or equally many; return the received.

    With ``splits``, and by ``alltoall_async``, also their counts by rank, as int32.
    """
    counts = None if splits is None else [index(count) for count in splits]
    return operations.Alltoall(process_set, name, splits=counts), array


grouped_allreduce, grouped_allgather = allreduce.grouped(), allgather.grouped()
grouped_reducescatter = reducescatter.grouped()
allreduce_async, grouped_allreduce_async = allreduce.start, grouped_allreduce.start
allgather_async, grouped_allgather_async = allgather.start, grouped_allgather.start
reducescatter_async = reducescatter.start
grouped_reducescatter_async = grouped_reducescatter.start
broadcast_async, alltoall_async = broadcast.start, alltoall.start


def broadcast_(
    array: Arrays, root_rank: int, name: Name = None, process_set: ProcessSet = _ALL
) -> Arrays:
    """Copy ``root_rank``'s values into a writable NumPy array and return it."""
    if not isinstance(array, np.ndarray) or not array.flags.writeable:
        raise UsageError("array must be a writable NumPy array. Use broadcast().")
    tensor, into = _to_tensor(array), cast("Arrays", array)
    collective = operations.Broadcast(process_set, name, root_rank=root_rank)
    collective.run((tensor,), in_place=True)
    if tensor.data_ptr() != into.ctypes.data:
        into[...] = _to_arrays(tensor)
    return into


def _to_tensor(given: Arrays) -> Tensor:
    """Return a tensor that shares the array's memory where torch has its strides."""
    if isinstance(given, Tensor):
        tensor = given.detach()
    elif hasattr(given, "__dlpack__") and not isinstance(given, np.ndarray):
        tensor = torch.from_dlpack(given)
    else:
        array: Any = np.asarray(cast("Arrays", given))
        if array.dtype.name == "bfloat16":  # of ml_dtypes
            return _to_tensor(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype.char not in _DTYPES or not array.dtype.isnative:
            raise UsageError(
                f"array must have a native dtype of torch, got {array.dtype}. Convert "
                "it by astype(), or use broadcast_object() or allgather_object()."
            )
        if any(stride < 0 or stride % array.itemsize for stride in array.strides):
            array = array.copy()
        tensor = torch.from_dlpack(array)
    if tensor.dtype is torch.bfloat16:
        import_framework("ml_dtypes")  # before anything is sent
    return tensor


def _to_arrays(result: Any) -> Arrays:  # noqa: ANN401  a tensor or a tuple
    if isinstance(result, tuple):
        return tuple(map(_to_arrays, cast("tuple[Tensor, ...]", result)))
    if result.dtype is not torch.bfloat16:
        return result.numpy(force=True)
    dtype = import_framework("ml_dtypes").bfloat16
    return _to_arrays(result.view(torch.int16)).view(dtype)
