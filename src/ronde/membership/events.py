"""What happens to an elastic job, and what its policy orders."""

from collections.abc import Mapping
from typing import NamedTuple

from ronde.membership.view import Place


class HostsFound(NamedTuple):
    """All hosts that may be used, in their order, with their slots; -1 for unknown."""

    slots: Mapping[str, int]


class HostReady(NamedTuple):
    """An agent is there, and ranks can be started."""

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


class MemberSettled(NamedTuple):
    """See ``view.Settled``."""

    number: int
    step: int
    reason: str = ""


class MemberDone(NamedTuple):
    """A member has applied the last step."""

    number: int
    step: int


class MemberLost(NamedTuple):
    """A process has ended, or is about to."""

    number: int
    exit_code: int  # as ``subprocess`` has it
    reason: str  # in half a sentence: ``rank 2 on node1 was killed by SIGKILL``
    has_ended: bool = True  # else it is lost, but its place is not free yet


class Tick(NamedTuple):
    """It is time to look at the clock: see ``Membership.due_s``."""


HostEvent = HostsFound | HostReady | HostGone | HostLeaves
MemberEvent = MemberSettled | MemberDone | MemberLost
Event = HostEvent | MemberEvent | Tick


class Connect(NamedTuple):
    """Bring an agent to a host."""

    host: str


class Release(NamedTuple):
    """A host has no process any more and is not used for now."""

    host: str


class StartProcess(NamedTuple):
    """Start a process."""

    place: Place


class Kill(NamedTuple):
    """End a process now; nothing but its place waits for its ``MemberLost``."""

    number: int
    reason: str
    is_hung: bool = False  # where it is may be shown before


class EndView(NamedTuple):
    """Have these members break off."""

    numbers: tuple[int, ...]
    reason: str


class PauseView(NamedTuple):
    """Have these members settle after a common step."""

    numbers: tuple[int, ...]
    reason: str


class BeginView(NamedTuple):
    """Have the members of a view connect, in the order of their ranks."""

    view: int
    members: tuple[Place, ...]
    gone: tuple[int, ...]  # members of the view before
    new: tuple[Place, ...]  # not in the view before
    source: int
    step: int
    is_equal: bool
    reason: str


class Dismiss(NamedTuple):
    """Have a member that has settled end with 0."""

    number: int
    reason: str


class FinishAll(NamedTuple):
    """All have applied the last step; end who is not in the view."""


class Stop(NamedTuple):
    """The job cannot go on."""

    reason: str  # a sentence
    is_too_few: bool = False  # ranks, for too long


class Barred(NamedTuple):
    """Nothing new is started on a host for a while, as processes failed there."""

    host: str
    num_failures: int
    seconds: float


ProcessOrder = Connect | Release | StartProcess | Kill | Barred
ViewOrder = EndView | PauseView | BeginView | Dismiss | FinishAll
Order = ProcessOrder | ViewOrder | Stop
