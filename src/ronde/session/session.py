"""The session of this process: all state between ``init()`` and ``shutdown()``.

The current session is a deliberate global: Horovod's API is module level.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import count
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import distributed
from torch.cuda import nccl

from ronde.collectives import Communicator, Connections, Work
from ronde.coordination.control.channel import connect_channel
from ronde.coordination.coordinator import CoordinationOptions, Coordinator
from ronde.coordination.requests import OpKind
from ronde.coordination.waits import Waits
from ronde.data_parallel import JoinParticipant
from ronde.errors import (
    IN_CHILD,
    CollectiveError,
    NotInitializedError,
    RondeError,
    UsageError,
)
from ronde.membership.view import View, ViewBegins
from ronde.session.recordings import Recordings
from ronde.tuning import TuningOptions
from ronde.world import Launcher, RankInfo, World
from ronde.world.horovod_config import HorovodConfig

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "size",
]
_START_TIMEOUT_S = 300.0
_LOAD_MPI = """
import sys
sys.path[:] = sys.argv[1:]
import mpi4py
mpi4py.rc(initialize=False, finalize=False)
import mpi4py.MPI
"""
_NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
_RULE = "ProcessSet should be initialized with a list of process ranks or an mpi4py"
_Pending = tuple[Work[Any], Callable[[Any], Any]]


class ProcessSet:
    """A set of ranks, registered by ``init()`` or ``add_process_set()``."""

    process_set_id: int | None = None  # equal on all ranks; None until it is registered
    ranks: list[int]  # global ranks, ascending
    mpi_comm: Any = None  # the mpi4py communicator passed to the constructor
    lost: tuple[int, ...] = ()  # its former ranks, after all have left an elastic job

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:  # noqa: ANN401  mpi4py's
        """Accept ranks in any order, or an mpi4py communicator."""
        ranks: Any = ranks_or_comm
        if not isinstance(ranks_or_comm, Iterable):
            ranks = _ranks_of(ranks_or_comm)
            self.mpi_comm = ranks_or_comm
        self.ranks = sorted(cast("Iterable[int]", ranks))
        if not all(isinstance(rank, int) for rank in cast("list[Any]", self.ranks)):
            raise UsageError(f"{_RULE} Comm object")

    def size(self) -> int | None:
        """Return the number of ranks, or None if the set is not registered."""
        return None if self.process_set_id is None else len(_registered(self))

    def rank(self) -> int | None:
        """Return this process's rank in the set, or None if the set is not registered.

        Raises ``UsageError`` if this process is not in the set.
        """
        if self.process_set_id is None:
            return None
        own, ranks = current_world().rank, _registered(self)
        if own not in ranks:
            raise UsageError("Process is not part of provided process set.")
        return ranks.index(own)

    def included(self) -> bool:
        """Return True if this process is in the set."""
        return current_world().rank in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )


@dataclass(frozen=True, slots=True)
class ProcessSetState:
    """The connected state of a process set on one of its ranks."""

    ranks: tuple[int, ...]  # global ranks, ascending
    rank: int  # this process's index in ``ranks``
    communicator: Communicator  # used by the coordinator only
    coordinator: Coordinator
    # Objects that reduce over the set outside of the coordinator.
    participants: WeakSet[JoinParticipant] = field(
        default_factory=WeakSet[JoinParticipant]
    )
    _taken: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])

    def claim_number(self, label: str, number: int | None = None) -> int:
        """Reserve an unused number for a label: ``number`` itself if it is free."""
        if number is None or (label, number) in self._taken:
            number = next(i for i in count() if (label, i) not in self._taken)
        self._taken.add((label, number))
        return number

    def close(self) -> None:
        self.coordinator.close()
        for participant in list(self.participants):
            participant.unbind()
        for communicator in (*self.coordinator.duplicates, self.communicator):
            communicator.close()


@dataclass(frozen=True, slots=True)
class Session:
    """All resources that ``init()`` makes and ``shutdown()`` releases."""

    world: World
    rank_info: RankInfo
    config: HorovodConfig
    connections: Connections
    hosts: tuple[str, ...]  # of every rank
    options: CoordinationOptions
    is_dynamic: bool  # process sets may be added and removed
    recordings: Recordings
    # Both by the set's id; 0 is the set of all ranks.
    sets: dict[int, tuple[int, ...]]  # the ranks of every set
    states: dict[int, ProcessSetState]  # only of sets that include this rank
    tuning: TuningOptions | None = None  # None keeps the default bucket sizes
    # By handle: a work, and the function that converts its result.
    handles: dict[int, _Pending] = field(default_factory=dict[int, _Pending])
    handle_numbers: "count[int]" = field(default_factory=count)
    waits: Waits = field(default_factory=Waits)
    set_ids: "count[int]" = field(default_factory=lambda: count(1))
    # In order of registration.
    process_sets: list[ProcessSet] = field(default_factory=list[ProcessSet])
    engine: str = ""  # the argument of ``init``
    view: View | None = None  # of an elastic job
    begins: ViewBegins | None = None  # the message that began the view
    # The world to report before this rank has joined the others of an elastic job.
    expected: World | None = None

    def connect(
        self, set_id: int, ranks: Sequence[int], own: Communicator | None = None
    ) -> ProcessSetState:
        """Connect the sorted ranks, by ``own`` or a new communicator; collective."""
        connections, rank = self.connections, ranks.index(self.world.rank)
        name = f"set{set_id}"
        if own is None:
            connections = connections.clone()
            own = connections.connect(name, ranks, self.hosts)
        try:
            hosts = [self.hosts[other] for other in ranks]
            is_one_host = len(set(hosts)) == 1
            channel = connect_channel(
                connections.store(f"{name}/control"),
                rank,
                hosts,
                timeout_s=self.config.start_timeout_s or _START_TIMEOUT_S,
                exchange=own.exchange if is_one_host else None,
            )
            names = tuple(ranks) if set_id else ()
            coordinator = Coordinator(
                own,
                channel,
                self.options,
                set_id=set_id,
                ranks=names,
                waits=self.waits,
            )
        except BaseException:
            own.close()
            raise
        coordinator.call_on_stop(self._abort_duplicates)
        coordinator.execution.recorder = self.recordings.recorder
        self.states[set_id] = ProcessSetState(tuple(ranks), rank, own, coordinator)
        return self.states[set_id]

    @property
    def is_of_views(self) -> bool:
        """True if this rank is in a view of an elastic job or waits to enter one."""
        return self.view is not None or self.expected is not None

    @property
    def source(self) -> int:
        """The rank from which all other ranks copy their state when a view begins."""
        if self.view is None or self.begins is None:
            return 0
        return self.view.rank_of(self.begins.source)

    def _abort_duplicates(self) -> None:
        # A stall in any set ends the job.
        for state in list(self.states.values()):
            for communicator in list(state.coordinator.duplicates):
                communicator.abort()

    def abort(self, failure: CollectiveError) -> None:
        """Fail all present and future calls; ``close`` then waits for no rank."""
        self.connections.scope.abort(failure)
        self.connections.scope.wait()

    def close(self) -> None:
        self.handles.clear()
        for state in self.states.values():
            state.coordinator.close()
        for state in self.states.values():
            state.close()
        self.states.clear()  # breaks a reference cycle
        self.connections.scope.end()


global_process_set = ProcessSet([])
"""All ranks; ``ranks`` is set by ``init()``."""
global_process_set.process_set_id = 0
sessions: list[Session] = []
"""The current session, if any, as the only element."""
parents: list[World] = []
"""In a child process of a rank, the parent's world as the only element."""
_kept: list[Session] = []  # in a child, the parent's session, never closed


def is_initialized() -> bool:
    """Return True between ``init()`` and ``shutdown()``."""
    return bool(sessions or parents)


def current_session(error: type[RondeError] = CollectiveError) -> Session:
    if not sessions:
        raise error(IN_CHILD if parents else _NOT_INITIALIZED)
    return sessions[0]


def current_world() -> World:
    """Return the world of the current session, or raise ``NotInitializedError``.

    A child of a rank, such as a worker of a DataLoader, has the world of its parent.
    """
    if parents:
        return parents[0]
    session = current_session(NotInitializedError)
    return session.expected or session.world


def state_of(process_set: ProcessSet, kind: OpKind) -> ProcessSetState:
    """Return this rank's state in a process set; error messages name ``kind``."""
    session = current_session()
    set_id = process_set.process_set_id
    state = session.states.get(set_id) if set_id is not None else None
    # An id from an earlier session may now belong to another set.
    if state is not None and (not set_id or [*state.ranks] == process_set.ranks):
        return state
    if process_set.lost:
        raise UsageError(
            f"{kind.name.capitalize()}: all ranks of this process set, "
            f"{process_set.lost}, have left the job. Make another process set."
        )
    problem = f"Rank {session.world.rank} is not a member of the provided process set."
    if session.sets.get(set_id or -1) != tuple(process_set.ranks):
        problem = "Process set provided does not exist, or has not been registered."
    raise UsageError(f"{kind.name.capitalize()}: {problem}")


def _registered(process_set: ProcessSet) -> tuple[int, ...]:
    ranks = current_session(NotInitializedError).sets.get(
        process_set.process_set_id or 0
    )
    # An id from an earlier session may now belong to another set.
    if ranks is None or list(ranks) != process_set.ranks:
        raise UsageError("Process set does not exist or has not been registered.")
    return ranks


def _ranks_of(comm: Any) -> list[int]:  # noqa: ANN401  mpi4py's
    # A program with a communicator has loaded mpi4py; loading it here would start MPI.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Comm):
        raise UsageError(f"{_RULE} Comm object, got {comm!r}. Give the ranks.")
    group = comm.Get_group()
    return list(group.Translate_ranks(None, mpi.COMM_WORLD.Get_group()))


def _leave_to_parent() -> None:
    """Leave the session to the parent without closing it, in a forked child."""
    if sessions and current_world().size > 1:
        parents.append(current_world())
        _kept.append(sessions.pop())


os.register_at_fork(after_in_child=_leave_to_parent)


def rank() -> int:
    """Return this process's global rank."""
    return current_world().rank


def size() -> int:
    """Return the number of processes."""
    return current_world().size


def local_rank() -> int:
    """Return this process's rank among the processes of its host."""
    return current_world().local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return current_world().local_size


def cross_rank() -> int:
    """Return this host's index among the hosts that have this local rank."""
    return current_world().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have this local rank."""
    return current_world().cross_size


def is_homogeneous() -> bool:
    """Return True if every host has the same number of ranks."""
    world = current_world()
    return world.local_size * world.cross_size == world.size


@cache
def mpi_built() -> bool:
    """Return True if mpi4py is installed and can load an MPI library."""
    if "mpi4py.MPI" in sys.modules:
        return True
    if find_spec("mpi4py") is None:
        return False
    # In a subprocess, so as not to initialise MPI before the program does.
    words = [sys.executable, "-I", "-c", _LOAD_MPI, *sys.path]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def mpi_enabled() -> bool:
    """Return True if MPI started this job or moves its tensors."""
    if not is_initialized():
        return False
    session = current_session()
    is_launcher = session.rank_info.launcher in (Launcher.OPEN_MPI, Launcher.PMI)
    return is_launcher or session.states[0].communicator.engine == "mpi"


def mpi_threads_supported() -> bool:
    """Return True if several threads may call MPI; raise ``UsageError`` without MPI."""
    if not mpi_enabled():
        raise UsageError(
            "Horovod MPI is not enabled; Please make sure it's installed and enabled."
        )
    # A program that has not imported mpi4py.MPI does not call MPI.
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is None or mpi.Query_thread() == mpi.THREAD_MULTIPLE


def gloo_built() -> bool:
    """Return True if torch has Gloo."""
    return distributed.is_available() and distributed.is_gloo_available()


gloo_enabled = gloo_built


def nccl_built() -> int:
    """Return torch's NCCL version, such as 22304 for 2.23.4; 0 if it has none."""
    if not distributed.is_available() or not distributed.is_nccl_available():
        return 0
    major, minor, patch = cast("tuple[int, ...]", nccl.version())[:3]
    return major * 10000 + minor * 100 + patch


def ddl_built() -> bool:
    """Return False, as IBM's DDL and Intel's oneCCL are not supported."""
    return False


ccl_built = ddl_built


def cuda_built() -> bool:
    """Return True if torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return True if torch was built for ROCm."""
    return torch.version.hip is not None
