"""Start an agent on this machine, with the limits on open files and processes.

This module has few imports, so that the agent starts while others are imported.
"""

import errno
import os
import resource
import subprocess
import sys

from ronde.errors import UsageError

LEAST_OPEN_FILES = 24  # of a launcher or an agent, without hosts and ranks

_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from ronde.launch.agent.agent import main; "
    "main(input_fd=int(sys.argv[2]))"
)


def start_local_agent(*, has_input: bool = False) -> "subprocess.Popen[bytes]":
    """Start an agent on this machine; it waits for its controller's first frame.

    With ``has_input``, a rank 0 on this machine reads this process's standard input,
    unless that is a terminal with another program in its foreground.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    require_open_files(LEAST_OPEN_FILES, soft, "to run a job")
    package_dir = __file__.rpartition("/ronde/launch/")[0]
    inputs = [os.dup(0)] if has_input and _is_input_free() else []
    input_fd = str(inputs[0] if inputs else -1)
    agent = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM, package_dir or ".", input_fd],
        pass_fds=inputs,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C must reach the controller only.
        start_new_session=True,
        bufsize=0,
    )
    for fd in inputs:
        os.close(fd)
    return agent


def _is_input_free() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return True  # no terminal, or none of this session


def require_open_files(num: int, limit: int, why: str) -> None:
    if limit != resource.RLIM_INFINITY and limit < num:
        raise UsageError(
            f"limit of open files must be at least {num} {why}, got {limit}. "
            "Type: ulimit -n 4096, or ask your administrator to raise it"
        )


def raise_open_files_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        highest = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))


def explain_shortage(error: OSError) -> str:
    """Explain an error that a resource limit caused; return "" for other errors."""
    match error.errno:
        case errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return (
                f"limit of open files is {limit}, but each host and each rank needs 3. "
                "Type: ulimit -n 4096"
            )
        # With ``characters_written`` a non-blocking pipe was full.
        case errno.EAGAIN if not hasattr(error, "characters_written"):
            limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
            number = "no limit" if limit == resource.RLIM_INFINITY else limit
            return (
                f"limit of processes of this user is reached: {number} (ulimit -u). "
                "Raise it, or raise pids.max of the control group, or end other "
                "processes."
            )
        case _:
            return ""
