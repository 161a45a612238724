"""Waiting: for handles, for all ranks, and for those that have more data."""

from typing import Any

import torch

from ronde.collectives.torch_modes import outside_compiler
from ronde.coordination.requests import NamedOperation, OpKind
from ronde.data_parallel import Standing, keep_up_until
from ronde.torch.process_sets import ProcessSet, global_process_set
from ronde.torch.session import current_session
from ronde.torch.submission import member_of

_NUM_COLUMNS = 1 + len(Standing._fields)


@outside_compiler
def poll(handle: int) -> bool:
    """Say whether ``synchronize(handle)`` would return at once.

    Raises:
        UsageError: There is no such handle, or it was synchronized.
        CollectiveError: There is no session.
    """
    return current_session().handles.poll(handle)


@outside_compiler
def synchronize(handle: int) -> Any:  # noqa: ANN401 - each operation's own result
    """Wait for the operation of ``handle``, forget it and return its result.

    Returns:
        None for a handle that is not known.

    Raises:
        CollectiveError: The operation failed, or there is no session.
    """
    return current_session().handles.synchronize(handle)


@outside_compiler
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called this.

    Raises:
        UsageError: The set is not there or without this rank, or a barrier of it is
            under way.
        CollectiveError: A rank is gone.
    """
    member = member_of(process_set, "Barrier")
    member.coordinator.run(NamedOperation(OpKind.BARRIER))


@outside_compiler
def join(device: int = -1) -> int:
    """Take part in what the others still reduce, with zeros, until all have joined.

    For ranks whose data end earlier. Averages still divide by the number of all ranks.
    All-reduces and optimizers go on; what else the others ask for fails, as nothing
    could stand for this rank's part.

    Args:
        device: Accepted for Horovod's sake; zeros are made where they are needed.

    Returns:
        The rank that joined last, equal on all ranks; with optimizers one that took
        the last step.

    Raises:
        CollectiveError: A rank is gone.
    """
    del device
    session = current_session()
    coordinator = session.members[0].coordinator

    def wait_for_all() -> int:
        return coordinator.run(NamedOperation(OpKind.JOIN))

    def exchange(own: list[Standing]) -> list[list[Standing]]:
        rows = [(session.world.rank, *standing) for standing in own]
        sent = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(
            -1, _NUM_COLUMNS
        )
        operation = NamedOperation(OpKind.ALLGATHER, (sent,), "join.standings")
        (gathered,) = coordinator.run(operation)
        everyone: list[list[Standing]] = [[] for _ in range(session.world.size)]
        for rank, *standing in gathered.tolist():
            everyone[rank].append(Standing(*standing))
        return everyone

    followers = [
        each for member in session.members.values() for each in member.followers
    ]
    return keep_up_until(followers, join=wait_for_all, exchange=exchange)
