"""Waits for words in shared memory: fences, futexes, contention and lost peers.

Note [Memory order]
    A rank writes data, then a word that announces it. Another rank reads the word, then
    the data. Each word has one writer and is eight aligned bytes, which a memoryview
    loads and stores by a single instruction, so no word is ever read half-written.

    The data must be visible before the word. x86 keeps the order of stores and the
    order of loads (Intel SDM vol. 3, 8.2.2); libc and torch's kernels put a fence after
    non-temporal stores. On other processors ``fence()`` is called before a word is
    stored and after it is loaded. ``fence()`` releases and acquires a lock. On ARMv8 no
    access before the release is reordered with an access after the acquire. Kernels
    join their worker threads before they return.

    Sleeping needs more: a store must be visible before a later load is performed. The
    sleeper stores its flag, then reads the word again; the writer stores the word, then
    reads the flag. With a fence between these steps on both sides, at least one side
    sees the other's store. The kernel compares the word again before it puts the thread
    to sleep.

Note [Yield or sleep]
    If only ranks run, an answer comes within microseconds, and polling with yields is
    faster than sleeping. If other programs compute, a yield may give one of them the
    core for tens of milliseconds, but a sleeper gets a core as soon as it is woken. So
    the number of runnable threads is read from time to time, which takes 10 us. If it
    exceeds the numbers of cores and ranks, waits sleep at once. The number is only a
    sample and includes other threads of the ranks, so it is soon read again.
"""

import ctypes
import errno
import logging
import os
import platform
import threading
import time
from collections.abc import Callable
from ctypes import POINTER, c_int, c_long, c_uint32, c_void_p
from itertools import repeat
from typing import NamedTuple

from ronde.processes import ProcessStat, read_process

IS_WEAKLY_ORDERED = platform.machine() not in ("x86_64", "AMD64", "i686")
_lock = threading.local()


def fence() -> None:
    """Complete all earlier loads and stores before any later one."""
    try:
        lock: threading.Lock = _lock.held
    except AttributeError:
        _lock.held = lock = threading.Lock()
        lock.acquire()
    lock.release()
    lock.acquire()


# Linux's futex, through libc.
_SYSCALLS = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF
_NAP_S = 0.0005
_EXPECTED = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)

_libc = ctypes.CDLL(None, use_errno=True)
_number = _SYSCALLS.get(platform.machine())

sched_yield: Callable[[], int] = _libc.sched_yield
"""Yield the core and, unlike ``os.sched_yield``, the GIL."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", c_long), ("nanoseconds", c_long))


_syscall: Callable[..., int] = _libc.syscall
_libc.syscall.argtypes = (c_long, c_void_p, c_int, c_uint32, POINTER(_Timespec))
_libc.syscall.restype = c_long


def sleep_while(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the 32 bits at ``address`` are ``value``; may return early."""
    if _number is None:
        time.sleep(min(timeout_s, _NAP_S))
        return
    seconds = int(timeout_s)
    limit = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    if _syscall(_number, address, _WAIT, value & 0xFFFFFFFF, limit) == -1:
        code = ctypes.get_errno()
        if code not in _EXPECTED:
            raise OSError(code, f"futex: {os.strerror(code)}")


def wake_all(address: int) -> None:
    if _number is not None:
        _syscall(_number, address, _WAKE, _ALL, None)


_SAMPLE_EVERY_S, _SAMPLE_AGAIN_S = 0.01, 0.001
_LATE_S = 0.0005
"""Duration of a yield that shows that another program got the core."""
_now = time.monotonic


class Contention:
    """Decides if waits may poll, by the number of runnable threads; thread-safe."""

    def __init__(self) -> None:
        self._num_expected = os.cpu_count() or 1
        self._is_high = False
        self._sample_at_s = 0.0

    def expect(self, num_ranks: int) -> None:
        self._num_expected = max(self._num_expected, num_ranks)

    def num_polls(self, most: int) -> int:
        """Return ``most``, or 0 if a wait that begins now should sleep at once."""
        now = _now()
        if now >= self._sample_at_s:
            self._is_high = _num_runnable() > self._num_expected
            pause_s = _SAMPLE_AGAIN_S if self._is_high else _SAMPLE_EVERY_S
            self._sample_at_s = now + pause_s
        return 0 if self._is_high else most

    def spin(self, is_over: Callable[[], bool], most: int) -> bool:
        """Poll up to ``most`` times, yielding in between; True once ``is_over()``."""
        for _ in repeat(None, self.num_polls(most)):
            if is_over():
                return True
            begun = _now()
            sched_yield()
            if _now() - begun >= _LATE_S:
                self._sample_at_s = 0.0
                return False
        return False


def _num_runnable() -> int:
    """Return the number of runnable threads of this machine; 0 if unknown."""
    try:
        file = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return int(os.read(file, 128).split()[3].partition(b"/")[0])
    except (OSError, ValueError, IndexError):
        return 0
    finally:
        os.close(file)


CONTENTION = Contention()  # of this process


_STOPPED = "T"
_IS_STOPPED_AFTER = 4
"""Consecutive checks that must find a process stopped before a warning. When a stopped
job continues, its ranks continue one after the other."""
_logger = logging.getLogger("ronde")


class PeerProcess(NamedTuple):
    """A process, identified by pid and start time, as a pid may be reused."""

    pid: int
    started_at: int  # clock ticks since boot
    cores: int  # a bit for each core that it may use

    @classmethod
    def of(cls, pid: int) -> "PeerProcess":
        cores = sum(1 << core for core in os.sched_getaffinity(pid))
        return cls(pid, ProcessStat.read(pid).started, cores)

    def state(self) -> str:
        """Return the state letter from ``/proc``; empty if the process has ended."""
        process = read_process(self.pid)
        if process is None or process.started != self.started_at:
            return ""
        return "" if process.is_zombie else process.state


class Peers:
    """All ranks' processes, in rank order."""

    def __init__(self, processes: list[PeerProcess]) -> None:
        self.processes = processes
        self._num_stopped: dict[int, int] = {}
        cores = 0
        for process in processes:
            cores |= process.cores
        self.is_crowded = cores.bit_count() < len(processes)
        """True if there are fewer cores than ranks."""

    def find_loss(self, rank: int, own: int) -> str:
        """Return an error text if a rank's process has ended, else "".

        Call it periodically: a stopped process is not lost, as it may continue, but the
        lowest rank that is not stopped soon logs a warning.
        """
        process = self.processes[rank]
        state = process.state()
        if not state:
            return f"rank {rank}, process {process.pid}, ended"
        if state not in _STOPPED:
            self._num_stopped.pop(rank, None)
            return ""
        count = self._num_stopped[rank] = self._num_stopped.get(rank, 0) + 1
        if count == _IS_STOPPED_AFTER and all(map(self.describe_stop, range(own))):
            _logger.warning("All ranks wait for %s.", self.describe_stop(rank))
        return ""

    def describe_stop(self, rank: int) -> str:
        """Describe a rank's process and a remedy if it is stopped, else return ""."""
        process = self.processes[rank]
        if process.state() not in {*_STOPPED}:
            return ""
        return (
            f"rank {rank}, process {process.pid}, which is stopped; kill -CONT "
            f"{process.pid} continues it"
        )
