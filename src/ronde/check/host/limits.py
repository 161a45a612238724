"""What a rank inherits: limits, capabilities, and what control groups allow."""

import math
from collections.abc import Iterator
from pathlib import Path

from ronde.check.check import (
    FAIL,
    INFORM,
    WARN,
    Family,
    Problem,
    check,
    each_host,
    having_less,
    once_a_host,
)
from ronde.check.facts import Fleet, Reading, UnreadableError, Values
from ronde.topology.kernel_files import read_number
from ronde.topology.machine import list_groups, read_cores, read_cpu_limit, read_online
from ronde.units import format_size

UNLIMITED = -1
"""A limit that there is not."""

NO_PID_LIMIT = 1 << 40
"""More processes than any kernel has."""

MIN_LOCKED_BYTES = 32 << 30
MIN_OPEN_FILES, FEW_OPEN_FILES, GOOD_OPEN_FILES = 256, 4096, 65536
MIN_PROCESSES, MIN_PIDS_LEFT = 4096, 64
ALIKE_SHARE = 0.9
"""systemd lets an eighth of the memory be locked, which is never quite the same."""

_LOCKED, _FILES = "host.memlock_bytes", "host.open_files"
_USER_PIDS, _PIDS, _PIDS_LEFT = "host.max_processes", "host.pids_max", "host.pids_left"
_CAPABILITIES, _QUOTA, _CPUS = (
    "host.capabilities",
    "host.cpu_quota",
    "host.num_cpus",
)
_LIMITS = {
    _LOCKED: "Max locked memory",
    _FILES: "Max open files",
    _USER_PIDS: "Max processes",
}
_BITS = {"ipc_lock": 14, "sys_resource": 24}
_ALL_IDS = "4294967295"


def read(reading: Reading) -> None:
    """Read soft limits, capabilities, and the limits of control groups."""
    root = reading.root
    own = Path(f"{root}/proc/self")
    with reading.reading(*_LIMITS):
        text = (own / "limits").read_text()
        reading.values |= {name: parse_limit(text, r) for name, r in _LIMITS.items()}
    reading.keep(_CAPABILITIES, lambda: _read_capabilities(own))
    reading.keep(_QUOTA, lambda: read_cpu_limit(root))
    reading.keep(_CPUS, lambda: sum(len(core.cpus) for core in read_cores(root)))
    reading.keep("host.num_cpus_online", lambda: read_online(root).bit_count())
    with reading.reading(_PIDS, _PIDS_LEFT):
        reading.values |= dict(zip((_PIDS, _PIDS_LEFT), _read_pids(root), strict=True))


def parse_limit(text: str, row: str) -> int:
    """Return a soft limit of ``/proc/PID/limits``, ``UNLIMITED`` for none."""
    for line in text.splitlines():
        if line.startswith(row):
            soft = line[len(row) :].split()[:1]
            if soft == ["unlimited"]:
                return UNLIMITED
            if soft and soft[0].isdecimal():
                return int(soft[0])
    raise UnreadableError(f"/proc/self/limits has no {row!r}")


def _read_capabilities(own: Path) -> list[str]:
    """Return which capabilities that lift limits this process has.

    In a user namespace of its own a process has them over its own things only.
    """
    if (own / "uid_map").read_text().split()[2:] != [_ALL_IDS]:
        return []
    for line in (own / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            bits = int(value, 16)
            return [name for name, bit in _BITS.items() if bits >> bit & 1]
    raise UnreadableError("/proc/self/status has no CapEff")


def _read_pids(root: str) -> tuple[int, int]:
    """Return the tightest limit on processes, and how many more there may be."""
    highest, left = NO_PID_LIMIT, NO_PID_LIMIT
    for group in list_groups(root, "pids"):
        limit = read_number(f"{group}/pids.max", NO_PID_LIMIT)
        highest = min(highest, limit)
        left = min(left, limit - read_number(f"{group}/pids.current", 0))
    return highest, left


def _limit(value: int) -> float:
    return math.inf if value < 0 else value


def _show_locked(amount: float) -> str:
    size = "any amount" if math.isinf(amount) else format_size(int(amount))
    return f"{size} of memory may be locked"


def _show_files(amount: float) -> str:
    return f"{'any number of' if math.isinf(amount) else int(amount)} files may be open"


@check(
    Family.HOST,
    FAIL,
    """locked-memory: enough memory may be locked for RDMA
    reads: the limit on locked memory that a rank inherits, RDMA adapters in
        /sys/class/infiniband, and the capability to lock more
    threshold: 32GiB with an RDMA adapter, a warning without a GPU or another host; and
        90 % of what most hosts have
    source: AMD's Primus, preflight on RDMA clusters; what most hosts have: ronde's own
    fix: docker run --ulimit memlock=-1; on the host LimitMEMLOCK=infinity for sshd or
        slurmd, and memlock unlimited in /etc/security/limits.conf
    why: RDMA pins the buffers that it sends from: ibv_reg_mr fails, and NCCL stops or
        falls back to sockets.
    """,
    _LOCKED,
    "host.rdma_devices",
    _CAPABILITIES,
)
def _locked_memory(fleet: Fleet) -> Iterator[Problem]:
    limits = {host: _limit(value) for host, value in fleet.known(_LOCKED).items()}
    few = having_less(limits, _show_locked, ALIKE_SHARE)
    yield from once_a_host(_lacking_memory(fleet), few)


def _lacking_memory(fleet: Fleet) -> Iterator[Problem]:
    for facts in fleet.having(_LOCKED, "host.rdma_devices", _CAPABILITIES):
        values, adapters = facts.values, facts.values["host.rdma_devices"]
        # With this capability the kernel does not count what a process locks.
        is_free = not adapters or "ipc_lock" in values[_CAPABILITIES]
        if not is_free and _limit(values[_LOCKED]) < MIN_LOCKED_BYTES:
            # Many machines have an adapter; NCCL alone uses it, between hosts.
            is_used = len(fleet.hosts) > 1 and values.get("host.num_gpus") != 0
            what = f"{_show_locked(_limit(values[_LOCKED]))}, {adapters[0]} needs more"
            yield Problem(what, FAIL if is_used else WARN, host=facts.host)


@check(
    Family.HOST,
    FAIL,
    f"""open-files: a rank may open enough files
    reads: the soft limit on open files that a rank inherits
    threshold: {GOOD_OPEN_FILES}; below {FEW_OPEN_FILES} a warning, below
        {MIN_OPEN_FILES} a failure; and no less than most hosts have
    source: PyTorch's notes on sharing tensors by file descriptors; the numbers are
        ronde's own
    fix: ulimit -n 65536, or nofile in /etc/security/limits.conf; docker run --ulimit
        nofile=65536
    why: Each connection and each tensor that a data loader's worker hands over is an
        open file: 'Too many open files', hours after the start.
    """,
    _FILES,
)
def _open_files(fleet: Fleet) -> Iterator[Problem]:
    limits = {host: _limit(value) for host, value in fleet.known(_FILES).items()}
    grades = (
        (MIN_OPEN_FILES, FAIL),
        (FEW_OPEN_FILES, WARN),
        (GOOD_OPEN_FILES, INFORM),
    )
    few = (
        Problem(_show_files(limit), next(s for n, s in grades if limit < n), host=host)
        for host, limit in limits.items()
        if limit < GOOD_OPEN_FILES
    )
    yield from once_a_host(few, having_less(limits, _show_files))


@each_host(
    Family.HOST,
    FAIL,
    f"""process-limit: there may be enough processes and threads
    reads: the soft limit on a user's processes that a rank inherits; pids.max and
        pids.current of the control groups around it
    threshold: {MIN_PROCESSES} in all, a warning; a failure with less than
        {MIN_PIDS_LEFT} free in the control group
    source: ronde's own: eight ranks with the threads of BLAS, NCCL and data loaders on
        a large host have a few thousand
    fix: ulimit -u unlimited, or nproc in /etc/security/limits.conf; docker run
        --pids-limit -1; TasksMax=infinity in the unit; podPidsLimit of the kubelet
    why: Threads count as well; at the limit a library ends with 'Resource temporarily
        unavailable'.
    """,
    _USER_PIDS,
    _CAPABILITIES,
    _PIDS,
    _PIDS_LEFT,
)
def _process_limit(values: Values, _: Fleet) -> Iterator[Problem]:
    limit, left = _limit(values[_USER_PIDS]), values[_PIDS_LEFT]
    if left < MIN_PIDS_LEFT:
        what = f"the control group allows {max(0, left)} more processes and threads"
        yield Problem(what)
    elif values[_PIDS] < MIN_PROCESSES:
        what = f"the control group allows {values[_PIDS]} processes and threads"
        yield Problem(what, WARN)
    elif limit < MIN_PROCESSES and "sys_resource" not in values[_CAPABILITIES]:
        yield Problem(f"a user may have {int(limit)} processes and threads", WARN)


@each_host(
    Family.HOST,
    WARN,
    """cpu-quota: each rank has a CPU of its own
    reads: cpu.max (cpu.cfs_quota_us) of the control groups, and the CPUs that affinity
        and cpuset leave
    threshold: a CPU for each rank; a quota below the CPUs that are seen is shown
    source: the kernel's documentation of CPU bandwidth control; a CPU for each rank is
        ronde's own
    fix: Raise the limit (docker run --cpus, resources.limits.cpu, sbatch
        --cpus-per-task), or run fewer ranks there
    why: A rank beyond its quota stands still for the rest of each 100 ms, and all
        others wait for it.
    """,
    _QUOTA,
    _CPUS,
)
def _cpu_quota(values: Values, fleet: Fleet) -> Iterator[Problem]:
    quota, seen, wanted = values[_QUOTA], values[_CPUS], fleet.num_ranks
    ranks = "1 rank" if wanted == 1 else f"{wanted} ranks"
    allowed = f"the control group allows {quota:g} CPUs at a time"
    if quota and quota < min(wanted, seen):
        yield Problem(f"{allowed}, for {ranks}")
    elif 0 < seen < wanted:
        yield Problem(f"{seen} CPUs may be used, for {ranks}")
    elif quota and quota < seen:
        fix = "Let libraries not start a thread for each CPU that they see: "
        fix += f"OMP_NUM_THREADS={max(1, int(quota) // wanted)}"
        yield Problem(f"{allowed}, and {seen} are seen", INFORM, fix=fix)
