"""The CPUs and the memory node of what is started, inherited from who starts it.

An agent, which has one thread, takes on a rank's binding, starts the rank and lays it
off again. Nothing runs in the child before its program then, and what the kernel
refuses is known where it can be told.
"""

import ctypes
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress

from ronde.topology.cpu_sets import format_list
from ronde.topology.machine import UNKNOWN_NODE

_LIBC = ctypes.CDLL(None, use_errno=True)

# Numbers of get_mempolicy and set_mempolicy, which the C library does not wrap.
_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}
_DEFAULT, _PREFERRED = 0, 1
_BITS = 64


@contextmanager
def inherited_binding(cpus: Sequence[int], memory_node: int) -> Generator[str]:
    """Bind this process, and so what it starts meanwhile; then undo it.

    Gives what could not be done, else an empty text.

    Args:
        cpus: Those to run on; none leaves them as they are.
        memory_node: Where memory is to lie as long as there is room, or
            ``UNKNOWN_NODE``.
    """
    before = os.sched_getaffinity(0)
    had_policy = memory_node == UNKNOWN_NODE or _policy() != _DEFAULT
    try:
        yield bind_self(cpus, memory_node)
    finally:
        if cpus:
            with suppress(OSError):
                os.sched_setaffinity(0, before)
        if not had_policy:
            _set_policy(_DEFAULT, UNKNOWN_NODE)


def bind_self(cpus: Sequence[int], memory_node: int) -> str:
    """Bind this process for good; return what could not be done, else an empty text.

    Args:
        cpus: Those to run on; none leaves them as they are.
        memory_node: Where memory is to lie as long as there is room, or
            ``UNKNOWN_NODE``. A policy that was set before, as by ``numactl``, stays.
    """
    refused = [_run_on(cpus)] if cpus else []
    if memory_node != UNKNOWN_NODE and _policy() == _DEFAULT:
        number = _set_policy(_PREFERRED, memory_node)
        refused += [f"memory node {memory_node}: {os.strerror(number)}"] * bool(number)
    return "; ".join(filter(None, refused))


def _run_on(cpus: Sequence[int]) -> str:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        return f"CPUs {format_list(cpus)}: {error.strerror}"
    # What the cpuset does not hold, the kernel leaves out and says nothing.
    missing = set(cpus) - os.sched_getaffinity(0)
    return f"CPUs {format_list(missing)}: not in the cpuset" if missing else ""


def _policy() -> int:
    """Return this process's memory policy, also the default where that is not told."""
    mode = ctypes.c_int(_DEFAULT)
    get, _ = _CALLS.get(os.uname().machine, (0, 0))
    if get:
        none = ctypes.c_void_p()
        _LIBC.syscall(
            *(ctypes.c_long(get), ctypes.byref(mode), none, ctypes.c_ulong(0)),
            *(none, ctypes.c_ulong(0)),
        )
    return mode.value


def _set_policy(mode: int, node: int) -> int:
    """Set the memory policy; return the number of the error, 0 when it is done."""
    _, call = _CALLS.get(os.uname().machine, (0, 0))
    if not call:
        return 0
    words = node // _BITS + 1 if node >= 0 else 0
    mask = (ctypes.c_uint64 * max(1, words))()
    if words:
        mask[-1] = 1 << node % _BITS
    # The kernel takes one bit less than it is told.
    num_bits = words * _BITS + 1
    done = _LIBC.syscall(
        *(ctypes.c_long(call), ctypes.c_int(mode), mask, ctypes.c_ulong(num_bits))
    )
    return ctypes.get_errno() if done != 0 else 0
