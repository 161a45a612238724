"""Sleep until a word of shared memory changes: Linux's futex, through libc."""

import ctypes
import errno
import os
import platform
import time
from collections.abc import Callable

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
    """Sleep until somebody wakes the word, at most ``timeout_s``.

    Returns at once where the word is not ``value``: the kernel compares and goes to
    sleep in one step. It may also return early, so the caller looks again.

    Args:
        address: Of 32 bits of shared memory in this process.
        value: What the word held when the caller decided to sleep.
        timeout_s: Seconds.
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
