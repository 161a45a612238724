"""Checks of the limits and the memory of ranks on a host."""

import math
import os
import re
import shlex
from pathlib import Path

from ronde.check.check import FAIL, INFORM, WARN, Problem, Problems, check, each_host
from ronde.check.fleet import Fleet, Values
from ronde.check.majority import having_less, once_a_host
from ronde.check.probing import FactReader, UnreadableError
from ronde.memory import available_memory, list_groups
from ronde.topology.kernel_files import list_names, read_fields, read_number
from ronde.topology.machine import read_cores, read_cpu_limit, read_gpus
from ronde.units import counted, format_size

UNLIMITED = -1
NO_PID_LIMIT = 1 << 40  # more processes than any kernel has
_SHARED = "/dev/shm"  # noqa: S108 - nothing is written there
_MIN_LOCKED_BYTES = 32 << 30
_MIN_OPEN_FILES, _FEW_OPEN_FILES, _GOOD_OPEN_FILES = 256, 4096, 65536
_MIN_PROCESSES, _GOOD_PROCESSES, _MIN_PIDS_LEFT = 4096, 65536, 64
# The limit may be a share of the memory, which differs a little between hosts.
_ALIKE_SHARE = 0.9
_MIN_SHARED_BYTES, _GOOD_SHARED_BYTES = 64 << 20, 8 << 30
# Of the available memory; Linux gives /dev/shm a half, some of it in use.
_USUAL_SHARED_SHARE = 0.4
_MIN_RANK_BYTES, _GOOD_RANK_BYTES = 256 << 20, 1 << 30

_LOCKED, _FILES = "host.memlock_bytes", "host.open_files"
_USER_PIDS, _PIDS, _PIDS_LEFT = "host.max_processes", "host.pids_max", "host.pids_left"
_CAPABILITIES, _ADAPTERS = "host.capabilities", "host.rdma_devices"
_QUOTA, _CPUS = "host.cpu_quota", "host.num_cpus"
_SIZE, _FREE = "host.shm_size_bytes", "host.shm_free_bytes"
_WRITABLE = "host.is_shm_writable"
_TOTAL, _LEFT = "host.memory_bytes", "host.memory_available_bytes"
_MOST_FILES, _MOST_USER_PIDS = "host.hard_open_files", "host.hard_max_processes"
_LIMITS = {
    _LOCKED: ("Max locked memory", 0),
    _FILES: ("Max open files", 0),
    _USER_PIDS: ("Max processes", 0),
    _MOST_FILES: ("Max open files", 1),
    _MOST_USER_PIDS: ("Max processes", 1),
}
_BITS = {"ipc_lock": 14, "sys_resource": 24}


def read(reader: FactReader) -> None:
    root = reader.root
    adapters = f"{root}/sys/class/infiniband"
    reader.store("host.num_gpus", lambda: len(read_gpus(root, {})))
    reader.store(_ADAPTERS, lambda: list_names(adapters))
    own, shared = Path(f"{root}/proc/self"), Path(f"{root}{_SHARED}")
    with reader.reading(*_LIMITS):
        text = (own / "limits").read_text()
        reader.values |= {n: parse_limit(text, *at) for n, at in _LIMITS.items()}
    reader.store(_CAPABILITIES, lambda: _read_capabilities(own))
    reader.store(_QUOTA, lambda: read_cpu_limit(root))
    reader.store(_CPUS, lambda: sum(len(core.cpus) for core in read_cores(root)))
    reader.store_each((_PIDS, _PIDS_LEFT), lambda: _read_pids(root))
    reader.store_each((_SIZE, _FREE), lambda: _read_room(shared))
    reader.store(_WRITABLE, lambda: os.access(shared, os.W_OK | os.X_OK))
    memory = read_fields(f"{root}/proc/meminfo")
    reader.store(_TOTAL, lambda: int(memory["MemTotal"].split()[0]) * 1024)
    with reader.reading(_LEFT):
        if "MemAvailable" not in memory:
            raise UnreadableError("/proc/meminfo has no line MemAvailable")
        reader.values[_LEFT] = available_memory(Path(f"{root}/")).num_bytes


def parse_limit(text: str, row: str, column: int = 0) -> int:
    """Return the soft limit (column 0) or the hard one (1) in ``/proc/PID/limits``."""
    for line in text.splitlines():
        if line.startswith(row):
            limit = line[len(row) :].split()[column : column + 1]
            if limit == ["unlimited"]:
                return UNLIMITED
            if limit and limit[0].isdecimal():
                return int(limit[0])
    raise UnreadableError(f"/proc/self/limits has no line {row!r}")


def _read_capabilities(own: Path) -> list[str]:
    """Return the capabilities that lift limits; in a user namespace there are none."""
    if (own / "uid_map").read_text().split()[2:] != ["4294967295"]:
        return []
    effective = re.search(
        r"^CapEff:\s*(\w+)", (own / "status").read_text(), re.MULTILINE
    )
    if effective is None:
        raise UnreadableError("/proc/self/status has no line CapEff")
    return [name for name, bit in _BITS.items() if int(effective[1], 16) >> bit & 1]


def _read_pids(root: str) -> tuple[int, int]:
    """Return the control groups' lowest process limit, and the lowest number left."""
    highest, left = NO_PID_LIMIT, NO_PID_LIMIT
    for group in list_groups(root, "pids"):
        limit = read_number(f"{group}/pids.max", NO_PID_LIMIT)
        highest = min(highest, limit)
        left = min(left, limit - read_number(f"{group}/pids.current", 0))
    return highest, left


def _read_room(directory: Path) -> tuple[int, int]:
    """Return a file system's size and free bytes; zeros if ``directory`` is missing."""
    try:
        room = os.statvfs(directory)
    except FileNotFoundError:
        return 0, 0
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize


def _limit(value: int) -> float:
    return math.inf if value < 0 else value


def _raise_limit(option: str, item: str, wanted: int, hard: int | None) -> str:
    """Return a command that raises a limit, as root if the hard limit is too low."""
    if hard is not None and _limit(hard) >= wanted:
        return f"ulimit -{option} {wanted}  # there, also in ~/.bashrc"
    lines = shlex.quote(f"* - {item} {wanted}\\nroot - {item} {wanted}\\n")
    return (
        f"printf {lines} >>/etc/security/limits.conf  # as root there; then log in "
        f"again. In a container: docker run --ulimit {item}={wanted}"
    )


def _show_locked(amount: float) -> str:
    size = "any amount" if math.isinf(amount) else format_size(int(amount))
    return f"{size} of memory may be locked"


def _show_files(amount: float) -> str:
    return f"{'any number of' if math.isinf(amount) else int(amount)} files may be open"


@check(FAIL, _LOCKED, _ADAPTERS, _CAPABILITIES)
def locked_memory(fleet: Fleet) -> Problems:
    """Ranks may lock enough memory for RDMA.

    reads: the limit on locked memory, the RDMA adapters, and the capability to lock
        more
    threshold: 32GiB with an RDMA adapter and GPUs, and 90 % of the limit on most hosts
    source: 32GiB: AMD's Primus fd1eeab (preflight/node_smoke/cli.py); unlimited: NCCL
        2.30.7's manual, Troubleshooting NCCL errors; ronde's choice: 90 %
    fix: docker run --ulimit memlock=-1; on the host LimitMEMLOCK=infinity for sshd or
        slurmd, and memlock unlimited in /etc/security/limits.conf
    pod: Set LimitMEMLOCK=infinity for containerd on the node (systemctl edit
        containerd, then restart it); the capability IPC_LOCK helps root alone
    why: RDMA pins its buffers. If pinning fails, NCCL aborts or falls back to sockets.
    """
    limits = {host: _limit(value) for host, value in fleet.known(_LOCKED).items()}
    few = having_less(limits, _show_locked, _ALIKE_SHARE)
    yield from once_a_host(_lacking_memory(fleet), few)


def _lacking_memory(fleet: Fleet) -> Problems:
    for facts in fleet.having(_LOCKED, _ADAPTERS, _CAPABILITIES):
        values, adapters = facts.values, facts.values[_ADAPTERS]
        # With this capability the limit does not apply.
        is_free = not adapters or "ipc_lock" in values[_CAPABILITIES]
        if not is_free and _limit(values[_LOCKED]) < _MIN_LOCKED_BYTES:
            # Only NCCL uses the adapter, and only between hosts.
            is_used = len(fleet.hosts) > 1 and values.get("host.num_gpus") != 0
            message = (
                f"{_show_locked(_limit(values[_LOCKED]))}, and {adapters[0]} needs more"
            )
            yield Problem(message, FAIL if is_used else WARN, host=facts.host)


@check(FAIL, _FILES, optional=(_MOST_FILES,))
def open_files(fleet: Fleet) -> Problems:
    """A rank may open enough files.

    reads: the soft limit on open files that a rank inherits
    threshold: 65536, and no less than most hosts; below 4096 is a warning, below 256 a
        failure
    source: torch.multiprocessing's manual: file_descriptor opens a file for each
        tensor; ronde's choice: 65536, enough for these files and a connection to each
        rank
    fix: ulimit -n 65536, or nofile in /etc/security/limits.conf; docker run --ulimit
        nofile=65536
    pod: Set LimitNOFILE=65536 for containerd on the node (systemctl edit containerd,
        then restart it)
    why: Connections and shared tensors are open files: training fails with 'Too many
        open files', sometimes after hours.
    """
    limits = {host: _limit(value) for host, value in fleet.known(_FILES).items()}
    grades = (_MIN_OPEN_FILES, FAIL), (_FEW_OPEN_FILES, WARN), (math.inf, INFORM)
    few = (
        Problem(_show_files(n), next(s for most, s in grades if n < most), host=host)
        for host, n in limits.items()
        if n < _GOOD_OPEN_FILES
    )
    hard = fleet.known(_MOST_FILES)
    for problem in once_a_host(few, having_less(limits, _show_files)):
        usual = [n for n in limits.values() if math.isfinite(n)]
        wanted = int(max(_GOOD_OPEN_FILES, *usual))
        fix = _raise_limit("n", "nofile", wanted, hard.get(problem.host))
        yield problem._replace(fix=fix)


@each_host(FAIL, _USER_PIDS, _CAPABILITIES, _PIDS, _PIDS_LEFT)
def process_limit(values: Values, _: Fleet) -> Problems:
    """Ranks may start enough processes and threads.

    reads: the limit on a user's processes; pids.max and pids.current of the control
        groups
    threshold: 4096 in all, else a warning; 64 left in the control group, else a failure
    source: ronde's choice: eight ranks have a few thousand threads in all
    fix: ulimit -u unlimited, or nproc in /etc/security/limits.conf; docker run
        --pids-limit -1; TasksMax=infinity in the unit; podPidsLimit of the kubelet
    pod: Raise podPidsLimit in the kubelet's configuration on the node
    why: Threads count as well: libraries fail with 'Resource temporarily unavailable'.
    """
    limit, left = _limit(values[_USER_PIDS]), values[_PIDS_LEFT]
    fix = process_limit.fix.partition("limits.conf; ")[2]
    if left < _MIN_PIDS_LEFT:
        message = f"the control group allows {max(0, left)} more processes and threads"
        yield Problem(message, fix=fix)
    elif values[_PIDS] < _MIN_PROCESSES:
        message = f"the control group allows {values[_PIDS]} processes and threads"
        yield Problem(message, WARN, fix=fix)
    elif limit < _MIN_PROCESSES and "sys_resource" not in values[_CAPABILITIES]:
        message = f"a user may have {int(limit)} processes and threads"
        hard = values.get(_MOST_USER_PIDS)
        yield Problem(
            message, WARN, fix=_raise_limit("u", "nproc", _GOOD_PROCESSES, hard)
        )


@each_host(WARN, _QUOTA, _CPUS)
def cpu_quota(values: Values, fleet: Fleet) -> Problems:
    """Each rank has a CPU of its own.

    reads: cpu.max (cfs_quota_us) of control groups; CPUs of affinity and cpuset
    threshold: a CPU for each rank; a quota below the number of visible CPUs is a note
    source: Linux' cgroup-v2.rst, cpu.max, and sched-bwc.rst; ronde's choice: one CPU
        per rank
    fix: Raise the limit (docker run --cpus, resources.limits.cpu, sbatch
        --cpus-per-task), or run fewer ranks there
    pod: Raise resources.limits.cpu (ronde kubernetes --cpu), or run fewer ranks there
    why: Ranks that exceed their quota are stopped for the rest of each 100 ms.
    """
    quota, seen, wanted = values[_QUOTA], values[_CPUS], fleet.num_ranks
    ranks = counted(wanted, "rank")
    allowed = f"the control group allows {quota:g} CPUs at a time"
    if quota and quota < min(wanted, seen):
        yield Problem(f"{allowed}, for {ranks}")
    elif 0 < seen < wanted:
        yield Problem(f"{seen} CPUs may be used, for {ranks}")
    elif quota and quota < seen:
        fix = "Libraries would start a thread for each visible CPU; set "
        fix += f"OMP_NUM_THREADS={max(1, int(quota) // wanted)}"
        yield Problem(f"{allowed}, and {seen} are visible", INFORM, fix=fix)


@each_host(FAIL, _SIZE, _FREE, _TOTAL, _LEFT)
def shared_memory(values: Values, _: Fleet) -> Problems:
    """Shared memory (/dev/shm) has enough free space.

    reads: the size, free space and write permission of /dev/shm
    threshold: more than 64MiB free; a warning below 8GiB or 40 % of the memory,
        whichever is less
    source: 64MiB: Docker's default, too little for NCCL 2.30.7 (manual, Shared memory);
        8GiB: AMD's Primus fd1eeab (preflight/node_smoke/cli.py); ronde's choice: 40 %
    fix: docker run --shm-size 8g, or --ipc=host; in Kubernetes an emptyDir with medium
        Memory at /dev/shm; else mount -o remount,size=8g /dev/shm
    pod: Mount a volume emptyDir at /dev/shm, with medium Memory and sizeLimit 8Gi, a
        part of the pod's memory; ronde kubernetes --shm 8Gi makes one
    why: Data loaders and NCCL keep buffers there: without space, SIGBUS kills a rank.
    """
    size, free = values[_SIZE], values[_FREE]
    usual = min(values[_TOTAL], values[_LEFT]) * _USUAL_SHARED_SHARE
    if size == 0:
        yield Problem("there is no /dev/shm")
    elif not values.get(_WRITABLE, True):
        fix = f"As root: mount -o remount,rw {_SHARED} && chmod 1777 {_SHARED}"
        yield Problem(f"no permission to write to {_SHARED}", fix=fix)
    elif free <= _MIN_SHARED_BYTES or free < min(_GOOD_SHARED_BYTES, usual):
        message = f"{_SHARED} has {format_size(free)} free of {format_size(size)}"
        yield Problem(message, FAIL if free <= _MIN_SHARED_BYTES else WARN)


@each_host(FAIL, _LEFT)
def memory_left(values: Values, fleet: Fleet) -> Problems:
    """Enough memory is free for the ranks.

    reads: MemAvailable, and the free memory of the control groups
    threshold: 1GiB for each rank; below 256MiB for each rank is a failure
    source: ronde's choice: a process that has imported torch uses 200 to 500MiB
    fix: End other programs (ps aux --sort -rss), run fewer ranks, or raise the limit of
        the container or job
    why: The kernel kills a rank when memory runs out.
    """
    left, wanted = values[_LEFT], fleet.num_ranks
    if left < _GOOD_RANK_BYTES * wanted:
        severity = FAIL if left < _MIN_RANK_BYTES * wanted else WARN
        ranks = counted(wanted, "rank")
        yield Problem(f"{format_size(left)} of memory is free, for {ranks}", severity)
