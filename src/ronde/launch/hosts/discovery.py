"""A script that prints the hosts."""

import subprocess

from ronde.errors import UsageError
from ronde.launch.hosts.host import Host
from ronde.launch.hosts.hostfile import parse_hostfile

_TIMEOUT_S = 60


def discover(script: str, said_by: str) -> tuple[Host, ...]:
    """Run a discovery script once and return the hosts that it prints.

    It prints what a host file may hold; ``h1`` and ``h1:2`` are such lines.

    Args:
        script: A command line for the shell.
        said_by: The option that names it.

    Raises:
        UsageError: The script fails, takes a minute, or prints something else.
    """
    try:
        done = subprocess.run(  # noqa: S602  horovodrun takes a command line, too
            script,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (subprocess.SubprocessError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(
            f"{said_by} must print hosts and end with 0, got {script!r} ({error}). Run "
            "it by hand."
        ) from None
    return parse_hostfile(done.stdout, f"{said_by} {script}")
