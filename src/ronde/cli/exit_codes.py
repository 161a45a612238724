"""The exit codes of ``ronde`` itself.

Source: sysexits.h for those below 100.
"""

from ronde.errors import HostError, RondeError, UsageError

EXIT_USAGE = 64
EXIT_UNREACHABLE = 69
EXIT_INTERNAL = 70
EXIT_UNWRITTEN = 74
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def exit_code_of(error: RondeError) -> int:
    """Return what the process ends with after an error."""
    if isinstance(error, UsageError):
        return EXIT_USAGE
    return EXIT_UNREACHABLE if isinstance(error, HostError) else EXIT_INTERNAL
