"""How much memory this process may take, and how much of it C's allocator keeps.

Note [Memory that is kept]:
    By default glibc gives a tensor of 32 MiB and more back to the kernel when it is
    freed, and what is free at the end of its heap. The next training step takes it
    anew, and the kernel clears every page, which can take as long as the step. With
    higher thresholds the memory stays with the process. They are a part of what the
    machine or the control group has for each of its ranks.
"""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_UNLIMITED = 1 << 60
_ROOT = Path("/")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_MAX_INT = (1 << 31) - 1
_GLIBC_MMAP_BYTES = 32 << 20  # the highest that glibc sets by itself, on 64 bits
_FIRST_WITHOUT_LIMIT = (2, 35)  # older versions take no higher threshold than that


class AvailableMemory(NamedTuple):
    """The tighter of what the machine has and what the control groups allow."""

    num_bytes: int  # how much may still be taken; never negative
    source: str  # the figure's name and where it is from
    remedy: str  # what a person can do to have more


# The mount, and the names of limit, usage and reclaimable memory, by the controllers'
# names in ``/proc/self/cgroup``; version 2 has an empty one.
_VERSIONS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": (
        *("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        "total_inactive_file",
    ),
}


def available_memory(root: Path = _ROOT) -> AvailableMemory:
    """Return how much memory this process may still take; ``root`` holds ``proc``."""
    of_machine = AvailableMemory(
        _fields(root / "proc/meminfo").get("MemAvailable:", 0) * 1024,
        "MemAvailable of this machine",
        "Use fewer ranks, a smaller model, or a machine with more memory.",
    )
    return min([of_machine, *_of_groups(root)], key=lambda each: each.num_bytes)


def _of_groups(root: Path) -> Iterator[AvailableMemory]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for name in _VERSIONS.keys() & controllers.split(","):
            mount, *names = _VERSIONS[name]
            # A group is bound by those above it too. In a container the path may be the
            # host's, of which only the last group is mounted, at the root.
            own = PurePosixPath(path.lstrip("/"))
            for each in (own, *own.parents):
                yield from _of_group(root / mount / each, *names)


def _of_group(
    folder: Path, limit_name: str, usage_name: str, reclaimable: str
) -> Iterator[AvailableMemory]:
    try:
        limit = int((folder / limit_name).read_text())
        usage = int((folder / usage_name).read_text())
    except (OSError, ValueError):  # not mounted, or "max"
        return
    if limit < _UNLIMITED:
        usage -= _fields(folder / "memory.stat").get(reclaimable, 0)
        yield AvailableMemory(
            max(0, limit - usage),
            f"{limit_name} {limit} of the control group",
            "Use fewer ranks or a smaller model, or raise the memory limit of the "
            "container or job (docker run --memory, sbatch --mem, resources.limits).",
        )


def _fields(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdecimal()}


class MallocThresholds(NamedTuple):
    """What glibc's malloc gives back to the kernel: see Note [Memory that is kept]."""

    trim_bytes: int  # what is free at the heap's end, once it is as much as this
    mmap_bytes: int  # each allocation of this size and more, when it is freed

    def environment(self) -> dict[str, str]:
        return {
            "MALLOC_TRIM_THRESHOLD_": str(self.trim_bytes),
            "MALLOC_MMAP_THRESHOLD_": str(self.mmap_bytes),
        }

    def apply(self) -> bool:
        """Give them to this process; return False where its malloc is not glibc's."""
        libc = ctypes.CDLL(None)
        if not _has_glibc_malloc(libc):
            return False
        libc.mallopt(_M_TRIM_THRESHOLD, min(self.trim_bytes, _MAX_INT))
        libc.mallopt(_M_MMAP_THRESHOLD, min(self.mmap_bytes, _MAX_INT))
        return True


def malloc_thresholds(num_ranks: int, root: Path = _ROOT) -> MallocThresholds | None:
    """Return each rank's thresholds; None where glibc's own are as high."""
    version = _glibc_version()
    share = available_memory(root).num_bytes // num_ranks
    mmap_bytes = share // 8
    if version is None or mmap_bytes < _GLIBC_MMAP_BYTES:
        return None
    if version < _FIRST_WITHOUT_LIMIT:
        mmap_bytes = _GLIBC_MMAP_BYTES
    return MallocThresholds(share // 2, mmap_bytes)


class _SymbolInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _glibc_version() -> tuple[int, ...] | None:
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):  # another C library
        return None
    return tuple(map(int, text.removeprefix("glibc ").split(".")))


def _has_glibc_malloc(libc: ctypes.CDLL) -> bool:
    """Whether malloc is glibc's own, and not that of a library loaded before it."""
    found = _SymbolInfo(), _SymbolInfo()
    libc.dladdr(libc.malloc, ctypes.byref(found[0]))
    libc.dladdr(libc.gnu_get_libc_version, ctypes.byref(found[1]))
    return found[0].base == found[1].base
