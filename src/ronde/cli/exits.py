"""The exit codes of ``ronde``, and the handling of output that cannot be written.

Source: sysexits.h for the codes below 100.
"""

import select
import sys
from contextlib import suppress

from ronde.errors import HostError, RondeError, UsageError
from ronde.launch.limits import EXIT_INTERNAL, EXIT_UNREACHABLE, EXIT_UNWRITTEN, NO_ROOM

EXIT_USAGE = 64
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def exit_code_of(error: RondeError) -> int:
    if isinstance(error, UsageError):
        return EXIT_USAGE
    return EXIT_UNREACHABLE if isinstance(error, HostError) else EXIT_INTERNAL


def is_unwritten(error: OSError) -> bool:
    """Return True if standard output has no reader, or its disk is full."""
    if isinstance(error, BrokenPipeError):
        poll = select.poll()
        poll.register(1, 0)
        return bool(poll.poll(0))
    return error.errno in NO_ROOM and error.filename is None


def give_up_output(error: OSError) -> int:
    """Report a failed write, unless a reader is gone; return the exit code."""
    # The rest of the buffer must not fail at exit.
    sys.stdout = None
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    # The terminal may have been closed.
    with suppress(OSError):
        print(
            f"ronde: output cannot be written: {error.strerror}. Make room, or write "
            "elsewhere.",
            file=sys.stderr,
        )
    return EXIT_UNWRITTEN
