"""A mutex that reports its owner's death before the kernel frees the owner's memory.

A killed process closes its sockets and becomes a zombie only after its memory is freed:
20 to 80 ms later for a rank that has torch loaded. Before that, the kernel releases the
process's *robust* POSIX mutexes in shared memory.
"""

import ctypes
import errno
import mmap
import os

_PROCESS_SHARED = 1
_ROBUST = 1
_ATTRIBUTES_BYTES = 64  # more than any C library's
_LIBC = ctypes.CDLL(None)


def lock_new_mutex() -> int:
    """Make a mutex that this thread holds for the rest of the thread's life.

    Returns:
        The descriptor of the mutex's memory, for another process; the caller closes it.

    Raises:
        OSError: The mutex cannot be made or locked.
    """
    fd = os.memfd_create("ronde-mutex")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        memory = mmap.mmap(fd, mmap.PAGESIZE)
        # Never unmapped: the C library keeps a list of the mutexes of a thread.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        _make_and_lock(_address_of(memory))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _make_and_lock(mutex: ctypes.c_void_p) -> None:
    attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
    for number in (
        _LIBC.pthread_mutexattr_init(attributes),
        _LIBC.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED),
        _LIBC.pthread_mutexattr_setrobust(attributes, _ROBUST),
        _LIBC.pthread_mutex_init(mutex, attributes),
        _LIBC.pthread_mutex_lock(mutex),
    ):
        if number:
            raise OSError(number, os.strerror(number))


def await_owner_death(fd: int) -> bool:
    """Wait until the owner of the mutex in ``fd`` ends; ``fd`` is closed at once.

    Returns False if waiting is impossible.
    """
    try:
        memory = mmap.mmap(fd, mmap.PAGESIZE)
    except (OSError, ValueError):
        return False
    finally:
        os.close(fd)
    mutex = _address_of(memory)
    number = _LIBC.pthread_mutex_lock(mutex)
    if number in (0, errno.EOWNERDEAD):
        _LIBC.pthread_mutex_unlock(mutex)
    return number == errno.EOWNERDEAD


def _address_of(memory: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
