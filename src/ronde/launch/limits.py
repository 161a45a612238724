"""The kernel's limits on what a user may have at once, and what to do about them."""

import errno
import resource

from ronde.errors import UsageError

LEAST_OPEN_FILES = 24  # what a launcher or an agent has open, without hosts and ranks
EXIT_NO_FORK = 71
"""No agent was started, and standard error says why (sysexits.h: EX_OSERR)."""


def require_open_files(num: int, limit: int, why: str) -> None:
    """See that so many files may be open."""
    if limit != resource.RLIM_INFINITY and limit < num:
        raise UsageError(
            f"limit of open files must be at least {num} {why}, got {limit}. "
            "Type: ulimit -n 4096, or ask who runs the machine for more"
        )


def raise_open_files_limit(wanted: int) -> None:
    """Let this process have so many files open, or as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        highest = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))


def explain_shortage(error: OSError) -> str:
    """Say which limit an error is about, its value and the cure; empty for none."""
    match error.errno:
        case errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return (
                f"limit of open files must be enough for 3 a host and 3 a rank, got "
                f"{limit}. Type: ulimit -n 4096"
            )
        # With this one a pipe was full that does not wait.
        case errno.EAGAIN if not hasattr(error, "characters_written"):
            limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
            number = "no limit" if limit == resource.RLIM_INFINITY else limit
            return (
                "limit of processes must be enough for all that this user runs, 3 "
                f"more, and all ranks, got {number} (ulimit -u). Raise it, or pids.max "
                "of the control group, or end other processes."
            )
        case _:
            return ""
