"""The events of an elastic job, and the orders of its policy."""

from collections.abc import Mapping
from typing import NamedTuple

from ronde.membership.view import FromRank, ToRank, Worker


class HostsFound(NamedTuple):
    """The hosts that may be used, in order, with their slots (-1 if unknown)."""

    slots: Mapping[str, int]


class HostReady(NamedTuple):
    """The agent of a host runs, so workers can be started there."""

    host: str
    slots: int


class HostGone(NamedTuple):
    """A host did not become ready, or was lost with its workers."""

    host: str
    reason: str  # such as ``node1 was lost: no message from it for 5 s``
    joins_itself: bool = False  # once it can be used again


class HostLeaves(NamedTuple):
    """The workers of a host must leave it at the next step boundary."""

    host: str
    reason: str
    joins_itself: bool = False  # once it can be used again


class WorkerReport(NamedTuple):
    """A worker has sent a message about the current view, or its first message."""

    worker: int
    message: FromRank


class WorkerLost(NamedTuple):
    """A worker has ended or is about to end."""

    worker: int
    exit_code: int  # as in ``subprocess``
    how: str  # the predicate of a sentence about it: ``was killed by SIGKILL``
    has_ended: bool = True  # if False, its slot is not free yet


class TimerExpired(NamedTuple):
    """``Membership.due_s`` has been reached."""


HostEvent = HostsFound | HostReady | HostGone | HostLeaves
Event = HostEvent | WorkerReport | WorkerLost | TimerExpired


class Connect(NamedTuple):
    """Start an agent on a host."""

    host: str


class Release(NamedTuple):
    """Close the agent of a host that no longer has workers."""

    host: str


class StartWorker(NamedTuple):
    """Start a worker process in its slot."""

    worker: Worker


class Kill(NamedTuple):
    """Kill a worker; its slot becomes free with its ``WorkerLost`` event."""

    worker: int
    reason: str
    is_hung: bool = False  # first show its stacks


class Send(NamedTuple):
    """Send the same message to several workers."""

    workers: tuple[int, ...]
    message: ToRank


class Stop(NamedTuple):
    """End the job with a failure."""

    reason: str  # a sentence
    is_too_few: bool = False  # it had too few ranks for too long


class Blacklisted(NamedTuple):
    """Report that a host gets no workers for a while, because workers failed there."""

    host: str
    num_failures: int
    seconds: float


Order = Connect | Release | StartWorker | Kill | Send | Stop | Blacklisted
