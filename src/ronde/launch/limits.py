"""How long a controller waits, and the kernel's limits on what a user may have."""

import errno
import resource
from typing import NamedTuple

from ronde.errors import UsageError

LEAST_OPEN_FILES = 24  # what a launcher or an agent has open, without hosts and ranks
EXIT_UNREACHABLE, EXIT_INTERNAL = 69, 70  # of sysexits.h, as those that follow
EXIT_UNWRITTEN = 74
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What a write fails with where a file takes no more."""
EXIT_NO_FORK = 71
"""No agent was started, and standard error says why (sysexits.h: EX_OSERR)."""


def require_open_files(num: int, limit: int, why: str) -> None:
    if limit != resource.RLIM_INFINITY and limit < num:
        raise UsageError(
            f"limit of open files must be at least {num} {why}, got {limit}. "
            "Type: ulimit -n 4096, or ask who runs the machine for more"
        )


def raise_open_files_limit(wanted: int) -> None:
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


class Timeouts(NamedTuple):
    """How long a controller waits for its hosts, and they for it."""

    connect_s: float = 30.0  # what a host has to start an agent, once its turn has come
    answer_s: float = 60.0  # what an agent has for an order before ranks run
    ping_s: float = 1.0  # between two words to an agent on another host
    # after so long without a word each side asks whether the other's host answers. If
    # it does not, it is lost. If it does, the line was cut for less: TCP sends again
    # what was lost after up to as long again, so that as much is waited
    lease_s: float = 8.0
    is_doubting: bool = True  # if not, nobody asks: silent for so long is lost
    end_s: float = 1.0  # what carried an agent's bytes has to end in, after the last
    # what a lost host has to come back in, when ranks are to be started again
    return_s: float = 30.0


USUAL = Timeouts()
ELASTIC = Timeouts(ping_s=0.5, lease_s=5.0, is_doubting=False, end_s=0.2)
"""Of a job that goes on without a lost host: a wrong guess costs it little."""
