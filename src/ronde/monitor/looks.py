"""The state of a worker's process as the observer of its host sees it."""

from typing import NamedTuple

from ronde.plain_values import PlainValueError, from_plain


class Frame(NamedTuple):
    """One frame of a stack."""

    function: str
    file: str
    line: int
    is_user: bool  # outside of Python, ronde and installed packages


class Look(NamedTuple):
    """One look at the process of a worker."""

    worker: int
    pid: int  # of its Python process, which may be a child of the worker's
    state: str  # of the kernel: R, S, D, T, Z; empty if the process is gone
    waits_in: str  # the kernel function it sleeps in; empty if unknown
    cpu: float  # CPU seconds per second
    faults_per_s: float  # major page faults, which wait for the disk
    rss_bytes: int
    frames: tuple[Frame, ...]  # of the main thread, the innermost first
    problem: str  # why there is no stack, in half a sentence; empty with one

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame of the user's own code."""
        return next((frame for frame in self.frames if frame.is_user), None)


class HostLook(NamedTuple):
    """The answer of one host's observer to ``look``."""

    looks: tuple[Look, ...]


def decode_host_look(plain: object) -> HostLook | None:
    """Return the value of a JSON object; None if another version of ronde wrote it."""
    try:
        return from_plain(HostLook, plain)
    except PlainValueError:
        return None
