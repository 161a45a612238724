"""A program on a host of ``machines`` is held while it opens a file.

It hangs there as it does on a disk that does not answer, until it is killed. A scanner
for viruses holds programs in the same way: fanotify(7).
"""

import ctypes
import os
import select
import struct
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.cluster.machine_files import Machine

# linux/fanotify.h
_CLOEXEC, _CLASS_CONTENT = 0x1, 0x4
_MARK_ADD, _MARK_MOUNT = 0x1, 0x10
_OPEN_PERM = 0x10000
_ALLOW = 0x1
# event_len, vers, reserved, metadata_len, mask, fd, pid
_EVENT = struct.Struct("=IBBHQii")
# fd, response
_ANSWER = struct.Struct("=iI")
_AT_FDCWD = -100

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def opening_held(
    host: Machine, folder: Path, name: str
) -> Generator[Callable[["subprocess.Popen[Any]"], None]]:
    """Hold the first program of a host that opens a file of a name.

    Yields:
        Takes what is to come to this, and returns when a program is held. It has to be
        called: until then whatever else the host opens in the folder's mount is held.

    Raises:
        OSError: The kernel has no ``CONFIG_FANOTIFY_ACCESS_PERMISSIONS``.
    """
    fd = _checked(_libc.fanotify_init(_CLASS_CONTENT | _CLOEXEC, os.O_RDONLY))
    try:
        # The host's own mount: whoever else opens the files is not held.
        place = os.fsencode(f"/proc/{host.init_pid}/root{folder}")
        flags, mask = _MARK_ADD | _MARK_MOUNT, ctypes.c_uint64(_OPEN_PERM)
        _checked(_libc.fanotify_mark(fd, flags, mask, _AT_FDCWD, place))
        yield partial(_wait, fd, name)
    finally:
        # It lets go of all that are held.
        os.close(fd)


def _wait(fd: int, name: str, process: "subprocess.Popen[Any]") -> None:
    ended = os.pidfd_open(process.pid)
    try:
        while True:
            ready, _, _ = select.select([fd, ended], [], [])
            assert fd in ready, "it has ended, and no program was held"
            *_, opened, _ = _EVENT.unpack(os.read(fd, _EVENT.size))
            path = Path(f"/proc/self/fd/{opened}").readlink()
            if path.name != name:
                os.write(fd, _ANSWER.pack(opened, _ALLOW))
            os.close(opened)
            if path.name == name:
                return
    finally:
        os.close(ended)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "fanotify")
    return result
