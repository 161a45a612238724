"""The errors that ronde raises; each is a ``RondeError``.

A message about a value is ``<name> must be <rule>, got <value>.`` and then a remedy.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

E = TypeVar("E", bound=BaseException)
IN_CHILD = (
    "a collective must be called by the rank itself, got a call by a child of it, such "
    "as a DataLoader's worker. Call it in the main process and hand the result over."
)


class RondeError(Exception):
    """Base of all errors that ronde raises."""


class UsageError(RondeError, ValueError):
    """An argument or option is invalid; nothing was started."""


class WorldError(UsageError):
    """The environment's ranks and sizes are incomplete or contradict each other."""


class NotInitializedError(RondeError, ValueError):
    """A front end was used before ``init()``."""


class FrameworkError(RondeError, ImportError):
    """A front end's framework is missing or too old."""


class LaunchError(RondeError, RuntimeError):
    """A job could not be started or kept running."""


class Failure(NamedTuple):
    """The reason that a host is unusable, with a remedy."""

    reason: str  # ``key refused``
    cure: str  # a remedy: ``ssh-copy-id node2``
    is_transient: bool = False  # a retry may succeed


class HostFailure(NamedTuple):
    """An unusable host and the reason."""

    host: str
    failure: Failure


class HostError(LaunchError):
    """Hosts are unusable; nothing was started.

    ``failures`` may add to the message; ``ready`` are usable hosts.
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
    """The key-value store refuses a request, or cannot be reached."""


class CollectiveError(RondeError, RuntimeError):
    """A collective failed on this rank; the content of its tensors is undefined."""


class MismatchError(CollectiveError):
    """Ranks called one collective with arguments that do not fit together."""


class PeerLostError(CollectiveError):
    """A rank that the collective needs is gone."""


class MembershipError(CollectiveError):
    """This rank's view has ended; an elastic job continues in another one."""


class UnpairedError(CollectiveError):
    """A wait to connect failed because not all ranks wait for the same name."""


def fresh(error: E) -> E:
    """Return a copy of a stored error, to raise in its place.

    Each raise adds frames to the traceback, which keep their objects alive.
    """
    again = type(error).__new__(type(error), *error.args)
    again.__dict__.update(error.__dict__)
    if notes := getattr(error, "__notes__", None):
        again.__notes__ = list(notes)
    again.__cause__, again.__context__ = error.__cause__, error.__context__
    again.__suppress_context__ = error.__suppress_context__
    return again.with_traceback(error.__traceback__)
