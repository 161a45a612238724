"""What lives between ``init()`` and ``shutdown()``, and the one that is current.

A deliberate global: Horovod's API is module level.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakSet

from ronde.collectives import Communicator, Connections, Work
from ronde.coordination.control.channel import connect_channel
from ronde.coordination.coordinator import CoordinationOptions, Coordinator
from ronde.coordination.waits import Waits
from ronde.data_parallel import BucketTuningOptions, JoinParticipant
from ronde.errors import CollectiveError, NotInitializedError, UsageError
from ronde.torch.recordings import Recordings
from ronde.world import RankInfo, World
from ronde.world.horovod_config import HorovodConfig

_NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class Handles:
    """The table from handle to work; handles start at 0 and are not used again."""

    def __init__(self) -> None:
        self._works: dict[int, tuple[Work[Any], Callable[[Any], Any]]] = {}
        self._numbers = count()

    def add(self, work: Work[Any], finish: Callable[[Any], Any]) -> int:
        """Return a new handle for what ``finish`` makes of the work's result."""
        handle = next(self._numbers)
        self._works[handle] = work, finish
        return handle

    def poll(self, handle: int) -> bool:
        """Return whether the work is done."""
        if handle not in self._works:
            raise UsageError(f"Handle {handle} was not created or has been cleared.")
        return self._works[handle][0].is_done()

    def synchronize(self, handle: int) -> Any:  # noqa: ANN401  each operation's own
        """Wait and return the result; None for an unknown handle."""
        if handle not in self._works:
            return None
        work, finish = self._works.pop(handle)
        return finish(work.wait())

    def clear(self) -> None:
        """Forget all handles."""
        self._works.clear()


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What all process sets of a session are made from."""

    connections: Connections
    hosts: tuple[str, ...]  # of every rank
    options: CoordinationOptions
    timeout_s: float  # how long the ranks of a set wait for each other to connect
    waits: Waits = field(default_factory=Waits)


@dataclass(frozen=True, slots=True)
class ProcessSetState:
    """What a rank holds of a process set that it belongs to."""

    ranks: tuple[int, ...]  # among all, ascending
    rank: int  # this one's index in them
    communicator: Communicator  # its calls are the coordinator's alone
    coordinator: Coordinator
    # What reduces over the set outside of the coordinator.
    participants: WeakSet[JoinParticipant] = field(
        default_factory=WeakSet[JoinParticipant]
    )
    _numbers: dict[str, set[int]] = field(
        default_factory=lambda: defaultdict[str, set[int]](set)
    )

    @classmethod
    def connect(
        cls,
        settings: SessionSettings,
        set_id: int,
        ranks: Sequence[int],
        communicator: Communicator | None = None,
    ) -> "ProcessSetState":
        """Connect a set's ranks, ascending, under a new ``set_id``; collective."""
        rank = ranks.index(settings.connections.info.rank)
        name = f"set{set_id}"
        if communicator is None:
            communicator = settings.connections.connect(name, ranks, settings.hosts)
        try:
            channel = connect_channel(
                settings.connections.store(f"{name}/control"),
                rank,
                [settings.hosts[other] for other in ranks],
                timeout_s=settings.timeout_s,
            )
            coordinator = Coordinator(
                communicator,
                channel,
                settings.options,
                set_id=set_id,
                ranks=tuple(ranks) if set_id else (),
                waits=settings.waits,
            )
        except BaseException:
            communicator.close()
            raise
        return cls(tuple(ranks), rank, communicator, coordinator)

    def claim_number(self, label: str, number: int | None = None) -> int:
        """Return a number that is new for this set and label: ``number`` if it is."""
        taken = self._numbers[label]
        if number is None or number in taken:
            number = next(i for i in count() if i not in taken)
        taken.add(number)
        return number

    def close(self) -> None:
        """Notify the others, fail what is under way and give everything back."""
        self.coordinator.close()
        for participant in list(self.participants):
            participant.unbind()
        self.communicator.close()


@dataclass(frozen=True, slots=True)
class Session:
    """What lives between ``init()`` and ``shutdown()``."""

    world: World
    rank_info: RankInfo
    config: HorovodConfig
    settings: SessionSettings
    is_dynamic: bool  # process sets may come and go
    # By the set's number; 0 is all ranks.
    sets: dict[int, tuple[int, ...]]  # the ranks of every set
    states: dict[int, ProcessSetState]  # those sets that this rank belongs to
    recordings: Recordings
    tuning: BucketTuningOptions | None = None  # None leaves bucket sizes as they are
    handles: Handles = field(default_factory=Handles)
    _duplicates: WeakSet[Communicator] = field(default_factory=WeakSet[Communicator])
    set_ids: "count[int]" = field(default_factory=lambda: count(1))

    def duplicate(self, set_id: int, number: int) -> Communicator:
        """Connect a set's ranks once more, by a ``number`` that is used once."""
        # Not the set's communicator's own duplicate(), which would come between the
        # calls of the coordinator; and nothing below the set's own name, where that
        # communicator makes its duplicates.
        connections, name = self.settings.connections.clone(), f"set{set_id}.{number}"
        ranks = self.states[set_id].ranks
        communicator = connections.connect(name, ranks, self.settings.hosts)
        self._duplicates.add(communicator)
        return communicator

    def abort_on_stall(self, state: ProcessSetState) -> None:
        """Abort the duplicates, too, if a stall in this set ends the job."""

        def abort() -> None:
            for communicator in list(self._duplicates):
                communicator.abort()

        state.coordinator.call_on_stop(abort)

    def close(self) -> None:
        """Give everything back."""
        self.handles.clear()
        for state in self.states.values():
            state.coordinator.close()
        for state in self.states.values():
            state.close()
        for communicator in self._duplicates:
            communicator.close()


sessions: list[Session] = []
"""The current one, or none."""


def is_initialized() -> bool:
    """Return whether ``init()`` was called, and ``shutdown()`` not since."""
    return bool(sessions)


def current_world() -> World:
    """Return the world of the current session, or raise ``NotInitializedError``."""
    if not sessions:
        raise NotInitializedError(_NOT_INITIALIZED)
    return sessions[0].world


def current_session() -> Session:
    """Return the current session, for a collective, or raise ``CollectiveError``."""
    if not sessions:
        raise CollectiveError(_NOT_INITIALIZED)
    return sessions[0]


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
    """Return whether every host has the same number of ranks."""
    world = current_world()
    return world.local_size * world.cross_size == world.size
