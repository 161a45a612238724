"""Horovod's collectives of tensors, and all else that its scripts import from here.

Ranks are matched by ``name``; without one, by the order of calls. Unless a
function's text differs:

* ``tensor`` has any shape and layout, equal on all ranks, on CPU or CUDA; results have
  its layout. Sparse tensors: see ``sparse_allreduce_async``.
* ``op`` is Average (default), Sum, Adasum, Min, Max or Product; ``average`` is its
  deprecated form. Averages divide by the size of the process set; those of integers
  truncate toward zero. Any dtype can be gathered, broadcast and exchanged.
* ``prescale_factor`` multiplies the input, ``postscale_factor`` the result.
* ``process_set`` is the ranks that take part; all of them must call.
* A group is ready when all its tensors are, on all ranks.
* ``UsageError`` (a ValueError) is raised at the call, on this rank only: the dtype has
  no such reduction, the set does not exist or lacks this rank, the name is under way.
* ``CollectiveError`` (``HorovodInternalError``) means that the operation failed, and
  why: shapes, dtypes or operations that do not fit, a lost rank, no session.

The functions without ``async`` and without underscore work under autograd. Those with
``async`` return a handle for ``poll`` and ``synchronize``.
"""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ronde.collectives import Work
from ronde.collectives.torch_modes import outside_compiler
from ronde.coordination.requests import NamedOperation, OpKind
from ronde.data_parallel import (
    Compression,
    Compressor,
    participate_until_all_joined,
)
from ronde.errors import CollectiveError as HorovodInternalError, UsageError
from ronde.torch import session
from ronde.torch.autograd import (
    Adasum,
    AllgatherFunction,
    AllreduceFunction,
    AlltoallFunction,
    Average,
    BroadcastFunction,
    CollectiveFunction,
    Max,
    Min,
    Product,
    ReducescatterFunction,
    Splits,
    Sum,
    choose_op,
)
from ronde.torch.lifetime import init, shutdown, start_timeline, stop_timeline
from ronde.torch.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
    state_of,
)
from ronde.torch.session import *  # noqa: F403
from ronde.torch.session import current_session

__all__: list[str] = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
__all__ += session.__all__

Name = str | None
_ALL = global_process_set


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
    """Return the reduction of ``tensor`` over all ranks; the input stays as it is."""
    factors = (choose_op(op, average), prescale_factor, postscale_factor)
    function = AllreduceFunction(process_set, name, False, *factors)
    return _run_compressed(function, compression, (tensor,))[0]


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
    function = AllreduceFunction(process_set, name, False, *factors)
    function.run_detached((tensor,), in_place=True)
    return tensor


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
    function = AllreduceFunction(process_set, name, False, *factors)
    return _start(function, (tensor,))


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
    function = AllreduceFunction(process_set, name, False, *factors)
    return _start(function, (tensor,), in_place=True)


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
    """Return the reductions of several tensors; the inputs stay as they are."""
    factors = (choose_op(op, average), prescale_factor, postscale_factor)
    function = AllreduceFunction(process_set, name, True, *factors)
    return _run_compressed(function, compression, tensors)


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
    function = AllreduceFunction(process_set, name, True, *factors)
    given = tuple(tensors)
    if given:
        function.run_detached(given, in_place=True)
    return given


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
    function = AllreduceFunction(process_set, name, True, *factors)
    return _start(function, tensors)


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
    function = AllreduceFunction(process_set, name, True, *factors)
    return _start(function, tensors, in_place=True)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = _ALL
) -> Callable[[], Tensor]:
    """Start the sum, or with ``op=Average`` the average, of sparse (COO) tensors.

    The function returned waits for the result: all ranks' entries, not coalesced.
    """
    num_ranks = len(state_of(process_set, OpKind.ALLGATHER).ranks)
    # Gathering is along the first dimension, where an entry's index must be.
    parts = {
        "indices": tensor._indices().transpose(0, 1).contiguous(),  # noqa: SLF001  torch's
        "values": tensor._values(),  # noqa: SLF001  torch's
    }
    gathered = [
        AllgatherFunction(process_set, name and f"{name}.{part}").start((given,))
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


def allgather(
    tensor: Tensor, name: Name = None, process_set: ProcessSet = _ALL
) -> Tensor:
    """Return the ranks' tensors along dimension 0, which may differ between ranks."""
    return AllgatherFunction(process_set, name).run((tensor,))[0]


def allgather_async(
    tensor: Tensor, name: Name = None, process_set: ProcessSet = _ALL
) -> int:
    """Start ``allgather``."""
    return _start(AllgatherFunction(process_set, name), (tensor,))


def grouped_allgather(
    tensors: Sequence[Tensor], name: Name = None, process_set: ProcessSet = _ALL
) -> tuple[Tensor, ...]:
    """Return ``allgather`` of several tensors, which are ready together."""
    if not tensors:
        return ()
    return AllgatherFunction(process_set, name, is_group=True).run(tensors)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: Name = None, process_set: ProcessSet = _ALL
) -> int:
    """Start ``grouped_allgather``."""
    return _start(AllgatherFunction(process_set, name, is_group=True), tensors)


def broadcast(
    tensor: Tensor, root_rank: int, name: Name = None, process_set: ProcessSet = _ALL
) -> Tensor:
    """Return the tensor of ``root_rank``, which counts among all ranks."""
    function = BroadcastFunction(process_set, name, root_rank=root_rank)
    return function.run((tensor,))[0]


def broadcast_(
    tensor: Tensor, root_rank: int, name: Name = None, process_set: ProcessSet = _ALL
) -> Tensor:
    """Copy ``root_rank``'s values into ``tensor`` and return it."""
    function = BroadcastFunction(process_set, name, root_rank=root_rank)
    function.run_detached((tensor,), in_place=True)
    return tensor


def broadcast_async(
    tensor: Tensor, root_rank: int, name: Name = None, process_set: ProcessSet = _ALL
) -> int:
    """Start ``broadcast``; the handle's result is a new tensor."""
    function = BroadcastFunction(process_set, name, root_rank=root_rank)
    return _start(function, (tensor,))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: Name = None, process_set: ProcessSet = _ALL
) -> int:
    """Start ``broadcast_``; the handle's result is ``tensor``."""
    function = BroadcastFunction(process_set, name, root_rank=root_rank)
    return _start(function, (tensor,), in_place=True)


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

    ``op`` is Average or Sum. The first ranks take one row more where rows are left.
    """
    factors = (op, prescale_factor, postscale_factor)
    function = ReducescatterFunction(process_set, name, False, *factors)
    return _run_compressed(function, compression, (tensor,))[0]


def reducescatter_async(
    tensor: Tensor,
    name: Name = None,
    op: int = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``reducescatter``."""
    factors = (op, prescale_factor, postscale_factor)
    function = ReducescatterFunction(process_set, name, False, *factors)
    return _start(function, (tensor,))


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
    function = ReducescatterFunction(process_set, name, True, *factors)
    return _run_compressed(function, compression, tensors)


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
    function = ReducescatterFunction(process_set, name, True, *factors)
    return _start(function, tensors)


def alltoall(
    tensor: Tensor,
    splits: Splits | None = None,
    name: Name = None,
    process_set: ProcessSet = _ALL,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows of dimension 0 to the ranks and return those they sent here.

    ``splits`` has the rows for each rank, as a list or a one-dimensional int32 tensor;
    rows past their sum are left out, and without it they are split evenly. With it, the
    result is a pair: the received rows in rank order, and how many came from each rank,
    int32, on the device of ``splits``.
    """
    function = AlltoallFunction(process_set, name, splits=splits)
    received, counts = function.run((tensor,))
    return received if splits is None else (received, counts)


def alltoall_async(
    tensor: Tensor,
    splits: Splits | None = None,
    name: Name = None,
    process_set: ProcessSet = _ALL,
) -> int:
    """Start ``alltoall``; the handle's result is always the pair."""
    function = AlltoallFunction(process_set, name, splits=splits)
    return _add_handle(function.start((tensor,)), function.finish)


def poll(handle: int) -> bool:
    """Return whether ``synchronize(handle)`` would return at once, once before it."""
    handles = current_session().handles
    if handle not in handles:
        raise UsageError(f"Handle {handle} was not created or has been cleared.")
    return handles[handle][0].is_done()


def synchronize(handle: int) -> Any:  # noqa: ANN401  each operation's own result
    """Wait for an operation; return its result, None for an unknown handle."""
    handles = current_session().handles
    if handle not in handles:
        return None
    work, finish = handles.pop(handle)
    return finish(work.wait())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called this; one at a time for each set."""
    coordinator = state_of(process_set, OpKind.BARRIER).coordinator
    coordinator.run(NamedOperation(OpKind.BARRIER))


def join(device: int = -1) -> int:
    """Take part in what the others still reduce, with zeros, until all have joined.

    For ranks whose data end earlier. Averages still divide by the number of all ranks;
    other collectives fail on the others. ``device`` is ignored. Returns the rank that
    joined last, equal on all ranks; with optimizers one that took the last step.
    """
    del device
    states = current_session().states
    participants = [each for state in states.values() for each in state.participants]
    return participate_until_all_joined(participants, states[0].coordinator)


def _run_compressed(
    function: CollectiveFunction,
    compression: type[Compressor],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    if not tensors:
        return []
    compressed = [compression.compress(tensor) for tensor in tensors]
    results = function.run([wire for wire, _ in compressed])
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, compressed, strict=True)
    ]


def _start(
    function: CollectiveFunction, tensors: Sequence[Tensor], *, in_place: bool = False
) -> int:
    given = tuple(tensors)
    work = function.start(given, in_place=in_place) if given else Work[Any](())

    def finish(results: Any) -> Any:  # noqa: ANN401  a tensor or a tuple
        found = given if in_place else results
        return found if function.is_group else found[0]

    return _add_handle(work, finish)


def _add_handle(work: Work[Any], finish: Callable[[Any], Any]) -> int:
    session = current_session()
    handle = next(session.handle_numbers)
    session.handles[handle] = work, finish
    return handle


for _name in __all__:
    _function = globals()[_name]
    # torch.compile leaves what talks to other ranks as it is.
    if isinstance(_function, FunctionType) and _function.__module__ == __name__:
        globals()[_name] = outside_compiler(_function)
