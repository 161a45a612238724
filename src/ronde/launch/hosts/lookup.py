"""Addresses of many host names at once."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ronde.launch.wire import wait_for

LIMIT_S = 6.0
"""How long all names may take: a question that is lost is asked again after 5 s."""

_READ_BYTES = 64 << 10


def look_up(names: Sequence[str], stop_fd: int) -> dict[str, tuple[str, ...]]:
    """Return addresses by name: none for one that does not exist.

    A name without an answer in time is not among them. The system's resolver cannot be
    called off: a process asks it, and is killed in the end.

    Args:
        names: Which.
        stop_fd: When it is readable no more answers are waited for.
    """
    ends_at = time.monotonic() + LIMIT_S
    asking = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("resolver.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    )
    with asking:
        if asking.stdin is None or asking.stdout is None:
            raise AssertionError("it was started with two pipes")
        # It reads all of them before it answers.
        with asking.stdin as words:
            words.write("\n".join(names).encode())
        said = _read_until(asking.stdout.fileno(), stop_fd, ends_at)
        asking.kill()
    lines = [line.decode().split() for line in said.split(b"\n")[:-1]]
    return {names[int(index)]: tuple(found) for index, *found in lines}


def _read_until(fd: int, stop_fd: int, ends_at: float) -> bytes:
    said = b""
    while (left_s := ends_at - time.monotonic()) > 0:
        ready = wait_for([fd, stop_fd], [], left_s)
        data = os.read(fd, _READ_BYTES) if ready == [fd] else b""
        if not data:
            break
        said += data
    return said
