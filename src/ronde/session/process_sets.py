"""Registration and removal of process sets, also across views of an elastic job."""

from collections.abc import Sequence

import torch

from ronde.collectives import Communicator
from ronde.collectives.objects import broadcast_json
from ronde.collectives.torch_modes import outside_compiler
from ronde.errors import NotInitializedError, UsageError
from ronde.membership.view import View
from ronde.session.operations import Broadcast
from ronde.session.session import (
    ProcessSet,
    Session,
    current_session,
    global_process_set,
)


@outside_compiler
def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set, or a list of ranks, and return it; collective.

    All ranks must call this. Raises ``UsageError`` if a set with these ranks exists, or
    process sets are not dynamic.
    """
    session = current_session(NotInitializedError)
    _require_dynamic(session, "adding")
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if not register(session, process_set):
        raise UsageError(f"Attempted to add a duplicate process set: {process_set}")
    return process_set


@outside_compiler
def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set and fail its pending operations; collective.

    All ranks must call this. Returns False at once for the set of all ranks and for an
    unregistered set.
    """
    set_id = process_set.process_set_id
    if not set_id:
        return False
    session = current_session(NotInitializedError)
    _require_dynamic(session, "removing")
    process_set.process_set_id = None
    if list(session.sets.get(set_id, ())) != process_set.ranks:
        return False
    _agree(f"remove.{set_id}", set_id)
    del session.sets[set_id]
    held = session.process_sets
    held[:] = [s for s in held if s is not process_set and s.process_set_id != set_id]
    state = session.states.pop(set_id, None)
    if state is not None:
        state.close()
    return True


def register(
    session: Session, process_set: ProcessSet, *, can_equal: bool = False
) -> bool:
    """Give a set an id and connect its ranks; collective.

    Returns False if another set has the same ranks; ``can_equal`` permits this.
    """
    ranks = tuple(process_set.ranks)
    size = session.world.size
    is_there = bool(ranks) and 0 <= ranks[0] <= ranks[-1] < size
    if not is_there or len(set(ranks)) != len(ranks):
        raise UsageError(
            f"the ranks of a process set must be distinct and in 0..{size - 1}, got "
            f"{process_set.ranks}."
        )
    if ranks in session.sets.values() and not can_equal:
        return False
    word = ".".join(map(str, ranks))
    set_id = _agree(f"add.{word}", next(session.set_ids))
    if session.world.rank in ranks:
        session.connect(set_id, ranks)
    # The rank with the store must not leave before all ranks are connected.
    _agree(f"added.{word}", set_id)
    session.sets[set_id] = ranks
    session.process_sets.append(process_set)
    process_set.process_set_id = set_id
    return True


def register_all(session: Session, sets: list[ProcessSet]) -> None:
    """Register the sets passed to ``init``, all different; collective."""
    before = {ranks: set_id for set_id, ranks in session.sets.items() if set_id}
    for number, process_set in enumerate(sets):
        process_set.process_set_id = before.pop(tuple(process_set.ranks), None)
        if process_set.process_set_id is None and not register(session, process_set):
            raise UsageError(
                "Horovod could not be initialized because process_sets entry number "
                f"{number} is a duplicate: {process_set}"
            )


class SetTable:
    """Process sets stored as worker ids, which stay valid when ranks change."""

    def __init__(self, sets: Sequence[ProcessSet], view: View | None = None) -> None:
        self._sets = list(sets)
        self._numbers: list[list[int]] | None = None
        if view is not None:
            members = view.members
            self._numbers = [[members[r].id for r in s.ranks] for s in sets]

    def share(self, communicator: Communicator, source: int) -> None:
        """Copy the sets of rank ``source`` to new processes; collective."""
        own = self._numbers
        self._numbers = broadcast_json(communicator, lambda: own, source)
        more = len(self._numbers or ()) - len(self._sets)
        self._sets += [ProcessSet([]) for _ in range(more)]

    def register(self, session: Session, view: View) -> None:
        """Register all sets with their remaining members; collective."""
        if self._numbers is None:
            register_all(session, self._sets)
            return
        ranks = view.ranks
        for each, numbers in zip(self._sets, self._numbers, strict=True):
            left = sorted(ranks[number] for number in numbers if number in ranks)
            each.lost = () if left else each.lost or tuple(each.ranks)
            each.ranks, each.process_set_id = left, None
            if left:
                register(session, each, can_equal=True)
            else:
                session.process_sets.append(each)


def _agree(change: str, number: int) -> int:
    """Wait until every rank requests the same change; return rank 0's number."""
    wanted = torch.tensor([number], device="cpu")
    collective = Broadcast(global_process_set, f"process_set.{change}")
    return int(collective.run((wanted,))[0].item())


def _require_dynamic(session: Session, doing: str) -> None:
    if not session.is_dynamic:
        raise UsageError(
            f"Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {doing} process sets after "
            "Horovod initialization."
        )
