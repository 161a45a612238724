"""Exit codes, and how long a controller waits."""

import errno
from typing import NamedTuple

EXIT_UNREACHABLE, EXIT_INTERNAL = 69, 70  # of sysexits.h, as those that follow
EXIT_NO_FORK = 71  # no agent was started, and standard error says why
EXIT_UNWRITTEN = 74
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What a write fails with where a file takes no more."""


class Timeouts(NamedTuple):
    """Limits on the waits between a controller and its hosts."""

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
