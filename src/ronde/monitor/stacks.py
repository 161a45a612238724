"""The Python stack of a process, read from outside.

py-spy reads the memory of a process without stopping it. Often it may not: Ubuntu's
kernels allow it to root and to a parent alone (``kernel.yama.ptrace_scope``), as do
some containers. Then a signal makes the process write its stacks by itself.
"""

import json
import os
import re
import subprocess
import sysconfig
import time
from pathlib import Path

from ronde.launch.agent.diagnostics import read_stacks
from ronde.monitor.inspection import StackFrame, make_frame
from ronde.processes import FORKED_RANK, descendants, read_process, read_text

Stack = tuple[StackFrame, ...]
"""The frames of one thread, the innermost first."""

_STACK_S = 2.0  # py-spy takes 10 ms; a process that is exiting may hold it up
_POLL_S = 0.005
_MOST_READS = 5
_MISSING = "py-spy is not installed there: pip install 'ronde[monitor]'"
_FAILED = "py-spy failed: "
NO_PYTHON = "the main thread runs no Python"
_REFUSED = (
    "the system forbids reading another process (ptrace); root, or in a container "
    "--cap-add SYS_PTRACE, would help"
)
_VARIABLE = "RONDE_STACKS="
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


def read_stack(pid: int) -> Stack | str:
    """Return the main thread's stack, or the reason that there is none."""
    stack = _read_by_py_spy(pid)
    return (read_by_signal(pid) or stack) if isinstance(stack, str) else stack


def read_by_signal(pid: int) -> Stack:
    """Make ``faulthandler`` write a rank's stacks; return the main thread's.

    It is empty if the process is stopped or no rank: see Note [Stacks] in
    ``launch.agent.diagnostics``.
    """
    process = read_process(pid)
    environ = read_text(f"/proc/{pid}/environ").split("\0")
    found = [text for text in environ if text.startswith(_VARIABLE)]
    if process is None or not found:
        return ()
    try:
        fd = os.open(found[0].partition(",")[2], os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # another agent's, whose job is over
        return ()
    try:
        steps = read_stacks([process], fd)
        while True:
            next(steps)
            time.sleep(_POLL_S)
    except StopIteration as end:
        [read] = end.value
    finally:
        os.close(fd)
    # Python lists the newest thread first.
    lines = read.text.rpartition("hread 0x")[2].splitlines()
    frames = filter(None, map(_FRAME.fullmatch, lines))
    return tuple(make_frame(f["name"], f["file"], int(f["line"])) for f in frames)


def _read_by_py_spy(pid: int) -> Stack | str:
    # The process goes on meanwhile. If it is busy, a reading may fail: read again.
    stack: Stack | str = NO_PYTHON
    for _ in range(_MOST_READS):
        stack = _read_stack_once(pid) or NO_PYTHON
        if stack != NO_PYTHON and not str(stack).startswith(_FAILED):
            break
    return stack


def _read_stack_once(pid: int) -> Stack | str:
    command = (py_spy(), "dump", "--json", "--nonblocking", "--pid", str(pid))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_STACK_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        return explain(error)
    for thread in json.loads(done.stdout):
        if thread["os_thread_id"] == pid:
            return tuple(
                make_frame(frame["name"], frame["filename"], frame["line"])
                for frame in thread["frames"]
            )
    return NO_PYTHON


def py_spy() -> str:
    return f"{sysconfig.get_path('scripts')}/py-spy"


def find_obstacle() -> str:
    """Return why py-spy cannot read other processes of this host; "" if it can."""
    # This process, since py-spy is no parent of it, as an observer is none of a rank.
    stack = _read_stack_once(os.getpid())
    return stack if stack in (_MISSING, _REFUSED) else ""


def find_python(pid: int) -> int:
    """Return the process if it runs Python, else its first descendant that does.

    A worker that the rank has forked to do its work goes before all of them.
    """
    below = descendants(pid)
    forked = [process.pid for process in below if process.name == FORKED_RANK]
    candidates = [*forked, pid, *(process.pid for process in below)]
    return next((each for each in candidates if _is_python(each)), pid)


def _is_python(pid: int) -> bool:
    try:
        program = Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False
    return program.startswith("python")


def explain(error: OSError | subprocess.SubprocessError) -> str:
    """Return in half a sentence why py-spy read no stack."""
    match error:
        case FileNotFoundError():
            return _MISSING
        case OSError():
            return f"py-spy does not start: {error.strerror}"
        case subprocess.CalledProcessError(stderr=text):
            return explain_output(text)
        case _:
            return f"py-spy did not read its stack within {_STACK_S:g} s"


def explain_output(text: str) -> str:
    """Return the reason that py-spy gives for a failure, in half a sentence."""
    if re.search("permission denied|not permitted", text, re.IGNORECASE):
        return _REFUSED
    if "find python version" in text:
        return NO_PYTHON
    return _FAILED + (text.strip().partition("\n")[0] or "it did not answer")
