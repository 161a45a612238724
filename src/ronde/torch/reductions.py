"""Horovod's all-reduce of tensors: one or a group, synchronous and with handles.

Ranks are matched by ``name``; without one, by the order of calls. Unless said
otherwise:

* ``tensor`` has any shape and layout, equal on all ranks, on CPU or CUDA; results have
  its layout. Sparse tensors: see ``sparse_allreduce_async``.
* ``op`` is Average (default), Sum, Adasum, Min, Max or Product; ``average`` is its
  deprecated form. Averages divide by the size of the process set; those of integers
  truncate toward zero.
* ``prescale_factor`` multiplies the input, ``postscale_factor`` the result.
* ``process_set`` is the ranks that take part; all of them must call.
* A group is ready when all its tensors are, on all ranks.
* ``UsageError`` (a ValueError) is raised at the call, on this rank only: the dtype has
  no such reduction, the set is not there or without this rank, the name is under way.
* ``CollectiveError`` (``HorovodInternalError``) says that the operation failed, and
  why: shapes, dtypes or operations that do not fit, a rank that is gone.

The functions without ``async`` and without underscore work under autograd.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ronde.collectives import Work
from ronde.collectives.torch_modes import outside_compiler
from ronde.data_parallel import Compression, Compressor
from ronde.torch.autograd import (
    AllgatherFunction,
    AllreduceFunction,
    carry_out,
    carry_out_in_place,
    start,
    start_in_place,
)
from ronde.torch.operators import Adasum, Average, Max, Min, Product, Sum, which_op
from ronde.torch.process_sets import ProcessSet, global_process_set
from ronde.torch.session import current_session
from ronde.torch.submission import member_of
from ronde.torch.works import Only

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "sparse_allreduce_async",
]


@outside_compiler
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the reduction of ``tensor`` over all ranks; the input stays as it is."""
    reduction = AllreduceFunction(
        which_op(op, average),
        name or "",
        process_set,
        prescale_factor,
        postscale_factor,
    )
    wire, context = compression.compress(tensor)
    return compression.decompress(carry_out(reduction, (wire,))[0], context)


@outside_compiler
def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce ``tensor`` over all ranks in place and return it."""
    reduction = AllreduceFunction(
        which_op(op, average),
        name or "",
        process_set,
        prescale_factor,
        postscale_factor,
    )
    carry_out_in_place(reduction, (tensor,))
    return tensor


@outside_compiler
def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``allreduce``; the handle's result is a new tensor."""
    reduction = AllreduceFunction(
        which_op(op, average),
        name or "",
        process_set,
        prescale_factor,
        postscale_factor,
    )
    return current_session().handles.add(Only(start(reduction, (tensor,))))


@outside_compiler
def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``allreduce_``; the handle's result is ``tensor``."""
    reduction = AllreduceFunction(
        which_op(op, average),
        name or "",
        process_set,
        prescale_factor,
        postscale_factor,
    )
    return current_session().handles.add(Only(start_in_place(reduction, (tensor,))))


@outside_compiler
def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the reductions of several tensors; the inputs stay as they are."""
    group = AllreduceFunction(
        which_op(op, average),
        name or "",
        process_set,
        prescale_factor,
        postscale_factor,
        is_group=True,
    )
    compressed = [compression.compress(tensor) for tensor in tensors]
    if not compressed:
        return []
    reduced = carry_out(group, [wire for wire, _ in compressed])
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, compressed, strict=True)
    ]


@outside_compiler
def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Reduce several tensors in place and return them."""
    group = AllreduceFunction(
        which_op(op, average),
        name or "",
        process_set,
        prescale_factor,
        postscale_factor,
        is_group=True,
    )
    given = tuple(tensors)
    if given:
        carry_out_in_place(group, given)
    return given


@outside_compiler
def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``grouped_allreduce``; the handle's result is a tuple of new tensors."""
    group = AllreduceFunction(
        which_op(op, average),
        name or "",
        process_set,
        prescale_factor,
        postscale_factor,
        is_group=True,
    )
    work = start(group, tensors) if tensors else Work[tuple[Tensor, ...]](())
    return current_session().handles.add(work)


@outside_compiler
def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``grouped_allreduce_``; the handle's result is the tuple of ``tensors``."""
    group = AllreduceFunction(
        which_op(op, average),
        name or "",
        process_set,
        prescale_factor,
        postscale_factor,
        is_group=True,
    )
    given = tuple(tensors)
    work = start_in_place(group, given) if given else Work[tuple[Tensor, ...]](())
    return current_session().handles.add(work)


@outside_compiler
def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """Start the sum or average of sparse tensors.

    Args:
        tensor: Sparse (COO), of a shape equal on all ranks, with any entries.
        name: As above.
        op: Average divides by the size of the set; anything else is Sum.
        process_set: As above.

    Returns:
        A function that waits and returns the sparse result, not coalesced: the entries
        of all ranks, one after the other.
    """
    member = member_of(process_set, "Allgather")
    names = [f"{name}.{part}" if name else "" for part in ("indices", "values")]
    # Gathering is along the first dimension, where an entry's index must be.
    indices = tensor._indices().transpose(0, 1).contiguous()  # noqa: SLF001  torch's name
    values = tensor._values()  # noqa: SLF001  torch's name
    gathered = [
        start(AllgatherFunction(each, process_set), (part,))
        for each, part in zip(names, (indices, values), strict=True)
    ]

    @outside_compiler
    def wait() -> Tensor:
        indices, values = [work.wait()[0] for work in gathered]
        if op == Average:
            values = values / len(member.ranks)
        return torch.sparse_coo_tensor(indices.transpose(0, 1), values, tensor.size())

    return wait
