"""Starts an agent here; imports next to nothing, so that it can be done first."""

import os
import resource
import subprocess
import sys

from ronde.launch.limits import LEAST_OPEN_FILES, require_open_files

_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from ronde.launch.agent.agent import main; "
    "main(input_fd=int(sys.argv[2]))"
)


def start_local_agent(*, has_input: bool = False) -> "subprocess.Popen[bytes]":
    """Start an agent on this machine, which waits for its controller's first frame.

    With ``has_input`` rank 0, if it is to run there, reads this process's standard
    input, unless that is a terminal with another program in its foreground.
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
        # Out of the way of the terminal's Ctrl-C: the controller says what to do.
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
