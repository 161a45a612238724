"""The values of an observer's answers: processes and their stacks."""

import os
from pathlib import Path
from typing import NamedTuple

from ronde.monitor.send_queues import SendQueue


class StackFrame(NamedTuple):
    """One frame of a Python stack: a function, and the line that it executes."""

    function: str
    file: str
    line: int
    is_user: bool  # outside of Python, ronde and installed packages


_OWN_CODE = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen")


def make_frame(function: str, file: str, line: int) -> StackFrame:
    is_installed = any(part in file for part in _INSTALLED)
    is_user = not (is_installed or file.startswith(_OWN_CODE))
    return StackFrame(function, file, line, is_user)


class Inspection(NamedTuple):
    """The state of one worker's process."""

    worker: int
    pid: int  # of its Python process, which may be a child of the worker's
    state: str  # of the kernel: R, S, D, T, Z; empty if the process is gone
    waits_in: str  # the kernel function it sleeps in; empty if unknown
    cpu: float  # CPU seconds per second
    faults_per_s: float  # major page faults, which wait for the disk
    frames: tuple[StackFrame, ...]  # of the main thread, the innermost first
    problem: str  # why there is no stack, in half a sentence; empty with one
    cpu_wait: float = 0.0  # share of the time in which its main thread waited for a CPU
    nice: int = 0

    @property
    def user_frame(self) -> StackFrame | None:
        """The innermost frame of the user's own code."""
        return next((frame for frame in self.frames if frame.is_user), None)


class KernelLine(NamedTuple):
    """A line of the kernel's log that may explain a hang."""

    age_s: float
    text: str


class HostInspection(NamedTuple):
    """One observer's answer to the question ``inspect``."""

    inspections: tuple[Inspection, ...]
    kernel_lines: tuple[KernelLine, ...]  # the newest last
    queues: tuple[SendQueue, ...] = ()
