"""Horovod's all-gather and broadcast of tensors, synchronous and with handles.

As in ``reductions``, save that any dtype is moved.
"""

from collections.abc import Sequence

from torch import Tensor

from ronde.collectives import Work
from ronde.collectives.torch_modes import outside_compiler
from ronde.torch.autograd import (
    AllgatherFunction,
    BroadcastFunction,
    carry_out,
    carry_out_in_place,
    start,
    start_in_place,
)
from ronde.torch.process_sets import ProcessSet, global_process_set
from ronde.torch.session import current_session
from ronde.torch.works import Only


@outside_compiler
def allgather(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the ranks' tensors one after the other along dimension 0.

    Args:
        tensor: Dimension 0 may differ from rank to rank, the others may not.
        name: As in ``reductions``.
        process_set: As in ``reductions``.
    """
    return carry_out(AllgatherFunction(name or "", process_set), (tensor,))[0]


@outside_compiler
def allgather_async(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``allgather``."""
    work = start(AllgatherFunction(name or "", process_set), (tensor,))
    return current_session().handles.add(Only(work))


@outside_compiler
def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Return ``allgather`` of several tensors, which are ready together."""
    if not tensors:
        return ()
    return carry_out(AllgatherFunction(name or "", process_set, is_group=True), tensors)


@outside_compiler
def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``grouped_allgather``."""
    group = AllgatherFunction(name or "", process_set, is_group=True)
    work = start(group, tensors) if tensors else Work[tuple[Tensor, ...]](())
    return current_session().handles.add(work)


@outside_compiler
def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return ``root_rank``'s tensor; the input stays as it is.

    Args:
        tensor: Any shape, equal on all ranks.
        root_rank: The rank whose values everyone gets, among all ranks, also where
            ``process_set`` is some of them.
        name: As in ``reductions``.
        process_set: As in ``reductions``.
    """
    return carry_out(BroadcastFunction(root_rank, name or "", process_set), (tensor,))[
        0
    ]


@outside_compiler
def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Copy ``root_rank``'s values into ``tensor`` and return it."""
    broadcast = BroadcastFunction(root_rank, name or "", process_set)
    carry_out_in_place(broadcast, (tensor,))
    return tensor


@outside_compiler
def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``broadcast``; the handle's result is a new tensor."""
    work = start(BroadcastFunction(root_rank, name or "", process_set), (tensor,))
    return current_session().handles.add(Only(work))


@outside_compiler
def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``broadcast_``; the handle's result is ``tensor``."""
    broadcast = BroadcastFunction(root_rank, name or "", process_set)
    return current_session().handles.add(Only(start_in_place(broadcast, (tensor,))))
