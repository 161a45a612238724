"""How large a row may be: memory is asked for before any is taken. Torch-free."""

import os
from dataclasses import dataclass
from pathlib import Path

from ronde.errors import UsageError
from ronde.units import format_size

_GIB = 1 << 30
_SHM = "/dev/shm"  # noqa: S108  it is asked for its room alone
_RESERVE_PER_BYTES = 16 * _GIB
_MAX_RESERVE_BYTES = 4 * _GIB


@dataclass(frozen=True, slots=True)
class Memory:
    """What is free.

    Attributes:
        free_bytes: Of the memory that the buffers are in.
        what: Its name, for a sentence.
    """

    free_bytes: int
    what: str


def free_host_memory(root: Path = Path("/"), *, has_shm: bool) -> Memory:
    """Return the scarcest of available memory, control group limits and /dev/shm.

    Args:
        root: Where ``proc``, ``sys`` and ``dev`` are.
        has_shm: Buffers are in shared memory.
    """
    found = [Memory(_available(root), "the memory that is available")]
    found += [
        Memory(left, "the control group's memory limit") for left in _group_left(root)
    ]
    if has_shm:
        found += [Memory(left, _SHM) for left in _shm_left(root)]
    return min(found, key=lambda memory: memory.free_bytes)


def largest_row(free_bytes: int, num_sharing: int, *, is_checked: bool) -> int:
    """Return the bytes of the largest row for which a rank can have its buffers.

    Keeps a reserve of 1 GiB for every started 16 GiB, at most 4, and another GiB; of
    little memory at most half. Two buffers are needed, and room for a third where
    results are verified. Source: nccl-tests.

    Args:
        free_bytes: Of the whole host or device.
        num_sharing: Ranks that share it.
        is_checked: Results are verified.
    """
    started = -(-free_bytes // _RESERVE_PER_BYTES)
    reserve = min(started * _GIB, _MAX_RESERVE_BYTES) + _GIB
    usable = free_bytes - min(reserve, free_bytes // 2)
    return usable // num_sharing // (3 if is_checked else 2)


def require_room(min_bytes: int, largest_bytes: int, memory: Memory) -> None:
    """Refuse a first size that does not fit.

    Raises:
        UsageError: It does not; the message has the largest that does.
    """
    if min_bytes > largest_bytes:
        raise UsageError(
            f"-b must be at most {largest_bytes} ({format_size(largest_bytes)}), for "
            f"which every rank's buffers fit {memory.what}, {memory.free_bytes} bytes; "
            f"got {min_bytes}. Give -b {largest_bytes} or less."
        )


def _available(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise UsageError(
        f"{root}proc/meminfo must have MemAvailable, got none. Run on Linux 3.14 or "
        "newer."
    )


def _group_left(root: Path) -> list[int]:
    """Return what the limits of this process's control group, and those above, leave.

    File pages count as used there though they are given back; they are added.
    """
    mounted = root / "sys/fs/cgroup"
    left: list[int] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        names = ("memory.max", "memory.current", "inactive_file")
        top = mounted
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", names[2])
            top = mounted / "memory"
        group = top / path.strip("/")
        for each in (group, *group.parents):
            if each == top or top in each.parents:
                left += _left_in(each, *names)
    return left


def _left_in(group: Path, limit: str, usage: str, cached: str) -> list[int]:
    highest, used = _read(group / limit).strip(), _read(group / usage).strip()
    if not highest.isdecimal() or not used.isdecimal():
        return []
    pages = 0
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == cached:
            pages = int(value)
    return [max(0, int(highest) - int(used) + pages)]


def _shm_left(root: Path) -> list[int]:
    try:
        status = os.statvfs(root / _SHM.strip("/"))
    except OSError:
        return []
    return [status.f_bavail * status.f_frsize]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
