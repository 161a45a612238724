"""A front end over NumPy, as small as one can be: what is left to write for another.

Arrays become torch tensors and tensors arrays by DLPack: both share their memory.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ronde.session import (
    Allgather,
    Allreduce,
    Alltoall,
    Average,
    Broadcast,
    Max,
    Min,
    NamedCollective,
    ProcessSet,
    Reducescatter,
    Sum,
    add_process_set,
    allgather_object,
    barrier,
    broadcast_object,
    global_process_set,
    init,
    join,
    poll,
    rank,
    remove_process_set,
    shutdown,
    size,
    synchronize,
)

__all__ = [
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "init",
    "join",
    "poll",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
    "synchronize",
]

Array = NDArray[Any]
_ALL = global_process_set


def allreduce(
    array: Array,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = _ALL,
) -> Array:
    return _run(Allreduce(process_set, name, op=op), [array])


def allreduce_async(
    array: Array,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = _ALL,
) -> int:
    return _start(Allreduce(process_set, name, op=op), [array])


def grouped_allreduce_async(
    arrays: Sequence[Array],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = _ALL,
) -> int:
    return _start(Allreduce(process_set, name, is_group=True, op=op), arrays)


def allgather_async(
    array: Array, name: str | None = None, process_set: ProcessSet = _ALL
) -> int:
    return _start(Allgather(process_set, name), [array])


def broadcast_async(
    array: Array, root: int, name: str | None = None, process_set: ProcessSet = _ALL
) -> int:
    return _start(Broadcast(process_set, name, root_rank=root), [array])


def broadcast_(
    array: Array, root: int, name: str | None = None, process_set: ProcessSet = _ALL
) -> None:
    """Copy the root's values into ``array``."""
    collective = Broadcast(process_set, name, root_rank=root)
    collective.run([torch.from_dlpack(array)], in_place=True)


def alltoall_async(
    array: Array,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = _ALL,
) -> int:
    """Start it; the result is the received rows and how many came from each rank."""
    return _start(Alltoall(process_set, name, splits=splits), [array])


def reducescatter_async(
    array: Array,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = _ALL,
) -> int:
    return _start(Reducescatter(process_set, name, op=op), [array])


def _run(collective: NamedCollective, arrays: Sequence[Array]) -> Any:
    tensors = [torch.from_dlpack(array) for array in arrays]
    return _to_arrays(collective.result(collective.run(tensors)))


def _start(collective: NamedCollective, arrays: Sequence[Array]) -> int:
    tensors = [torch.from_dlpack(array) for array in arrays]
    return collective.start_handle(tensors, convert=_to_arrays)


def _to_arrays(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(_to_arrays, result))
    return np.from_dlpack(result)
