"""Horovod's reducing collectives on tensors, synchronous and with handles.

Every function is collective: all ranks call the same ones in the same order, which is
what matches them; names are accepted for Horovod's sake. Unless said otherwise:

* ``tensor`` has any shape and layout, equal on all ranks, on CPU or CUDA.
* ``op`` is Average (default), Sum, Min, Max or Product; ``average`` is its deprecated
  form. Integer averages truncate toward zero.
* ``prescale_factor`` multiplies the input, ``postscale_factor`` the result.
* ``CollectiveError`` (``HorovodInternalError``) says that the operation failed.
"""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ronde.collectives import ReduceOp, Work
from ronde.data_parallel import Compression, Compressor
from ronde.errors import UsageError
from ronde.torch.session import current_session
from ronde.torch.works import All, Mapped

Average = 0
Sum = 1
Min = 3
Max = 4
Product = 5

_OPS = {
    Average: ReduceOp.AVERAGE,
    Sum: ReduceOp.SUM,
    Min: ReduceOp.MIN,
    Max: ReduceOp.MAX,
    Product: ReduceOp.PRODUCT,
}


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return the reduction of ``tensor`` over all ranks; the input stays as it is."""
    wire, context = compression.compress(copy_of(tensor))
    reduced = allreduce_(wire, average, name, op, prescale_factor, postscale_factor)
    return compression.decompress(reduced, context)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce ``tensor`` over all ranks in place and return it."""
    del name
    return _start(
        tensor, reduce_op(op, average), prescale_factor, postscale_factor
    ).wait()


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``allreduce``; the handle's result is a new tensor."""
    copy = copy_of(tensor)
    return allreduce_async_(copy, average, name, op, prescale_factor, postscale_factor)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``allreduce_``; the handle's result is ``tensor``."""
    del name
    return current_session().handles.add(
        _start(tensor, reduce_op(op, average), prescale_factor, postscale_factor)
    )


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return the reductions of several tensors; the inputs stay as they are."""
    compressed = [compression.compress(copy_of(tensor)) for tensor in tensors]
    reduced = grouped_allreduce_(
        [wire for wire, _ in compressed],
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
    )
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, compressed, strict=True)
    ]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tuple[Tensor, ...]:
    """Reduce several tensors in place and return them."""
    del name
    return _start_group(
        tensors, reduce_op(op, average), prescale_factor, postscale_factor
    ).wait()


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``grouped_allreduce``; the handle's result is a tuple of new tensors."""
    copies = [copy_of(tensor) for tensor in tensors]
    return grouped_allreduce_async_(
        copies, average, name, op, prescale_factor, postscale_factor
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``grouped_allreduce_``; the handle's result is the tuple of ``tensors``."""
    del name
    return current_session().handles.add(
        _start_group(tensors, reduce_op(op, average), prescale_factor, postscale_factor)
    )


def reducescatter(
    tensor: Tensor,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce over all ranks and return this rank's rows of dimension 0.

    When the size does not divide the rows, the first ranks take one row more.
    """
    del name
    wire, context = compression.compress(tensor.detach())
    work = _start_scatter(wire, op, prescale_factor, postscale_factor)
    return compression.decompress(work.wait(), context)


def reducescatter_async(
    tensor: Tensor,
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``reducescatter``."""
    del name
    return current_session().handles.add(
        _start_scatter(tensor.detach(), op, prescale_factor, postscale_factor)
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce several tensors and return this rank's rows of each."""
    del name
    compressed = [compression.compress(tensor.detach()) for tensor in tensors]
    works = [
        _start_scatter(wire, op, prescale_factor, postscale_factor)
        for wire, _ in compressed
    ]
    return [
        compression.decompress(work.wait(), context)
        for work, (_, context) in zip(works, compressed, strict=True)
    ]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``grouped_reducescatter``; the handle's result is a tuple."""
    del name
    works = [
        _start_scatter(tensor.detach(), op, prescale_factor, postscale_factor)
        for tensor in tensors
    ]
    return current_session().handles.add(All(works))


def reduce_op(op: int | None, average: bool | None = None) -> ReduceOp:
    """Translate Horovod's ``op`` and its deprecated ``average``."""
    if op is not None and average is not None:
        raise UsageError(
            "The op parameter supersedes average. Please provide only one of them."
        )
    if average is not None:
        warnings.warn(
            "average is deprecated; say op=hvd.Average or op=hvd.Sum.",
            DeprecationWarning,
            stacklevel=3,
        )
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is None:
        return ReduceOp.AVERAGE
    if op not in _OPS:
        raise UsageError(f"op must be Average, Sum, Min, Max or Product, got {op}.")
    return _OPS[op]


def _start(
    tensor: Tensor, op: ReduceOp, prescale_factor: float, postscale_factor: float
) -> Work[Tensor]:
    work = current_session().communicator.all_reduce(
        tensor.detach(), op, prescale=prescale_factor, postscale=postscale_factor
    )
    return Mapped(work, lambda _: tensor)


def _start_group(
    tensors: Sequence[Tensor],
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
) -> Work[tuple[Tensor, ...]]:
    return All([_start(t, op, prescale_factor, postscale_factor) for t in tensors])


def _start_scatter(
    tensor: Tensor, op: int, prescale_factor: float, postscale_factor: float
) -> Work[Tensor]:
    return current_session().communicator.reduce_scatter(
        tensor, reduce_op(op), prescale=prescale_factor, postscale=postscale_factor
    )


def copy_of(tensor: Tensor) -> Tensor:
    """Return the values of ``tensor`` in its layout, outside autograd."""
    return tensor.detach().clone(memory_format=torch.preserve_format)
