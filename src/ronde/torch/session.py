"""The one deliberate global: Horovod's API is module level, so a session is current."""

from dataclasses import dataclass, field
from itertools import count
from weakref import WeakSet

from ronde.collectives import Communicator
from ronde.data_parallel import BucketTuningOptions
from ronde.errors import CollectiveError, NotInitializedError
from ronde.torch.handles import Handles
from ronde.torch.members import Job, ProcessSetState
from ronde.torch.recordings import Recordings
from ronde.world import RankInfo, World
from ronde.world.horovod_config import HorovodConfig

_NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


@dataclass(frozen=True, slots=True)
class Session:
    """What lives between ``init()`` and ``shutdown()``.

    Attributes:
        world: This rank's place among all.
        claim: What the environment said of it.
        knobs: What Horovod's variables say.
        job: What process sets are made from.
        is_dynamic: Whether process sets may come and go.
        sets: The ranks of every process set by its number; 0 is all ranks.
        members: This rank in those of them that it belongs to.
        recordings: Timelines.
        tuning: How optimizers find their bucket sizes; None leaves those be.
        handles: Collectives under way that the program has numbers for.
        duplicates: Communicators of their own that were made for others.
    """

    world: World
    claim: RankInfo
    knobs: HorovodConfig
    job: Job
    is_dynamic: bool
    sets: dict[int, tuple[int, ...]]
    members: dict[int, ProcessSetState]
    recordings: Recordings
    tuning: BucketTuningOptions | None = None
    handles: Handles = field(default_factory=Handles)
    duplicates: WeakSet[Communicator] = field(default_factory=WeakSet[Communicator])
    _set_ids: "count[int]" = field(default_factory=lambda: count(1))

    @property
    def communicator(self) -> Communicator:
        """Of all ranks; its calls are the coordinator's alone."""
        return self.members[0].communicator

    def duplicate(self, set_id: int, number: int) -> Communicator:
        """Return a communicator of a set with an order of calls of its own; collective.

        Args:
            set_id: A process set that this rank belongs to.
            number: Equal on all ranks, used once.
        """
        # Not the set's communicator's own duplicate(), which would come between the
        # calls of the coordinator; and nothing below the set's own name, where that
        # communicator makes its duplicates.
        connections, name = self.job.connections.clone(), f"set{set_id}.{number}"
        ranks = self.members[set_id].ranks
        communicator = connections.connect(name, ranks, self.job.hosts)
        self.duplicates.add(communicator)
        return communicator

    def heed(self, member: ProcessSetState) -> None:
        """Have what waits elsewhere end too, if a stall in this set ends the job."""
        member.coordinator.call_on_stop(self._abort_duplicates)

    def _abort_duplicates(self) -> None:
        for communicator in list(self.duplicates):
            communicator.abort()

    def next_set_id(self) -> int:
        """Return a number for a process set that none had in this session."""
        return next(self._set_ids)

    def close(self) -> None:
        """Forget what is pending and give everything back."""
        self.handles.clear()
        for member in self.members.values():
            member.coordinator.close()
        for member in self.members.values():
            member.close()
        for communicator in self.duplicates:
            communicator.close()


_sessions: list[Session] = []


def begin(session: Session) -> None:
    """Make a session the current one."""
    _sessions.append(session)


def end() -> Session | None:
    """Take the current session, so that there is none; None where there was none."""
    return _sessions.pop() if _sessions else None


def is_initialized() -> bool:
    """Say whether ``init()`` was called, and ``shutdown()`` not since."""
    return bool(_sessions)


def current_world() -> World:
    """Return the world of the current session.

    Raises:
        NotInitializedError: There is none.
    """
    if not _sessions:
        raise NotInitializedError(_NOT_INITIALIZED)
    return _sessions[0].world


def current_session() -> Session:
    """Return the current session, for a collective.

    Raises:
        CollectiveError: There is none.
    """
    if not _sessions:
        raise CollectiveError(_NOT_INITIALIZED)
    return _sessions[0]


def rank() -> int:
    """Return this process's number among all, from 0 on."""
    return current_world().rank


def size() -> int:
    """Return the number of processes."""
    return current_world().size


def local_rank() -> int:
    """Return this process's number among those of its host."""
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
    """Say whether every host has the same number of ranks."""
    world = current_world()
    return world.local_size * world.cross_size == world.size
