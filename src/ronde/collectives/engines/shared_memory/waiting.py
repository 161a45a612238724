"""Wait for a word of shared memory: fences, futexes, contention, and lost peers.

Note [Memory order]
    A rank writes data, then a word that says so; another sees the word, then reads the
    data. Each word has one writer and lies in eight aligned bytes, which a memoryview
    loads and stores by a single instruction, so no word is ever seen half.

    The data must not be seen later than the word. x86 keeps the order of stores and
    the order of loads (Intel SDM vol. 3, 8.2.2); after non-temporal stores libc and
    torch's kernels put a fence of their own. Elsewhere ``fence()`` stands before the
    store of a word and after the load that saw it: it frees and takes a lock, and an
    ARMv8 release is never passed by a later acquire, nor what comes before the one by
    what comes after the other. Kernels' worker threads are joined before they return.

    Sleeping needs one thing more, which no processor gives for nothing: that a store
    is seen before a later load is done. The sleeper stores its flag, then looks at the
    word again; the writer stores the word, then looks at the flag. A fence between the
    two, on either side, keeps one of them from missing the other; and the kernel
    compares the word before it puts anyone to sleep.

Note [Yield or sleep]
    Among ranks alone an answer comes within microseconds, and looking for it, yielding
    in between, is quicker than to sleep. Beside programs that compute, a yield may hand
    one of them the core for tens of milliseconds; who sleeps gets the core at once when
    it is woken. So the number of threads that want to run is read from time to time,
    which takes 10 us: with more than cores and ranks, waits sleep at once. That number
    is of one moment, and other threads of the ranks count: soon it is read again.
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
from typing import NamedTuple

from ronde.processes import read_stat

IS_WEAKLY_ORDERED = platform.machine() not in ("x86_64", "AMD64", "i686")
_lock = threading.local()


def fence() -> None:
    """Order all loads and stores before it before all after it; see Note."""
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
"""Let others run. Unlike ``os.sched_yield`` it lets other threads have the GIL too."""


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


_LOOK_EVERY_S, _LOOK_AGAIN_S = 0.01, 0.001
_LATE_S = 0.0005
"""A yield that takes so long: another program had the core. Ranks take less in turn."""
_now = time.monotonic


class Contention:
    """What the waits of this process know of other programs; any thread may call."""

    def __init__(self) -> None:
        self._num_expected = os.cpu_count() or 1
        self._is_seen = False
        self._look_at_s = 0.0

    def expect(self, num_ranks: int) -> None:
        self._num_expected = max(self._num_expected, num_ranks)

    def num_looks(self, most: int) -> int:
        """Return how often a wait that begins now should look before it sleeps."""
        now = _now()
        if now >= self._look_at_s:
            self._is_seen = _num_runnable() > self._num_expected
            self._look_at_s = now + (_LOOK_AGAIN_S if self._is_seen else _LOOK_EVERY_S)
        return 0 if self._is_seen else most

    def pause(self) -> bool:
        """Let others run between two looks; say whether to look on."""
        begun = _now()
        sched_yield()
        if _now() - begun < _LATE_S:
            return True
        self._look_at_s = 0.0
        return False


def _num_runnable() -> int:
    """Return how many threads of this machine run or want to; 0 where it is unknown."""
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


_ENDED, _STOPPED = "ZX", "T"
_IS_STOPPED_AFTER = 4
"""Looks in a row that must find a process stopped before a warning: a whole job may
have been stopped and be just going on, one rank before the other."""
_logger = logging.getLogger("ronde")


class PeerProcess(NamedTuple):
    """A process, identified also by its start time: a pid may be used again."""

    pid: int
    started_at: int  # in clock ticks since boot
    cores: int  # A bit for each core that it may use

    @classmethod
    def of(cls, pid: int) -> "PeerProcess":
        cores = sum(1 << core for core in os.sched_getaffinity(pid))
        return cls(pid, int(read_stat(pid)[20]), cores)

    def state(self) -> str:
        """Return its state as ``/proc`` has it, a letter; nothing once it ended."""
        try:
            _, state, *fields = read_stat(self.pid)
        except OSError:
            return ""
        is_gone = int(fields[18]) != self.started_at or state in _ENDED
        return "" if is_gone else state


class Peers:
    """All ranks' processes, in rank order."""

    def __init__(self, processes: list[PeerProcess]) -> None:
        self.processes = processes
        self._num_stopped: dict[int, int] = {}
        cores = 0
        for process in processes:
            cores |= process.cores
        self.is_crowded = cores.bit_count() < len(processes)
        """Whether there are fewer cores than ranks."""

    def find_loss(self, rank: int, own: int) -> str:
        """Return why a rank's process will not go on; to be called now and then.

        One that is stopped may go on: the first rank that runs warns of it.
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
            _logger.warning("All wait for %s.", self.describe_stop(rank))
        return ""

    def describe_stop(self, rank: int) -> str:
        """Return that a rank's process is stopped, and what to do; or nothing."""
        process = self.processes[rank]
        if process.state() not in {*_STOPPED}:
            return ""
        return (
            f"rank {rank}, process {process.pid}, which is stopped; kill -CONT "
            f"{process.pid} lets it go on"
        )
