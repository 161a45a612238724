"""How many ranks fit this machine: one a GPU, else one a physical core."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUPS = Path("/sys/fs/cgroup")


def count_slots(environ: Mapping[str, str]) -> int:
    """Return one slot a GPU, else one a physical core that may be used.

    Args:
        environ: Says with ``CUDA_VISIBLE_DEVICES`` which GPUs may be used.
    """
    return count_gpus(environ) or count_cores()


def count_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs that a program would see.

    Args:
        environ: An entry ``CUDA_VISIBLE_DEVICES`` wins over what is there; as CUDA
            does, counting ends at the first item that is no device.
        devices: Directory of the device files.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return sum(
            re.fullmatch(r"nvidia\d+", path.name) is not None
            for path in devices.iterdir()
        )
    count = 0
    for item in visible.split(","):
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", item.strip()):
            break
        count += 1
    return count


def count_cores() -> int:
    """Return the physical cores in the affinity mask, cut to the CPU quota; least 1."""
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(cpu) for cpu in allowed}
    quota = cpu_quota()
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def _siblings(cpu: int) -> str:
    text = _read(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list")
    return text or str(cpu)


def cpu_quota(root: Path = _CGROUPS, memberships: str | None = None) -> float | None:
    """Return how many CPUs the control groups allow at a time, None for no limit.

    Args:
        root: Where the control groups are mounted.
        memberships: Text of ``/proc/self/cgroup``; None reads it.
    """
    if memberships is None:
        memberships = _read(Path("/proc/self/cgroup"))
    quotas: list[float] = []
    for line in memberships.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            quotas += _quotas(root, path, _quota_v2)
        elif "cpu" in controllers.split(","):
            quotas += _quotas(root / "cpu", path, _quota_v1)
    return min(quotas, default=None)


def _quotas(top: Path, path: str, read: Callable[[Path], float | None]) -> list[float]:
    """Return the limits of a group and of all groups above it."""
    group = top / path.strip("/")
    groups = [g for g in (group, *group.parents) if g == top or top in g.parents]
    return [quota for quota in map(read, groups) if quota is not None]


def _quota_v2(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _quota_v1(group: Path) -> float | None:
    quota = _read(group / "cpu.cfs_quota_us")
    period = _read(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
