"""How a benchmark ends: nccl-tests' exit codes."""

from enum import IntEnum

from ronde.errors import UsageError


class Exit(IntEnum):
    """The exit code of ``ronde bench``."""

    OK = 0
    INTERNAL = 1
    CUDA = 2
    ENGINE = 3
    TIMEOUT = 4
    UNSUPPORTED = 5
    USAGE = 6
    FAILED = 7
    """Wrong values, or less bandwidth than was asked for."""
    INTERRUPTED = 130


class UnsupportedError(UsageError):
    """What was asked for makes sense, but not here: exit code 5."""
