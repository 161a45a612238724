"""Read small files of /proc and /sys, which may be absent, unreadable or wrong.

Paths are strings, because an agent reads hundreds of files when it starts, and
constructing a ``Path`` takes longer than reading such a file.
"""

import os
from collections.abc import Callable

from ronde.topology.cpu_sets import parse_list, parse_mask

_MAX_BYTES = 64 << 10


def read_text(path: str, max_bytes: int = _MAX_BYTES) -> str:
    """Return a file's text, stripped of whitespace and NUL bytes; "" on any error."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, max_bytes).decode(errors="replace").strip(" \t\n\0")
    except OSError:
        return ""
    finally:
        os.close(fd)


def read_number(path: str, default: int, base: int = 10) -> int:
    return _parsed(path, lambda text: int(text, base), default)


def read_list(path: str) -> int:
    """Read a list of CPUs such as ``0-3,8`` as a bit mask; return 0 on any error."""
    return _parsed(path, parse_list, 0)


def read_mask(path: str) -> int:
    """Read a mask of CPUs as a bit mask; return 0 on any error."""
    return _parsed(path, parse_mask, 0)


def _parsed(path: str, parse: Callable[[str], int], default: int) -> int:
    try:
        return parse(read_text(path))
    except ValueError:
        return default


def read_fields(path: str, max_bytes: int = _MAX_BYTES) -> dict[str, str]:
    pairs = (line.partition(":") for line in read_text(path, max_bytes).splitlines())
    return {name.strip(): value for name, _, value in pairs}


def list_names(directory: str) -> list[str]:
    """Return the sorted names in a directory; [] on any error."""
    try:
        return sorted(os.listdir(directory))  # noqa: PTH208 - see above
    except OSError:
        return []


def list_numbers(directory: str, prefix: str = "") -> list[int]:
    """Return the sorted numbers at the end of names such as ``cpu12``."""
    names = [n[len(prefix) :] for n in list_names(directory) if n.startswith(prefix)]
    return sorted(int(name) for name in names if name.isdecimal() and len(name) < 6)
