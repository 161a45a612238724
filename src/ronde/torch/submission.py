"""What is checked before a collective is submitted to its process set's coordinator."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ronde.errors import UsageError
from ronde.torch.members import ProcessSetState
from ronde.torch.process_sets import ProcessSet
from ronde.torch.session import current_session
from ronde.torch.wrappers import require_whole


def member_of(process_set: ProcessSet, word: str) -> ProcessSetState:
    """Return this rank's part in a process set.

    Args:
        process_set: The set.
        word: The operation, as messages name it.

    Raises:
        UsageError: There is no such set, or this rank is not one of it.
        CollectiveError: There is no session.
    """
    session = current_session()
    set_id = process_set.process_set_id
    member = session.members.get(set_id) if set_id is not None else None
    # One that an earlier session registered may bear the number of another now.
    if member is not None and (not set_id or [*member.ranks] == process_set.ranks):
        return member
    if session.sets.get(set_id or -1) != tuple(process_set.ranks):
        raise UsageError(
            f"{word}: Process set provided does not exist, or has not been registered."
        )
    raise UsageError(
        f"{word}: Rank {session.world.rank} is not a member of the provided process "
        "set."
    )


def require_dtypes(
    tensors: Sequence[Tensor], dtypes: Collection[torch.dtype] | None = None
) -> None:
    """Refuse what cannot be reduced or moved.

    Args:
        tensors: What a collective was given.
        dtypes: Those that it is defined for; None for all.

    Raises:
        UsageError: A tensor has another dtype, or is sparse or sharded.
    """
    require_whole(tensors)
    for tensor in tensors:
        if (
            dtypes is not None and tensor.dtype not in dtypes
        ) or tensor.layout is not torch.strided:
            raise UsageError(f"Tensor type {tensor.type()} is not supported.")


def detached(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors outside autograd, sharing their memory."""
    return tuple([t.detach() if t.requires_grad else t for t in tensors])
