"""Process sets: some of the ranks, which run collectives of their own."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from ronde.collectives import Communicator
from ronde.collectives.objects import broadcast_json
from ronde.collectives.torch_modes import outside_compiler
from ronde.coordination.requests import NamedOperation, OpKind
from ronde.errors import NotInitializedError, UsageError
from ronde.membership.view import View
from ronde.torch.session import (
    ProcessSetState,
    Session,
    current_session,
    current_world,
)

_RULE = "ProcessSet should be initialized with a list of process ranks or an mpi4py"


class ProcessSet:
    """Some of the ranks, once ``init()`` or ``add_process_set()`` has been given it."""

    process_set_id: int | None = None  # equal on all ranks; None until it is registered
    ranks: list[int]  # among all, ascending
    mpi_comm: Any = None  # the communicator that it was made from
    lost: tuple[int, ...] = ()  # its ranks when the last of them left an elastic job

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:  # noqa: ANN401  mpi4py's
        """Name the ranks, in any order, or give an mpi4py communicator of them."""
        ranks: Any = ranks_or_comm
        if not isinstance(ranks_or_comm, Iterable):
            ranks = _ranks_of(ranks_or_comm)
            self.mpi_comm = ranks_or_comm
        self.ranks = sorted(cast("Iterable[int]", ranks))
        if not all(isinstance(rank, int) for rank in cast("list[Any]", self.ranks)):
            raise UsageError(f"{_RULE} Comm object")

    def size(self) -> int | None:
        """Return its number of ranks; None while it is not registered."""
        return None if self.process_set_id is None else len(_registered(self))

    def rank(self) -> int | None:
        """Return this rank's index in it, None while it is not registered; or raise."""
        if self.process_set_id is None:
            return None
        own, ranks = current_world().rank, _registered(self)
        if own not in ranks:
            raise UsageError("Process is not part of provided process set.")
        return ranks.index(own)

    def included(self) -> bool:
        """Return whether this rank is part of it."""
        return current_world().rank in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )


global_process_set = ProcessSet([])
"""All ranks; ``ranks`` are there after ``init()``."""
global_process_set.process_set_id = 0


@outside_compiler
def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set, or ranks, and return it; collective over all ranks.

    ``UsageError`` if these ranks have a set already, or sets may not come and go.
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
    """Take a process set back; collective over all ranks. What it still does fails.

    Returns False at once for the set of all ranks and for one that is not registered.
    """
    set_id = process_set.process_set_id
    if not set_id:
        return False
    session = current_session(NotInitializedError)
    _require_dynamic(session, "removing")
    process_set.process_set_id = None
    if list(session.sets.get(set_id, ())) != process_set.ranks:
        return False
    _agree(session, f"remove.{set_id}", set_id)
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
    """Number a set and connect its ranks; collective.

    False if another has the same, unless ``can_equal``.
    """
    ranks = tuple(process_set.ranks)
    size = session.world.size
    is_there = bool(ranks) and 0 <= ranks[0] <= ranks[-1] < size
    if not is_there or len(set(ranks)) != len(ranks):
        raise UsageError(
            f"ranks of a process set must be different and in 0..{size - 1}, got "
            f"{process_set.ranks}. Name each rank once."
        )
    if ranks in session.sets.values() and not can_equal:
        return False
    word = ".".join(map(str, ranks))
    set_id = _agree(session, f"add.{word}", next(session.set_ids))
    if session.world.rank in ranks:
        state = session.connect(set_id, ranks)
        state.coordinator.execution.recorder = session.recordings.recorder
    # A rank that went on and ended would take the store along, where others still meet.
    _agree(session, f"added.{word}", set_id)
    session.sets[set_id] = ranks
    session.process_sets.append(process_set)
    process_set.process_set_id = set_id
    return True


def register_all(session: Session, sets: list[ProcessSet]) -> None:
    """Register what ``init`` was given; collective. No set may be there twice."""
    before = {ranks: set_id for set_id, ranks in session.sets.items() if set_id}
    for number, process_set in enumerate(sets):
        process_set.process_set_id = before.pop(tuple(process_set.ranks), None)
        if process_set.process_set_id is None and not register(session, process_set):
            raise UsageError(
                "Horovod could not be initialized because process_sets entry number "
                f"{number} is a duplicate: {process_set}"
            )


class SetTable:
    """Process sets by the numbers of their members, which outlive a view."""

    def __init__(self, sets: Sequence[ProcessSet], view: View | None = None) -> None:
        """Take sets of a view, or those that a new process is to register."""
        self._sets = list(sets)
        self._numbers: list[list[int]] | None = None
        if view is not None:
            members = view.members
            self._numbers = [[members[r].id for r in s.ranks] for s in sets]

    def share(self, communicator: Communicator, source: int) -> None:
        """Have new processes take over what ``source`` has; collective."""
        own = self._numbers
        self._numbers = broadcast_json(communicator, lambda: own, source)
        more = len(self._numbers or ()) - len(self._sets)
        self._sets += [ProcessSet([]) for _ in range(more)]

    def register(self, session: Session, view: View) -> None:
        """Register all, with those of their members that are left; collective."""
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


def state_of(process_set: ProcessSet, kind: OpKind) -> ProcessSetState:
    """Return this rank's part in a process set; ``kind`` is of the operation."""
    session = current_session()
    set_id = process_set.process_set_id
    state = session.states.get(set_id) if set_id is not None else None
    # One that an earlier session registered may bear the number of another now.
    if state is not None and (not set_id or [*state.ranks] == process_set.ranks):
        return state
    if process_set.lost:
        raise UsageError(
            f"{kind.name.capitalize()}: a process set must have ranks, but those of "
            f"this one, {process_set.lost}, are gone. Make another one."
        )
    problem = f"Rank {session.world.rank} is not a member of the provided process set."
    if session.sets.get(set_id or -1) != tuple(process_set.ranks):
        problem = "Process set provided does not exist, or has not been registered."
    raise UsageError(f"{kind.name.capitalize()}: {problem}")


def _agree(session: Session, what: str, number: int) -> int:
    """Wait until every rank wants the same, and take rank 0's number."""
    tensor = torch.tensor([number], device="cpu")
    operation = NamedOperation(
        OpKind.BROADCAST, (tensor,), f"process_set.{what}", (tensor,), root=0
    )
    session.states[0].coordinator.run(operation)
    return int(tensor.item())


def _require_dynamic(session: Session, doing: str) -> None:
    if not session.is_dynamic:
        raise UsageError(
            f"Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {doing} process sets after "
            "Horovod initialization."
        )


def _registered(process_set: ProcessSet) -> tuple[int, ...]:
    ranks = current_session(NotInitializedError).sets.get(
        process_set.process_set_id or 0
    )
    # One that an earlier session registered may bear the number of another now.
    if ranks is None or list(ranks) != process_set.ranks:
        raise UsageError("Process set does not exist or has not been registered.")
    return ranks


def _ranks_of(comm: Any) -> list[int]:  # noqa: ANN401  mpi4py's
    # Whoever has a communicator has loaded mpi4py; loading it here would start MPI.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Comm):
        raise UsageError(f"{_RULE} Comm object, got {comm!r}. Give the ranks.")
    group = comm.Get_group()
    return list(group.Translate_ranks(None, mpi.COMM_WORLD.Get_group()))
