"""Starts an agent on another host, which says first what it finds there."""

import os
import secrets
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ronde.launch.bootstrap import BOOTSTRAP
from ronde.launch.greeting import Greeting
from ronde.launch.hosts.host import Host
from ronde.launch.lineage import die_with_parent
from ronde.launch.spawners.base import Spawner
from ronde.launch.wire import ProcessWire

_SENTINEL_BYTES = 32


def start_remote_agent(
    spawner: Spawner, host: Host, python: str
) -> tuple[ProcessWire, Greeting]:
    """Start an agent on a host, without waiting for it.

    What leads there gets SIGTERM when this process ends, and its own session, out of
    the way of the terminal's Ctrl-C.

    Args:
        spawner: How programs are started there.
        host: Where.
        python: The Python to run there: a path, or a name on the ``PATH`` of a login.

    Returns:
        What carries the agent's frames, and what must be fed with all that comes until
        it has met the agent.

    Raises:
        OSError: What leads there cannot be started here.
    """
    words = [python, "-E", "-S", "-c", BOOTSTRAP]
    process = subprocess.Popen(
        spawner.command(host, words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        # The controller has one thread, so that code between fork and exec is safe.
        preexec_fn=end_with(os.getpid()),  # noqa: PLW1509
    )
    wire = ProcessWire(process)
    sentinel = secrets.token_hex(_SENTINEL_BYTES)
    # It is shorter than any pipe; who has gone already does not get it.
    with suppress(BrokenPipeError):
        wire.write(memoryview(_first_line(sentinel)))
    return wire, Greeting(spawner.name, sentinel[::-1].encode())


def end_with(parent: int) -> Callable[[], None]:
    """Return what a child does before exec, so that it ends with its parent."""

    def before_exec() -> None:
        if not die_with_parent(parent, signal.SIGTERM):
            os._exit(1)

    return before_exec


def _first_line(sentinel: str) -> bytes:
    """Return the program to run there, on one line."""
    here = Path(__file__)
    program = here.with_name("arriving.py").read_text(encoding="utf-8")
    call = f"arrive({sentinel!a}, {str(here.parents[2])!a})"
    return f"exec({program!a}); {call}\n".encode()
