"""The one deliberate global: Horovod's API is module level, so a session is current."""

import atexit
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

from ronde.collectives import Communicator, connect, exchange_hosts
from ronde.errors import CollectiveError, NotInitializedError, UsageError
from ronde.torch.handles import Handles
from ronde.world import Claim, World, read_claim

_NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


@dataclass(frozen=True, slots=True)
class Session:
    """What lives between ``init()`` and ``shutdown()``."""

    world: World
    communicator: Communicator
    handles: Handles
    duplicates: WeakSet[Communicator]

    def duplicate(self) -> Communicator:
        """Return a communicator with an order of calls of its own; collective."""
        communicator = self.communicator.duplicate()
        self.duplicates.add(communicator)
        return communicator

    def close(self) -> None:
        """Forget what is pending and give everything back."""
        self.handles.clear()
        for communicator in [*self.duplicates, self.communicator]:
            communicator.close()


_sessions: list[Session] = []


def init(comm: Sequence[int] | None = None, *, engine: str = "") -> None:
    """Join the other ranks; collective. Does nothing when that is done already.

    The world is read from the environment of whichever launcher started this process:
    ``ronde run``, torchrun, mpirun, srun or horovodrun; without one it is a world of
    one.

    Args:
        comm: None, or the list of all ranks.
        engine: What is to move tensors, equal on all ranks; empty takes the
            environment's.

    Raises:
        UsageError: There is no such engine, or it is not installed.
        WorldError: The environment is partial or contradicts itself.
        CollectiveError: The other ranks could not be reached.
    """
    if _sessions:
        return
    claim = read_claim()
    if comm is not None and list(comm) != list(range(claim.size)):
        raise UsageError(
            f"comm must be None or all ranks in order, got {comm} with size "
            f"{claim.size}. Leave it out."
        )
    communicator = connect(claim, engine=engine)
    _sessions.append(
        Session(_world(claim, communicator), communicator, Handles(), WeakSet())
    )
    atexit.register(shutdown)


def _world(claim: Claim, communicator: Communicator) -> World:
    if claim.world is not None:
        return claim.world
    hosts = exchange_hosts(communicator, socket.gethostname())
    return World.from_hosts(communicator.rank, hosts)


def shutdown() -> None:
    """Leave; pending handles are forgotten. ``init()`` may be called again."""
    atexit.unregister(shutdown)
    while _sessions:
        _sessions.pop().close()


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
