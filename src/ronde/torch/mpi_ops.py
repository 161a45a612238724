"""Horovod's collectives on tensors, and the rest of ``horovod.torch.mpi_ops``.

Calls on different ranks are matched by ``name``; without names, by their order. Unless
a function's docstring states an exception:

* ``tensor`` has any shape and layout, equal on all ranks, on CPU or CUDA; results have
  its layout. Sparse tensors: see ``sparse_allreduce_async``.
* ``op`` is Average (default), Sum, Adasum, Min, Max or Product; ``average`` is its
  deprecated form. Averages divide by the size of the process set; those of integers
  truncate toward zero. Any dtype can be gathered, broadcast and exchanged.
* ``prescale_factor`` multiplies the input, ``postscale_factor`` the result.
* All ranks of ``process_set`` must call the function.
* A grouped operation starts once all its tensors are ready on all ranks.
* ``UsageError`` (a ValueError) is raised by the call, on this rank only, if the dtype
  does not support the reduction, the process set does not exist or does not include
  this rank, or the name is in use.
* ``CollectiveError`` (``HorovodInternalError``) is raised if the operation fails: if
  shapes, dtypes or operations do not match, a rank is lost, or there is no session.

The functions without ``async`` and without trailing underscore support autograd, also
of higher order, as their backward calls the same functions. Those with ``async`` return
a handle for ``poll`` and ``synchronize``.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ronde.collectives.torch_modes import outside_compiler
from ronde.coordination.requests import OpKind
from ronde.data_parallel import Compression, Compressor
from ronde.session import front_end
from ronde.session.front_end import *  # noqa: F403
from ronde.session.lifetime import init, shutdown
from ronde.session.operations import (
    Allgather,
    Allreduce,
    Alltoall,
    Average,
    Broadcast,
    NamedCollective,
    Reducescatter,
    Splits,
    Sum,
    Tensors,
    choose_op,
    poll,
    synchronize,
)
from ronde.session.session import ProcessSet, global_process_set, state_of

__all__: list[str] = ["Compression", "allgather", "allgather_async", "allreduce"]
__all__ += ["allreduce_", "allreduce_async", "allreduce_async_", "alltoall"]
__all__ += ["alltoall_async", "broadcast", "broadcast_", "broadcast_async"]
__all__ += ["broadcast_async_", "grouped_allgather", "grouped_allgather_async"]
__all__ += ["grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async"]
__all__ += ["grouped_allreduce_async_", "grouped_reducescatter"]
__all__ += ["grouped_reducescatter_async", "init", "poll", "reducescatter"]
__all__ += ["reducescatter_async", "shutdown", "sparse_allreduce_async", "synchronize"]
__all__ += front_end.__all__

Name = str | None
_ALL = global_process_set


@outside_compiler
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: Name = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> Tensor:
    """Return the reduction of ``tensor`` over all ranks; the input is unchanged."""
    factors = (choose_op(op, average), prescale_factor, postscale_factor)
    collective = Allreduce(process_set, name, False, *factors)
    return _run_compressed(collective, compression, (tensor,))[0]


@outside_compiler
def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: Name = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> Tensor:
    """Reduce ``tensor`` over all ranks in place and return it."""
    factors = (choose_op(op, average), prescale_factor, postscale_factor)
    Allreduce(process_set, name, False, *factors).run((tensor,), in_place=True)
    return tensor


@outside_compiler
def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: Name = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> int:
    """Start ``allreduce``; the handle's result is a new tensor."""
    factors = (choose_op(op, average), prescale_factor, postscale_factor)
    return Allreduce(process_set, name, False, *factors).start_handle((tensor,))


@outside_compiler
def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: Name = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> int:
    """Start ``allreduce_``; the handle's result is ``tensor``."""
    factors = (choose_op(op, average), prescale_factor, postscale_factor)
    collective = Allreduce(process_set, name, False, *factors)
    return collective.start_handle((tensor,), in_place=True)


@outside_compiler
def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: Name = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> list[Tensor]:
    """Return the reductions of several tensors; the inputs are unchanged."""
    factors = (choose_op(op, average), prescale_factor, postscale_factor)
    collective = Allreduce(process_set, name, True, *factors)
    return _run_compressed(collective, compression, tensors)


@outside_compiler
def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: Name = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> tuple[Tensor, ...]:
    """Reduce several tensors in place and return them."""
    factors = (choose_op(op, average), prescale_factor, postscale_factor)
    collective = Allreduce(process_set, name, True, *factors)
    given = tuple(tensors)
    if given:
        collective.run(given, in_place=True)
    return given


@outside_compiler
def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: Name = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> int:
    """Start ``grouped_allreduce``; the handle's result is a tuple of new tensors."""
    factors = (choose_op(op, average), prescale_factor, postscale_factor)
    return Allreduce(process_set, name, True, *factors).start_handle(tensors)


@outside_compiler
def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: Name = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> int:
    """Start ``grouped_allreduce_``; the handle's result is the tuple of ``tensors``."""
    factors = (choose_op(op, average), prescale_factor, postscale_factor)
    collective = Allreduce(process_set, name, True, *factors)
    return collective.start_handle(tensors, in_place=True)


@outside_compiler
def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = _ALL
) -> Callable[[], Tensor]:
    """Start the sum, or with ``op=Average`` the average, of sparse (COO) tensors.

    Returns a function that waits for the result, which is not coalesced.
    """
    num_ranks = len(state_of(process_set, OpKind.ALLGATHER).ranks)
    # Transposed, as entries are gathered along the first dimension.
    parts = {
        "indices": tensor._indices().transpose(0, 1).contiguous(),  # noqa: SLF001  torch's
        "values": tensor._values(),  # noqa: SLF001  torch's
    }
    gathered = [
        Allgather(process_set, name and f"{name}.{part}").start((given,))
        for part, given in parts.items()
    ]

    @outside_compiler
    def wait() -> Tensor:
        indices, values = [work.wait()[0] for work in gathered]
        if op == Average:
            values = values / num_ranks
        return torch.sparse_coo_tensor(
            indices.transpose(0, 1),
            values,
            tensor.size(),
            device=values.device,
            check_invariants=False,
        )

    return wait


@outside_compiler
def allgather(
    tensor: Tensor, name: Name = None, process_set: ProcessSet = _ALL
) -> Tensor:
    """Return the tensors of all ranks, concatenated along dimension 0.

    The size of dimension 0 may differ between ranks.
    """
    return _run(Allgather(process_set, name), (tensor,))[0]


@outside_compiler
def allgather_async(
    tensor: Tensor, name: Name = None, process_set: ProcessSet = _ALL
) -> int:
    """Start ``allgather``."""
    return Allgather(process_set, name).start_handle((tensor,))


@outside_compiler
def grouped_allgather(
    tensors: Sequence[Tensor], name: Name = None, process_set: ProcessSet = _ALL
) -> tuple[Tensor, ...]:
    """Gather several tensors as one group."""
    if not tensors:
        return ()
    return _run(Allgather(process_set, name, is_group=True), tensors)


@outside_compiler
def grouped_allgather_async(
    tensors: Sequence[Tensor], name: Name = None, process_set: ProcessSet = _ALL
) -> int:
    """Start ``grouped_allgather``."""
    return Allgather(process_set, name, is_group=True).start_handle(tensors)


@outside_compiler
def broadcast(
    tensor: Tensor, root_rank: int, name: Name = None, process_set: ProcessSet = _ALL
) -> Tensor:
    """Return the tensor of ``root_rank``, which is global even in a process set."""
    return _run(Broadcast(process_set, name, root_rank=root_rank), (tensor,))[0]


@outside_compiler
def broadcast_(
    tensor: Tensor, root_rank: int, name: Name = None, process_set: ProcessSet = _ALL
) -> Tensor:
    """Copy ``root_rank``'s values into ``tensor`` and return it."""
    Broadcast(process_set, name, root_rank=root_rank).run((tensor,), in_place=True)
    return tensor


@outside_compiler
def broadcast_async(
    tensor: Tensor, root_rank: int, name: Name = None, process_set: ProcessSet = _ALL
) -> int:
    """Start ``broadcast``; the handle's result is a new tensor."""
    return Broadcast(process_set, name, root_rank=root_rank).start_handle((tensor,))


@outside_compiler
def broadcast_async_(
    tensor: Tensor, root_rank: int, name: Name = None, process_set: ProcessSet = _ALL
) -> int:
    """Start ``broadcast_``; the handle's result is ``tensor``."""
    collective = Broadcast(process_set, name, root_rank=root_rank)
    return collective.start_handle((tensor,), in_place=True)


@outside_compiler
def reducescatter(
    tensor: Tensor,
    name: Name = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce over all ranks and return this rank's rows of dimension 0.

    ``op`` is Average or Sum. If the rows do not divide evenly, each of the first ranks
    gets one more.
    """
    factors = (op, prescale_factor, postscale_factor)
    collective = Reducescatter(process_set, name, False, *factors)
    return _run_compressed(collective, compression, (tensor,))[0]


@outside_compiler
def reducescatter_async(
    tensor: Tensor,
    name: Name = None,
    op: int = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``reducescatter``; return a handle for ``synchronize`` or ``poll``."""
    factors = (op, prescale_factor, postscale_factor)
    return Reducescatter(process_set, name, False, *factors).start_handle((tensor,))


@outside_compiler
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: Name = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce several tensors and return this rank's rows of each."""
    factors = (op, prescale_factor, postscale_factor)
    collective = Reducescatter(process_set, name, True, *factors)
    return _run_compressed(collective, compression, tensors)


@outside_compiler
def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: Name = None,
    op: int = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``grouped_reducescatter``; the handle's result is a tuple."""
    factors = (op, prescale_factor, postscale_factor)
    return Reducescatter(process_set, name, True, *factors).start_handle(tensors)


@outside_compiler
def alltoall(
    tensor: Tensor,
    splits: Splits | None = None,
    name: Name = None,
    process_set: ProcessSet = _ALL,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows of dimension 0 to each rank, and return the received rows.

    ``splits`` has the number of rows for each rank, as a list or a one-dimensional
    int32 tensor; rows past their sum are not sent. Without ``splits`` rows are divided
    evenly. With ``splits`` the result is a pair: the received rows in rank order, and
    the number from each rank as an int32 tensor on the device of ``splits``.
    """
    received, counts = _run(Alltoall(process_set, name, splits=splits), (tensor,))
    return received if splits is None else (received, counts)


@outside_compiler
def alltoall_async(
    tensor: Tensor,
    splits: Splits | None = None,
    name: Name = None,
    process_set: ProcessSet = _ALL,
) -> int:
    """Start ``alltoall``; the handle's result is a pair even without ``splits``."""
    return Alltoall(process_set, name, splits=splits).start_handle((tensor,))


def _run(collective: NamedCollective, tensors: Tensors) -> tuple[Tensor, ...]:
    """Run a collective, under autograd if a tensor requires a gradient."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return cast("Any", _Differentiable.apply(collective, *tensors))
    return collective.run(tensors)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collective: NamedCollective, *tensors: Tensor) -> Any:  # noqa: ANN401  autograd's
        results = collective.run(tensors)
        ctx.collective = collective
        if isinstance(collective, Alltoall):
            # Backward returns the rows to their ranks.
            ctx.collective = replace(collective, splits=results[1])
        ctx.num_rows = [t.shape[0] if t.dim() else 1 for t in tensors]
        return results

    @staticmethod
    @outside_compiler
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ANN401  autograd's
        return None, *_differentiate(ctx.collective, gradients, ctx.num_rows)


def _differentiate(
    collective: NamedCollective, gradients: Tensors, num_rows: list[int]
) -> Tensors:
    """Return the gradients of the inputs; ``num_rows`` has each input's rows."""
    process_set, is_group = collective.process_set, collective.is_group
    name = collective.name and f"{collective.name}.gradient"
    state = state_of(process_set, collective.kind)
    match collective:
        case Allgather():  # this rank's rows of the averaged gradients
            averaged = _run(Allreduce(process_set, name, is_group, Average), gradients)
            own_rows = torch.tensor([num_rows], device="cpu")
            (rows,) = Allgather(process_set, name).run((own_rows,))
            starts = cast("list[int]", rows[: state.rank].sum(0).tolist())
            return [
                each.narrow(0, start, length)
                for each, start, length in zip(averaged, starts, num_rows, strict=True)
            ]
        case Broadcast():  # the average at the root, zero elsewhere
            averaged = _run(Allreduce(process_set, name, op=Average), gradients)
            is_root = state.ranks[state.rank] == collective.root_rank
            return averaged if is_root else [torch.zeros_like(t) for t in averaged]
        case Reducescatter():  # gathered
            factor = collective.prescale * collective.postscale
            factor *= len(state.ranks) if collective.op == Sum else 1
            gathered = Allgather(process_set, name, is_group)
            return _run(gathered, [gradient * factor for gradient in gradients])
        case Alltoall():  # each row returns to its sender
            gradient = _run(replace(collective, name=name), gradients[:1])[0]
            num_dropped = num_rows[0] - gradient.shape[0]
            if num_dropped:  # rows past the splits' sum were not sent
                rest = gradient.new_zeros(num_dropped, *gradient.shape[1:])
                gradient = torch.cat([gradient, rest])
            return (gradient,)
        case _:  # the same reduction
            return _run(replace(collective, name=name), gradients)


def _run_compressed(
    collective: NamedCollective,
    compression: type[Compressor],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    if not tensors:
        return []
    compressed = [compression.compress(tensor) for tensor in tensors]
    results = _run(collective, [wire for wire, _ in compressed])
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, compressed, strict=True)
    ]
