"""What happens to an elastic job, and what its policy orders."""

from collections.abc import Mapping
from typing import NamedTuple

from ronde.membership.view import FromRank, ToRank, Worker


class HostsFound(NamedTuple):
    """All hosts that may be used, in their order, with their slots; -1 for unknown."""

    slots: Mapping[str, int]


class HostReady(NamedTuple):
    """An agent is there, and workers can be started."""

    host: str
    slots: int


class HostGone(NamedTuple):
    """A host did not get ready, or was lost with all that ran there."""

    host: str
    reason: str  # in half a sentence: ``node1 was lost: no message from it for 5 s``


class HostLeaves(NamedTuple):
    """A host is to be left at the next step boundary."""

    host: str
    reason: str


class WorkerReport(NamedTuple):
    """A worker has sent a message about the current view, or its first one."""

    worker: int
    message: FromRank


class WorkerLost(NamedTuple):
    """A worker has ended, or is about to."""

    worker: int
    exit_code: int  # as ``subprocess`` has it
    how: str  # what follows its name in a sentence: ``was killed by SIGKILL``
    has_ended: bool = True  # else it is lost, but its slot is not free yet


class Tick(NamedTuple):
    """It is time to look at the clock: see ``Membership.due_s``."""


HostEvent = HostsFound | HostReady | HostGone | HostLeaves
Event = HostEvent | WorkerReport | WorkerLost | Tick


class Connect(NamedTuple):
    """Bring an agent to a host."""

    host: str


class Release(NamedTuple):
    """A host has no worker any more and is not used for now."""

    host: str


class StartWorker(NamedTuple):
    """Start a worker."""

    worker: Worker


class Kill(NamedTuple):
    """End a worker now; nothing but its slot waits for its ``WorkerLost``."""

    worker: int
    reason: str
    is_hung: bool = False  # its stacks may be shown before


class Tell(NamedTuple):
    """Send a message to workers."""

    workers: tuple[int, ...]
    message: ToRank


class Stop(NamedTuple):
    """The job cannot go on."""

    reason: str  # a sentence
    is_too_few: bool = False  # ranks, for too long


class Blacklisted(NamedTuple):
    """Nothing new is started on a host for a while, as workers failed there."""

    host: str
    num_failures: int
    seconds: float


Order = Connect | Release | StartWorker | Kill | Tell | Stop | Blacklisted
