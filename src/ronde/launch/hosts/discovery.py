"""A script that prints the hosts."""

import os
import subprocess
import time

from ronde.errors import UsageError
from ronde.launch.hosts.host import Host
from ronde.launch.hosts.hostfile import parse_hostfile
from ronde.launch.lineage import adopting_orphans, children, sweep
from ronde.launch.signals import (
    STOPPING,
    InterruptedStartError,
    caught_signals,
    read_signals,
)
from ronde.launch.wire import wait_for

_POLL_S = 0.02


def discover(script: str, said_by: str, timeout_s: float = 60.0) -> tuple[Host, ...]:
    """Run a discovery script once and return the hosts that it prints.

    It prints what a host file may hold; ``h1`` and ``h1:2`` are such lines. One that
    fails, takes too long or is interrupted is ended with all that it started. Only in
    the main thread.

    Args:
        script: A command line for the shell.
        said_by: The option that names it.
        timeout_s: Within which it must end.

    Raises:
        UsageError: The script fails, takes too long, or prints something else.
        InterruptedStartError: The user has ended it.
    """
    others = children()
    try:
        # Signals that end a job do so here: the loop that waits for them comes later.
        with (
            adopting_orphans(),
            caught_signals() as signal_fd,
            _start(script) as process,
        ):
            try:
                printed = _read(process, signal_fd, timeout_s)
            except (ValueError, InterruptedStartError):
                sweep(on_reaped=lambda _pid, _status: None, spared=others)
                raise
    except ValueError as error:
        raise UsageError(
            f"{said_by} must print hosts and end with 0, got {script!r} ({error}). Run "
            "it by hand."
        ) from None
    return parse_hostfile(printed, f"{said_by} {script}")


def _start(script: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S602  horovodrun takes a command line, too
        script, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )


def _read(process: "subprocess.Popen[bytes]", signal_fd: int, timeout_s: float) -> str:
    """Return what a script prints.

    Raises:
        ValueError: It fails, takes too long, or prints no text.
        InterruptedStartError: The user has ended it.
    """
    if process.stdout is None:
        raise AssertionError("the script was given a pipe")
    ends_at_s = time.monotonic() + timeout_s
    printed, is_open = b"", True
    while is_open or process.poll() is None:
        left_s = ends_at_s - time.monotonic()
        if left_s <= 0:
            raise ValueError(f"it takes longer than {timeout_s:g} s")
        readable = [signal_fd, *([process.stdout.fileno()] if is_open else [])]
        for fd in wait_for(readable, [], left_s if is_open else _POLL_S):
            if fd == signal_fd:
                _end_if_asked(signal_fd)
                continue
            data = os.read(fd, 65536)
            printed += data
            is_open = bool(data)
    if process.returncode:
        raise ValueError(f"exit code {process.returncode}")
    return printed.decode("utf-8")


def _end_if_asked(signal_fd: int) -> None:
    for number in read_signals(signal_fd):
        if number in STOPPING:
            raise InterruptedStartError(number)
