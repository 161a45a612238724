"""Tells the launcher that this process has begun to exit, before other ranks see it.

The rest of an interpreter's exit may take seconds. Ranks that lose this one meanwhile
often end before it does, and one of them would be taken for the cause.
"""

import os
import time
from contextlib import suppress

from ronde.world.variables import select_variables

_PIPE = "RONDE_EXIT_PIPE"
"""The agent's pipe, as this rank has it: descriptor, inode and rank, with colons."""


def send_exit_notice() -> None:
    """Write rank and time to the agent's pipe, where there is one."""
    fd, _, rest = select_variables([_PIPE]).get(_PIPE, "").partition(":")
    inode, _, rank = rest.partition(":")
    with suppress(OSError, ValueError):
        # A wrapper may have closed the pipe; the number may be another file's since.
        if str(os.fstat(int(fd)).st_ino) == inode:
            notice = f"{int(rank)} {time.monotonic()} {os.getpid()}\n"
            os.write(int(fd), notice.encode())
