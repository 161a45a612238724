"""Wait for a word of shared memory: fences, futexes, and whether to spin or to sleep.

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
    word again; the writer stores the word, then looks at the flag. Were each load to
    pass the store before it, the sleeper would miss the word and the writer the flag.
    The fence between them, on either side, rules that out; and the kernel compares the
    word before it puts anyone to sleep.

Note [Yield or sleep]
    Where every rank has a core, or ranks share cores among themselves, an answer comes
    within microseconds, and to look for it, yielding the core in between, is quicker
    than to sleep. Beside programs that compute, a yield may hand one of them the core
    for tens of milliseconds; who sleeps gets the core at once when it is woken. So the
    number of threads that want to run is read from time to time, which takes 10 us:
    with more than there are cores, and more than there are ranks, waits sleep at once.
"""

import ctypes
import errno
import os
import platform
import threading
import time
from collections.abc import Callable

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
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall: Callable[..., int] = _libc.syscall
_libc.syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.POINTER(_Timespec),
)
_libc.syscall.restype = ctypes.c_long


def sleep_while(address: int, value: int, timeout_s: float) -> None:
    """Sleep until somebody wakes the 32 bits at ``address``, at most ``timeout_s``.

    Returns at once where they are not ``value``: the kernel compares and goes to sleep
    in one step. It may also return early, so the caller looks again.
    """
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
    """Wake every process that sleeps on the word at ``address``."""
    if _number is not None:
        _syscall(_number, address, _WAKE, _ALL, None)


_LOOK_EVERY_S = 0.01
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
        """Take so many threads that want to run for this job's own."""
        self._num_expected = max(self._num_expected, num_ranks)

    def num_looks(self, most: int) -> int:
        """Return how often a wait that begins now should look before it sleeps."""
        now = _now()
        if now >= self._look_at_s:
            self._look_at_s = now + _LOOK_EVERY_S
            self._is_seen = _num_runnable() > self._num_expected
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


CONTENTION = Contention()
"""Of this process."""
