"""Exit codes, and the time limits of a controller."""

import errno
from typing import NamedTuple

EXIT_UNREACHABLE, EXIT_INTERNAL = 69, 70  # Source: sysexits.h, also the next two
EXIT_NO_FORK = 71  # no agent was started; the reason is on standard error
EXIT_UNWRITTEN = 74
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Errors of a write to a full disk, or past a quota."""


class Timeouts(NamedTuple):
    """Limits on the waits between a controller and its hosts."""

    connect_s: float = 30.0  # to start an agent on a host
    answer_s: float = 60.0  # for an agent's answer before ranks run
    ping_s: float = 1.0  # between two pings to an agent on another host
    # after so much silence each side connects to the other's host. If that does not
    # answer, it is lost. If it does, the lease counts twice: after an outage TCP may
    # wait as long again before it sends again
    lease_s: float = 8.0
    probes_silent: bool = True  # if False, a silent host is lost at once
    end_s: float = 1.0  # for ssh to end after its last output
    return_s: float = 30.0  # for a lost host to return before a restart


USUAL = Timeouts()
ELASTIC = Timeouts(ping_s=0.5, lease_s=5.0, probes_silent=False, end_s=0.2)
"""Limits of an elastic job, which goes on after a host was given up wrongly."""
