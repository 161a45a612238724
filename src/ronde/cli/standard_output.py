"""What becomes of a command whose output cannot be written."""

import errno
import select
import sys
from contextlib import suppress

from ronde.cli.exit_codes import EXIT_BROKEN_PIPE, EXIT_UNWRITTEN

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def is_unwritten(error: OSError) -> bool:
    """Say whether it is that nobody reads standard output, or a file takes no more.

    What cannot be opened is named by its error, and is another matter; and so is a
    broken pipe that is not standard output.
    """
    if isinstance(error, BrokenPipeError):
        return not _is_read()
    return error.errno in _FULL and error.filename is None


def give_up_output(error: OSError) -> int:
    """Say why output ends, unless nobody reads it; return the exit code.

    Args:
        error: For which ``is_unwritten``.
    """
    # What is left in the buffer must not fail at exit.
    sys.stdout = None
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    # A terminal that was closed takes no complaint either.
    with suppress(OSError):
        print(
            f"ronde: output must go where there is room, got: {error.strerror}. Make "
            "room, or write elsewhere.",
            file=sys.stderr,
        )
    return EXIT_UNWRITTEN


def _is_read() -> bool:
    """Say whether somebody can still read standard output."""
    poll = select.poll()
    poll.register(1, 0)
    return not poll.poll(0)
