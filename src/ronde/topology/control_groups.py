"""What the control groups of this process allow it: CPUs, and how many at a time.

Version 1, version 2 and both side by side; inside a container whose groups bear the
names of the host, the top of what is mounted is the container's own.
"""

from ronde.topology.kernel_files import read_list, read_text


def read_cpu_limit(root: str) -> float:
    """Return how many CPUs may be used at a time, 0 for no limit.

    Args:
        root: Where ``proc`` and ``sys`` are; empty for this machine.
    """
    limits = [limit for group in list_groups(root, "cpu") if (limit := _limit(group))]
    return min(limits, default=0.0)


def read_cpuset(root: str) -> int:
    """Return the set of CPUs that may be used, 0 where nothing is said.

    Args:
        root: Where ``proc`` and ``sys`` are; empty for this machine.
    """
    names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
    for group in list_groups(root, "cpuset"):
        for name in names:
            cpus = read_list(f"{group}/{name}")
            if cpus:
                return cpus
    return 0


def list_groups(root: str, controller: str) -> list[str]:
    """Return the directories of this process's groups, each before what is above it.

    Not all that are named need be there.

    Args:
        root: Where ``proc`` and ``sys`` are; empty for this machine.
        controller: What limits: ``cpu``, ``cpuset``, ``memory``, ``pids``.
    """
    mounts = f"{root}/sys/fs/cgroup"
    found: list[str] = []
    for line in read_text(f"{root}/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            tops = (mounts, f"{mounts}/unified")
        elif controller in controllers.split(","):
            tops = (f"{mounts}/{controller}", f"{mounts}/{controllers}")
        else:
            continue
        found += [f"{top}{group}" for group in _upwards(path) for top in tops]
    return found


def _upwards(path: str) -> list[str]:
    """Return a group's path and those above it; just the top for one outside of it."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        return [""]
    return ["".join(f"/{p}" for p in parts[:n]) for n in range(len(parts), -1, -1)]


def _limit(group: str) -> float:
    quota, _, period = read_text(f"{group}/cpu.max").partition(" ")
    if not quota:
        quota = read_text(f"{group}/cpu.cfs_quota_us")
        period = read_text(f"{group}/cpu.cfs_period_us")
    is_limit = quota.isdecimal() and period.isdecimal() and int(period) > 0
    return int(quota) / int(period) if is_limit else 0.0
