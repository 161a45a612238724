"""How much memory this process may take, and how much of it C's allocator keeps.

Note [Memory that is kept]:
    By default glibc gives a tensor of 32 MiB and more back to the kernel when it is
    freed, and what is free at the end of its heap. The next training step takes it
    anew, and the kernel clears every page, which can take as long as the step. With
    higher thresholds the memory stays with the process. They are a part of what the
    machine or the control group has for each of its ranks.

Note [Frozen modules]:
    torch's modules are 180,000 objects, which live until the process ends. Left to
    Python's garbage collector, each of its full runs looks at all of them: 0.5 s in all
    while they are imported, 0.15 s in the middle of a step, and again when the process
    ends. ``gc.freeze`` takes what is there after the import out of its hands.
"""

import gc
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

_UNLIMITED = 1 << 60
_ROOT = Path("/")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_MAX_INT = (1 << 31) - 1
_GLIBC_MMAP_BYTES = 32 << 20  # the highest that glibc sets by itself, on 64 bits
_FIRST_WITHOUT_LIMIT = (2, 35)  # older versions take no higher threshold than that


def import_torch() -> None:
    """Import torch and leave it out of garbage collections: Note [Frozen modules]."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        import_module("torch")  # by name: most of ronde does without it
        gc.freeze()
    finally:
        if is_collecting:
            gc.enable()


class AvailableMemory(NamedTuple):
    """The tighter of what the machine has and what the control groups allow."""

    num_bytes: int  # how much may still be taken; never negative
    source: str  # the figure's name and where it is from
    remedy: str  # what a person can do to have more


_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of control groups, version 2 and 1: limit, usage, and what of it can be reclaimed."""


def available_memory(root: Path = _ROOT) -> AvailableMemory:
    """Return how much memory this process may still take; ``root`` holds ``proc``."""
    of_machine = AvailableMemory(
        _fields(root / "proc/meminfo").get("MemAvailable:", 0) * 1024,
        "MemAvailable of this machine",
        "Use fewer ranks, a smaller model, or a machine with more memory.",
    )
    return min([of_machine, *_of_groups(root)], key=lambda each: each.num_bytes)


def _of_groups(root: Path) -> Iterator[AvailableMemory]:
    for folder in map(Path, list_groups(str(root).rstrip("/"), "memory")):
        for limit_name, usage_name, reclaimable in _FILES:
            limit, usage = (_read(folder / name) for name in (limit_name, usage_name))
            # Empty where it is not mounted, "max" where there is none.
            if limit[:1].isdecimal() and usage and int(limit) < _UNLIMITED:
                used = int(usage) - _fields(folder / "memory.stat").get(reclaimable, 0)
                yield AvailableMemory(
                    max(0, int(limit) - used),
                    f"{limit_name} {int(limit)} of the control group",
                    "Use fewer ranks or a smaller model, or raise the memory limit of "
                    "the container or job (docker run --memory, sbatch --mem, "
                    "resources.limits).",
                )


def list_groups(root: str, controller: str) -> list[str]:
    """Return directories of this process's groups, inner ones first; some may lack."""
    mounts = f"{root}/sys/fs/cgroup"
    found: list[str] = []
    for line in _read(Path(f"{root}/proc/self/cgroup")).splitlines():
        _, controllers, path = f"{line}::".split(":", 2)
        if not controllers:
            tops = [mounts, f"{mounts}/unified"]
        elif controller in controllers.split(","):
            tops = [f"{mounts}/{controller}", f"{mounts}/{controllers}"]
        else:
            continue
        parts = [part for part in path.rstrip(":").split("/") if part]
        # A group outside of what is mounted: its path leads up.
        parts = [] if ".." in parts else parts
        for num in range(len(parts), -1, -1):
            found += ["/".join([top, *parts[:num]]) for top in tops]
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _fields(path: Path) -> dict[str, int]:
    words = [line.split() for line in _read(path).splitlines()]
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

    def apply(self) -> None:
        """Give them to this process, unless its malloc is another library's."""
        import ctypes  # the launcher reads memory too, and needs none of this

        libc = ctypes.CDLL(None)
        of_glibc = ctypes.CDLL("libc.so.6").malloc
        pointers = [ctypes.cast(f, ctypes.c_void_p) for f in (libc.malloc, of_glibc)]
        if pointers[0].value == pointers[1].value:
            libc.mallopt(_M_TRIM_THRESHOLD, min(self.trim_bytes, _MAX_INT))
            libc.mallopt(_M_MMAP_THRESHOLD, min(self.mmap_bytes, _MAX_INT))


def malloc_thresholds(num_ranks: int, root: Path = _ROOT) -> MallocThresholds | None:
    """Return each rank's thresholds; None where glibc's own are as high."""
    try:
        version = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    except (OSError, ValueError):  # another C library
        return None
    share = available_memory(root).num_bytes // num_ranks
    mmap_bytes = share // 8
    if mmap_bytes < _GLIBC_MMAP_BYTES:
        return None
    if tuple(map(int, version.split("."))) < _FIRST_WITHOUT_LIMIT:
        mmap_bytes = _GLIBC_MMAP_BYTES
    return MallocThresholds(share // 2, mmap_bytes)
