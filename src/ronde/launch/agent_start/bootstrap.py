"""Starts an agent here; imports next to nothing, so that it can be done first."""

import resource
import subprocess
import sys

from ronde.launch.limits import LEAST_OPEN_FILES, require_open_files

_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from ronde.launch.agent.agent import main; main()"
)


def start_local_agent() -> "subprocess.Popen[bytes]":
    """Start an agent on this machine, which waits for its controller's first frame."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    require_open_files(LEAST_OPEN_FILES, soft, "to run a job")
    package_dir = __file__.rpartition("/ronde/launch/")[0]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM, package_dir or "."],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Out of the way of the terminal's Ctrl-C: the controller says what to do.
        start_new_session=True,
        bufsize=0,
    )
