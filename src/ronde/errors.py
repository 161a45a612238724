"""Every error that ronde raises on purpose.

::

    RondeError
    ├── UsageError(ValueError)           the caller's mistake; nothing was started
    │   └── WorldError                   the environment is partial or contradictory
    ├── NotInitializedError(ValueError)  a front end was used before its ``init()``
    ├── LaunchError(RuntimeError)        a job could not be started or kept running
    └── CollectiveError(RuntimeError)    a collective failed; every rank of it is told
        └── PeerLostError                another rank is gone

Messages follow one form: ``<name> must be <rule>, got <value>.`` and then what to do.
"""


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


class CollectiveError(RondeError, RuntimeError):
    """A collective failed on this rank; the data it was given is undefined."""


class PeerLostError(CollectiveError):
    """A rank that the collective needs is gone."""
