"""What control groups allow a rank: CPUs, memory, processes."""

import os
from pathlib import Path

from ronde.check.facts import Reading, UnreadableError
from ronde.memory import available_memory
from ronde.topology.kernel_files import read_number, read_text
from ronde.topology.machine import list_groups, read_cores, read_cpu_limit, read_online

UNLIMITED = 1 << 40
"""More processes than any kernel has."""


def read_control_groups(reading: Reading, root: str) -> None:
    """Take down what there is and what is allowed of it.

    Args:
        reading: Where to.
        root: Where ``proc`` and ``sys`` are; empty for this machine.
    """
    reading.keep("host.cpu_quota", lambda: read_cpu_limit(root))
    reading.keep("host.num_cpus", lambda: sum(len(c.cpus) for c in read_cores(root)))
    reading.keep("host.num_cpus_online", lambda: read_online(root).bit_count())
    reading.keep("host.memory_available_bytes", lambda: _memory_left(root))
    reading.keep("host.oom_kills", lambda: _count_oom_kills(root))
    with reading.reading("host.pids_max", "host.pids_left"):
        highest, left = _pids(root)
        reading.values["host.pids_max"] = highest
        reading.values["host.pids_left"] = left


def _memory_left(root: str) -> int:
    """Return how many bytes may still be taken.

    Raises:
        UnreadableError: The machine does not tell: that is not to say, it has none.
    """
    if "MemAvailable:" not in read_text(f"{root}/proc/meminfo"):
        raise UnreadableError("/proc/meminfo does not tell MemAvailable")
    return available_memory(Path(f"{root}/")).num_bytes


def _count_oom_kills(root: str) -> int:
    """Return how often the kernel killed in this group for lack of memory."""
    for group in list_groups(root, "memory"):
        # The group of the whole machine, which alone has this file, says nothing of
        # this job. Version 2 has no count there.
        if os.path.exists(f"{group}/cgroup.sane_behavior"):  # noqa: PTH110 - see read_text
            continue
        for file in ("memory.events", "memory.oom_control"):
            for line in read_text(f"{group}/{file}").splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return 0


def _pids(root: str) -> tuple[int, int]:
    """Return the tightest limit on processes, and how many more there may be.

    Both are ``UNLIMITED`` without a limit.
    """
    highest, left = UNLIMITED, UNLIMITED
    for group in list_groups(root, "pids"):
        limit = read_number(f"{group}/pids.max", UNLIMITED)
        highest = min(highest, limit)
        left = min(left, limit - read_number(f"{group}/pids.current", 0))
    return highest, left
