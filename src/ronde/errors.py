"""Every error that ronde raises on purpose: each is a ``RondeError``.

Messages follow one form: ``<name> must be <rule>, got <value>.`` and then what to do.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

E = TypeVar("E", bound=BaseException)
IN_CHILD = (
    "a collective must be called by the rank itself, got a call by a child of it, such "
    "as a DataLoader's worker. Call it in the main process and hand the result over."
)


class RondeError(Exception):
    """Base of all errors that ronde raises on purpose."""


class UsageError(RondeError, ValueError):
    """The caller asked for something that cannot be; nothing was started."""


class WorldError(UsageError):
    """The environment's ranks and sizes are partial or contradict each other."""


class NotInitializedError(RondeError, ValueError):
    """A front end was used before ``init()``."""


class LaunchError(RondeError, RuntimeError):
    """A job could not be started or kept running."""


class Failure(NamedTuple):
    """Why a host cannot take part in a job."""

    reason: str  # ``key refused``
    cure: str  # what to do or type: ``ssh-copy-id node2``
    is_transient: bool = False  # the same try may well succeed in a moment


class HostFailure(NamedTuple):
    """A host that cannot take part in a job."""

    host: str
    failure: Failure


class HostError(LaunchError):
    """Hosts cannot take part in a job; nothing was started.

    ``failures`` may add to the message; ``ready`` are hosts that could take part.
    """

    def __init__(
        self,
        message: str,
        failures: Sequence[HostFailure] = (),
        ready: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.failures = tuple(failures)
        self.ready = tuple(ready)


class StoreError(RondeError, RuntimeError):
    """The store that the ranks meet in refuses a request, or cannot be reached."""


class CollectiveError(RondeError, RuntimeError):
    """A collective failed on this rank; the data it was given is undefined."""


class PeerLostError(CollectiveError):
    """A rank that the collective needs is gone."""


class MembershipError(CollectiveError):
    """The view that this rank is part of is over; an elastic job goes on in another."""


class UnpairedError(CollectiveError):
    """All ranks of a set wait to connect, and no two sides wait for each other."""


def fresh(error: E) -> E:
    """Return a new error like one that is kept, to raise in its place.

    Each raise adds the frames it passes to its error, and with them all that they hold.
    """
    again = type(error).__new__(type(error), *error.args)
    again.__dict__.update(error.__dict__)
    if notes := getattr(error, "__notes__", None):
        again.__notes__ = list(notes)
    again.__cause__, again.__context__ = error.__cause__, error.__context__
    again.__suppress_context__ = error.__suppress_context__
    return again.with_traceback(error.__traceback__)
