"""Find available memory; tune malloc and garbage collection for torch.

Note [Malloc tuning]
    By default glibc returns tensors of 32 MiB and more to the kernel when they are
    freed, and also free memory at the end of its heap. The next training step
    allocates it again, and the kernel clears every page, which can take as long as the
    step. With higher thresholds the process keeps the memory. They are fractions of the
    memory of the machine or control group, divided by its ranks.

Note [Frozen modules]
    torch's modules are 180,000 objects, which live until the process ends. Each full
    run of Python's garbage collector would visit all of them: 0.5 s in total during the
    import, 0.15 s in the middle of a step, and again at exit. ``gc.freeze`` excludes
    them.
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
    """Import torch and exclude it from garbage collection: Note [Frozen modules]."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        import_module("torch")  # by name: most of ronde does not need it
        gc.freeze()
    finally:
        if is_collecting:
            gc.enable()


class AvailableMemory(NamedTuple):
    """The memory that this process may still allocate."""

    num_bytes: int  # never negative
    source: str  # the name and the origin of the figure
    remedy: str  # advice to get more


_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of control groups, version 2 and 1: limit, usage, and its reclaimable part."""


def available_memory(root: Path = _ROOT) -> AvailableMemory:
    """Return the machine's available memory, or a control group's if that is less."""
    of_machine = AvailableMemory(
        _fields(root / "proc/meminfo").get("MemAvailable:", 0) * 1024,
        "MemAvailable of this machine",
        "Use fewer ranks, a smaller model, or a machine with more memory.",
    )
    return min([of_machine, *_of_groups(root)], key=lambda each: each.num_bytes)


def _of_groups(root: Path) -> Iterator[AvailableMemory]:
    for limit in list_limits(str(root).rstrip("/")):
        yield AvailableMemory(
            max(0, limit.limit_bytes - limit.used_bytes),
            f"{limit.name} {limit.limit_bytes} of the control group",
            "Use fewer ranks or a smaller model, or raise the memory limit of "
            "the container or job (docker run --memory, sbatch --mem, "
            "resources.limits).",
        )


class GroupLimit(NamedTuple):
    """The memory limit of a control group, and the memory in use there."""

    name: str  # of the file
    limit_bytes: int
    used_bytes: int  # without what the kernel can reclaim


def list_limits(root: str) -> Iterator[GroupLimit]:
    """Yield the limits that apply to this process, the innermost group's first."""
    for folder in map(Path, list_groups(root, "memory")):
        for limit_name, usage_name, reclaimable in _FILES:
            limit, usage = (_read(folder / name) for name in (limit_name, usage_name))
            # Empty if it is not mounted, "max" without a limit.
            if limit[:1].isdecimal() and usage and int(limit) < _UNLIMITED:
                used = int(usage) - _fields(folder / "memory.stat").get(reclaimable, 0)
                yield GroupLimit(limit_name, int(limit), used)


def nearest_limit(root: str = "") -> tuple[int, int]:
    """Return the used bytes and the limit of the group that is nearest to its limit.

    Both are 0 without a limit.
    """
    limits = [(each.used_bytes, each.limit_bytes) for each in list_limits(root)]
    return max(limits, key=lambda pair: pair[0] / max(1, pair[1]), default=(0, 0))


def list_groups(root: str, controller: str) -> list[str]:
    """List this process's cgroup directories, innermost first; some may not exist."""
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
        # The path of a group outside of the mount leads up.
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
    """Sizes at which glibc returns memory to the kernel: see Note [Malloc tuning]."""

    trim_bytes: int  # of the free memory at the heap's end
    mmap_bytes: int  # of one allocation that is freed

    def environment(self) -> dict[str, str]:
        return {
            "MALLOC_TRIM_THRESHOLD_": str(self.trim_bytes),
            "MALLOC_MMAP_THRESHOLD_": str(self.mmap_bytes),
        }

    def apply(self) -> None:
        """Set the thresholds in this process, if its malloc is glibc's."""
        import ctypes  # imported here: the launcher does not need it

        libc = ctypes.CDLL(None)
        of_glibc = ctypes.CDLL("libc.so.6").malloc
        pointers = [ctypes.cast(f, ctypes.c_void_p) for f in (libc.malloc, of_glibc)]
        if pointers[0].value == pointers[1].value:
            libc.mallopt(_M_TRIM_THRESHOLD, min(self.trim_bytes, _MAX_INT))
            libc.mallopt(_M_MMAP_THRESHOLD, min(self.mmap_bytes, _MAX_INT))


def malloc_thresholds(num_ranks: int, root: Path = _ROOT) -> MallocThresholds | None:
    """Return the thresholds for each rank; None if malloc's defaults should stay."""
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
