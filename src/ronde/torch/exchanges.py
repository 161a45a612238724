"""Horovod's collectives that move tensors without reducing them, and its handles.

Every function is collective: all ranks call the same ones in the same order, which is
what matches them; names are accepted for Horovod's sake. Any dtype is moved.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ronde.collectives import Work
from ronde.errors import UsageError
from ronde.torch.reductions import copy_of
from ronde.torch.session import current_session
from ronde.torch.works import All, Mapped


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Return the ranks' tensors one after the other along dimension 0.

    Args:
        tensor: Dimension 0 may differ from rank to rank, the others may not.
        name: Accepted for Horovod's sake.
    """
    del name
    return current_session().communicator.all_gather(tensor.detach()).wait()


def allgather_async(tensor: Tensor, name: str | None = None) -> int:
    """Start ``allgather``."""
    del name
    session = current_session()
    return session.handles.add(session.communicator.all_gather(tensor.detach()))


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None
) -> tuple[Tensor, ...]:
    """Return ``allgather`` of several tensors."""
    return synchronize(grouped_allgather_async(tensors, name))


def grouped_allgather_async(tensors: Sequence[Tensor], name: str | None = None) -> int:
    """Start ``grouped_allgather``."""
    del name
    session = current_session()
    works = [session.communicator.all_gather(tensor.detach()) for tensor in tensors]
    return session.handles.add(All(works))


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Return ``root_rank``'s tensor; the input stays as it is.

    Args:
        tensor: Any shape, equal on all ranks.
        root_rank: The rank whose values everyone gets.
        name: Accepted for Horovod's sake.
    """
    return broadcast_(copy_of(tensor), root_rank, name)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Copy ``root_rank``'s values into ``tensor`` and return it."""
    del name
    return _start_broadcast(tensor, root_rank).wait()


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None) -> int:
    """Start ``broadcast``; the handle's result is a new tensor."""
    return broadcast_async_(copy_of(tensor), root_rank, name)


def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None) -> int:
    """Start ``broadcast_``; the handle's result is ``tensor``."""
    del name
    return current_session().handles.add(_start_broadcast(tensor, root_rank))


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows of dimension 0 to the ranks and return those they sent here.

    Args:
        tensor: Later dimensions are equal on all ranks.
        splits: Rows for each rank, as a list or a one-dimensional int32 tensor; None
            splits evenly. Rows past their sum are left out.
        name: Accepted for Horovod's sake.

    Returns:
        The received rows in rank order; with ``splits`` also how many came from each
        rank, int32.
    """
    received, counts = synchronize(alltoall_async(tensor, splits, name))
    return received if splits is None else (received, counts)


def alltoall_async(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
) -> int:
    """Start ``alltoall``; the handle's result is always the pair."""
    del name
    session = current_session()
    work = session.communicator.all_to_all(tensor.detach(), _split_list(splits))

    def as_tensors(result: tuple[Tensor, list[int]]) -> tuple[Tensor, Tensor]:
        return result[0], torch.tensor(result[1], dtype=torch.int32)

    return session.handles.add(Mapped(work, as_tensors))


def barrier() -> None:
    """Return when every rank has called this."""
    current_session().communicator.barrier().wait()


def poll(handle: int) -> bool:
    """Say whether ``synchronize(handle)`` would return at once."""
    return current_session().handles.poll(handle)


def synchronize(handle: int) -> Any:  # noqa: ANN401 - each operation's own result
    """Wait for the operation of ``handle``, forget it and return its result.

    Raises:
        CollectiveError: The operation failed.
    """
    return current_session().handles.synchronize(handle)


def _start_broadcast(tensor: Tensor, root_rank: int) -> Work[Tensor]:
    session = current_session()
    if not 0 <= root_rank < session.world.size:
        raise UsageError(
            f"root_rank must be in 0..{session.world.size - 1}, got {root_rank}."
        )
    work = session.communicator.broadcast(tensor.detach(), root_rank)
    return Mapped(work, lambda _: tensor)


def _split_list(splits: Sequence[int] | Tensor | None) -> list[int] | None:
    if isinstance(splits, Tensor):
        if splits.dim() != 1:
            raise UsageError("alltoall expects a 1D splits tensor")
        if splits.dtype not in (torch.int32, torch.int64):
            raise UsageError(
                "alltoall expects splits to contain 32-bit integer elements."
            )
        return cast("list[int]", splits.tolist())
    return None if splits is None else list(splits)
