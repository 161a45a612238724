"""Unix sockets between processes of one user.

The socket of a job is in a directory with mode 0700, and both sides check the user of
the other (``SO_PEERCRED``). Root is accepted.
"""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from struct import Struct

_CREDENTIALS = Struct("3i")


def temporary_directory() -> Path:
    """Return the parent of socket directories, the same for all processes of a host."""
    # Not ``/run/user``: it is emptied at logout, and containers often lack it. Not
    # ``TMPDIR``: it may differ between ranks, and be too long for a socket.
    for path in ("/tmp", "/var/tmp"):  # noqa: S108  a private directory in it
        if os.access(path, os.W_OK | os.X_OK):
            return Path(path)
    return Path("/dev/shm")  # noqa: S108  as above


def listen(path: Path) -> socket.socket:
    """Return a listening socket; its path appears when it can accept connections."""
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    with ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(draft))
        listener.listen(128)
        draft.rename(path)
        undo.pop_all()
    return listener


def dial(path: str, timeout_s: float) -> socket.socket:
    """Connect to a socket of this user; raise ``OSError`` if another user owns it."""
    with ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX))
        sock.settimeout(timeout_s)
        sock.connect(path)
        if not is_own(sock):
            raise PermissionError(f"another user listens at {path}")
        undo.pop_all()
    return sock


def is_own(sock: socket.socket) -> bool:
    return _read_peer(sock)[1] in (os.geteuid(), 0)


def is_of_this_process(sock: socket.socket) -> bool:
    """Return True if this process listens at the other end."""
    return _read_peer(sock)[0] == os.getpid()


def _read_peer(sock: socket.socket) -> tuple[int, ...]:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)


def own_directories(prefix: str) -> Iterator[Path]:
    """Yield the directories with a prefix and mode 0700 that belong to this user."""
    for path in temporary_directory().glob(f"{prefix}*"):
        with suppress(OSError):
            found = path.lstat()
            is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
            if is_private and found.st_uid == os.geteuid():
                yield path


def live_directories(prefix: str) -> list[Path]:
    """Return ``own_directories``, and remove those of processes that were killed."""
    found: list[Path] = []
    for directory in own_directories(prefix):
        if remove_stale(directory):
            remove(directory)
        else:
            found.append(directory)
    return found


def remove(directory: Path) -> None:
    with suppress(OSError):
        for entry in directory.iterdir():
            entry.unlink(missing_ok=True)
        directory.rmdir()


def remove_stale(directory: Path) -> bool:
    """Remove sockets without a listener, and return True if there were any."""
    was_stale = False
    with suppress(OSError):
        for path in directory.glob("[!.]*"):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.setblocking(False)  # noqa: FBT003  the socket's own method
                if sock.connect_ex(str(path)) == errno.ECONNREFUSED:
                    path.unlink()
                    was_stale = True
    return was_stale
