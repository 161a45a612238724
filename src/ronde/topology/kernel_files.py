"""Small files of /proc and /sys, which may be absent, unreadable or lie.

Paths are text: an agent reads hundreds of files at its start, and making a ``Path``
takes longer than reading one.
"""

import os

_MAX_BYTES = 64 << 10


def read_text(path: str) -> str:
    """Return a file without what blanks and zero bytes surround it; empty if not."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, _MAX_BYTES).decode(errors="replace").strip(" \t\n\0")
    except OSError:
        return ""
    finally:
        os.close(fd)


def read_number(path: str, default: int) -> int:
    """Return the whole number that a file holds, else the default."""
    try:
        return int(read_text(path))
    except ValueError:
        return default


def list_names(directory: str) -> list[str]:
    """Return what is in a directory, sorted; nothing where it cannot be read."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries)
    except OSError:
        return []
