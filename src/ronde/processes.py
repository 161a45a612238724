"""Processes and their descendants: reading, signalling and killing them.

A *child subreaper* becomes the parent of every orphan below it, so no descendant can
hide by forking twice. A *pidfd* refers to one process even after its pid is reused.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ronde.errors import LaunchError

FORKED_RANK = "ronde-worker"
"""The name of a process that is forked by a rank to do the rank's work."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_PAUSE_S = 0.002
_KILLED_WITHIN_S = 5.0
_MAX_FREEZE_PASSES = 50
# Loaded at import: a child between fork and exec must not load libraries.
_LIBC = ctypes.CDLL(None, use_errno=True)
_POLL_S = 0.05
_EXIT_CODE_AT = 50  # of the fields that ``read_stat`` returns
_PF_EXITING = 0x4


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl({option})")


def adopt_orphans() -> None:
    """Make this process the parent of every orphan among its descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextmanager
def adopting_orphans() -> Generator[None]:
    """Adopt orphans in a ``with`` block."""
    was_reaper = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(was_reaper))
    adopt_orphans()
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, was_reaper.value)


def die_with_parent(parent_pid: int, death_signal: int) -> bool:
    """Request a signal for when the parent ends; return False if it already has."""
    _prctl(_PR_SET_PDEATHSIG, death_signal)
    return os.getppid() == parent_pid


def end_with(parent_pid: int, death_signal: int) -> Callable[[], None]:
    """Return a ``preexec_fn`` that makes a child end with its parent."""

    def before_exec() -> None:
        if not die_with_parent(parent_pid, death_signal):
            os._exit(1)

    return before_exec


class ProcessStat(NamedTuple):
    """One process; pid and start time identify it even after the pid is reused."""

    pid: int
    parent: int
    group: int
    state: str
    started: int  # clock ticks since boot
    name: str
    flags: int  # the kernel's ``PF_*``

    @classmethod
    def read(cls, pid: int) -> "ProcessStat":
        """Read one process; OSError if it ended."""
        name, state, parent, group, *more = read_stat(pid)
        started, flags = int(more[16]), int(more[3])
        return cls(pid, int(parent), int(group), state, started, name, flags)

    @property
    def is_zombie(self) -> bool:
        return self.state in "ZX"

    @property
    def is_exiting(self) -> bool:
        """True once the process's environment is freed; it may still have children."""
        return bool(self.flags & _PF_EXITING)


def read_processes() -> dict[int, ProcessStat]:
    return {pid: process for pid in _pids() if (process := read_process(pid))}


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def read_process(pid: int) -> ProcessStat | None:
    try:
        return ProcessStat.read(pid)
    except OSError:
        return None


def read_stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the pid; OSError if it ended."""
    # The name may contain spaces and parentheses: split at the last one.
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    head, _, tail = text.rpartition(")")
    return [head.partition("(")[2], *tail.split()]


def read_text(path: str) -> str:
    try:
        # In several reads: one returns at most a page of a file such as ``vmstat``.
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def is_fork(process: ProcessStat, parent: ProcessStat) -> bool:
    """Return True if two processes have the same program and group, as after a fork."""
    try:
        programs = {
            Path(f"/proc/{each.pid}/exe").readlink() for each in (process, parent)
        }
    except OSError:
        return False
    return len(programs) == 1 and process.group == parent.group


def is_alive(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and not process.is_zombie


def ending_status(pid: int) -> int:
    """Return the wait status of an ending process; 0 if unknown."""
    with suppress(OSError, IndexError):
        return int(read_stat(pid)[_EXIT_CODE_AT])
    return 0


def is_dumping_core(pid: int) -> bool:
    """Return True while the kernel writes the core file of a crashed process."""
    return "\nCoreDumping:\t1\n" in read_text(f"/proc/{pid}/status")


def descendants(
    pid: int,
    spared: frozenset[int] = frozenset(),
    table: Mapping[int, ProcessStat] | None = None,
) -> list[ProcessStat]:
    table = read_processes() if table is None else table
    children: dict[int, list[ProcessStat]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    below: list[ProcessStat] = []
    waiting = [pid]
    while waiting:
        born = [p for p in children.get(waiting.pop(), []) if p.pid not in spared]
        below += born
        waiting += [p.pid for p in born]
    return below


def children() -> frozenset[int]:
    me = os.getpid()
    pids = read_text(f"/proc/{me}/task/{me}/children")
    if pids or not has_children():
        return frozenset(map(int, pids.split()))
    # A kernel without CONFIG_PROC_CHILDREN.
    return frozenset(p.pid for p in read_processes().values() if p.parent == me)


def has_children() -> bool:
    """Return True if this process has a child, running or ended; nothing is reaped."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def signal_process(process: ProcessStat, number: int) -> None:
    """Send a signal to exactly this process, if it still exists."""
    try:
        fd = os.pidfd_open(process.pid)
        try:
            if _is_same(process):
                signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)
    except ProcessLookupError:
        return
    except OSError:  # an old kernel, or a container
        with suppress(ProcessLookupError, PermissionError):
            if _is_same(process):
                os.kill(process.pid, number)


def _is_same(process: ProcessStat) -> bool:
    now = read_process(process.pid)
    return now is not None and now.started == process.started


class Swept(NamedTuple):
    """Processes that a sweep killed, and those that it could not kill."""

    num_killed: int  # processes that were still running
    stuck: tuple[str, ...]  # processes that had not died at the deadline, with states


def sweep(
    on_reaped: Callable[[int, int], object] = lambda _pid, _status: None,
    spared: frozenset[int] = frozenset(),
) -> Swept:
    """Kill every descendant of this process, and reap those that become its children.

    First all are stopped, until no new one appears, so that none can escape by a fork.
    Then all are killed. If this process adopts orphans and no process is stuck, only
    the spared descendants are left.
    """
    me = os.getpid()
    ends_at = time.monotonic() + _KILLED_WITHIN_S
    killed: set[tuple[int, int]] = set()
    while spared or has_children():
        below = _freeze(me, spared)
        for process in below:
            if not process.is_zombie:
                killed.add((process.pid, process.started))
                signal_process(process, signal.SIGKILL)
            elif process.parent == me:
                with suppress(ChildProcessError):
                    pid, status = os.waitpid(process.pid, os.WNOHANG)
                    if pid:
                        on_reaped(pid, status)
        if not below and spared:
            break
        if time.monotonic() > ends_at:
            left = descendants(me, spared)
            stuck = [describe(p) for p in left if not p.is_zombie]
            # With hidepid, /proc hides a set-id program from the user who started it.
            hidden = [] if left else ["a process that /proc hides"]
            return Swept(len(killed), (*stuck, *hidden))
        time.sleep(_PAUSE_S)
    return Swept(len(killed), ())


def _freeze(me: int, spared: frozenset[int]) -> list[ProcessStat]:
    frozen: set[tuple[int, int]] = set()
    for _ in range(_MAX_FREEZE_PASSES):
        below = descendants(me, spared)
        new = [p for p in below if not p.is_zombie and (p.pid, p.started) not in frozen]
        if not new:
            return below
        for process in new:
            signal_process(process, signal.SIGSTOP)
            frozen.add((process.pid, process.started))
    return descendants(me, spared)


def describe(process: ProcessStat) -> str:
    waits = waits_in(process)
    return f"{process.name} (pid {process.pid}, state {process.state}{waits})"


def waits_in(process: ProcessStat) -> str:
    where = read_text(f"/proc/{process.pid}/wchan")
    return f" in {where}" if where not in {"", "0"} else ""


def require_empty(job_marker: str, deadline_s: float) -> None:
    """Wait until a job has no process on this host, or raise ``LaunchError``."""
    ends_at = time.monotonic() + deadline_s
    mark = b"RONDE_COOKIE=" + os.fsencode(job_marker)
    while left := [pid for pid in _pids() if mark in _environment(pid)]:
        if time.monotonic() > ends_at:
            raise LaunchError(
                f"after {deadline_s:g} s processes of the job's previous attempt still "
                f"run: {', '.join(map(str, left[:8]))}. Kill them."
            )
        time.sleep(_POLL_S)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or gone
        return []
