"""Whether one process of a user may look into another, as profilers do."""

import ctypes
import os

from ronde.check.facts import Reading
from ronde.topology.kernel_files import read_number

_SECRET = b"readable"


class _Span(ctypes.Structure):
    """The kernel's ``struct iovec``."""

    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


def read_tracing(reading: Reading, root: str) -> None:
    """Take down Yama's setting, and whether a child's memory can be read.

    Args:
        reading: Where to.
        root: Where ``proc`` is; empty for this machine.
    """
    scope = f"{root}/proc/sys/kernel/yama/ptrace_scope"
    reading.keep("host.ptrace_scope", lambda: read_number(scope, 0))
    reading.keep("host.can_read_child", _can_read_child)


def _can_read_child() -> bool:
    """Try it on a child of this process; sandboxes forbid it in many ways."""
    libc = ctypes.CDLL(None, use_errno=True)
    source = ctypes.create_string_buffer(_SECRET)
    target = ctypes.create_string_buffer(len(_SECRET) + 1)
    ends = os.pipe()
    pid = os.fork()
    if pid == 0:
        # It has the same memory at the same addresses, and ends with its parent's pipe.
        os.close(ends[1])
        os.read(ends[0], 1)
        os._exit(0)
    try:
        there = _Span(ctypes.addressof(source), len(_SECRET))
        here = _Span(ctypes.addressof(target), len(_SECRET))
        count = libc.process_vm_readv(
            pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0
        )
        return count == len(_SECRET) and target.value == _SECRET
    finally:
        for end in ends:
            os.close(end)
        os.waitpid(pid, 0)
