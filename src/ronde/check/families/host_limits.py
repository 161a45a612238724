"""Limits that ranks inherit: locked memory, files, processes, CPUs."""

import math
from collections.abc import Iterator

from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.families.host_judges import (
    Grade,
    Values,
    both,
    fewer_than_most,
    graded,
    num_ranks,
)
from ronde.check.fleet import Fleet
from ronde.units import format_size

MIN_LOCKED_BYTES = 32 << 30
ALIKE_SHARE = 0.9
"""systemd lets an eighth of the memory be locked, which is never quite the same."""

_LOCKED_FACTS = ("host.memlock_bytes", "host.rdma_devices", "host.capabilities")

MIN_OPEN_FILES, FEW_OPEN_FILES, GOOD_OPEN_FILES = 256, 4096, 65536
"""With less ranks fail, or may, or may one day."""

MIN_PROCESSES = 4096
MIN_PIDS_LEFT = 64


def _limit(value: int) -> float:
    return math.inf if value < 0 else value


def _locked(amount: float) -> str:
    size = "any amount" if math.isinf(amount) else format_size(int(amount))
    return f"{size} of memory may be locked"


def _judge_locked_memory(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having(*_LOCKED_FACTS):
        limit, adapters, capabilities = (facts.values[name] for name in _LOCKED_FACTS)
        # With this capability the kernel does not count what a process locks.
        is_free = not adapters or "ipc_lock" in capabilities
        if is_free or _limit(limit) >= MIN_LOCKED_BYTES:
            continue
        # Many machines have an adapter; NCCL alone uses it, from GPUs to other hosts.
        is_used = len(fleet.hosts) > 1 and facts.values.get("host.num_gpus") != 0
        severity = Severity.FAIL if is_used else Severity.WARN
        what = f"{_locked(_limit(limit))}, and {adapters[0]} needs more"
        yield Finding("locked-memory", severity, facts.host, what)


def _files(amount: float) -> str:
    return f"{'any number of' if math.isinf(amount) else int(amount)} files may be open"


def _grade_open_files(values: Values, _: Values) -> Grade | None:
    limit = _limit(values["host.open_files"])
    for at_least, severity in (
        (MIN_OPEN_FILES, Severity.FAIL),
        (FEW_OPEN_FILES, Severity.WARN),
        (GOOD_OPEN_FILES, Severity.INFORM),
    ):
        if limit < at_least:
            return Grade(severity, _files(limit))
    return None


def _grade_processes(values: Values, _: Values) -> Grade | None:
    limit = _limit(values["host.max_processes"])
    if limit >= MIN_PROCESSES or "sys_resource" in values["host.capabilities"]:
        return None
    return Grade(Severity.WARN, f"a user may have {int(limit)} processes and threads")


def _grade_pids(values: Values, _: Values) -> Grade | None:
    highest, left = values["host.pids_max"], values["host.pids_left"]
    if left < MIN_PIDS_LEFT:
        return Grade(
            Severity.FAIL,
            f"the control group allows {max(0, left)} more processes and threads",
        )
    if highest < MIN_PROCESSES:
        return Grade(
            Severity.WARN,
            f"the control group allows {highest} processes and threads",
        )
    return None


def _grade_cpus(values: Values, settings: Values) -> Grade | None:
    quota, seen = values["host.cpu_quota"], values["host.num_cpus"]
    wanted = num_ranks(settings)
    ranks = "1 rank" if wanted == 1 else f"{wanted} ranks"
    if quota and quota < min(wanted, seen):
        what = f"the control group allows {quota:g} CPUs at a time, for {ranks}"
        return Grade(Severity.WARN, what)
    if 0 < seen < wanted:
        return Grade(Severity.WARN, f"{seen} CPUs may be used, for {ranks}")
    if quota and quota < seen:
        return Grade(
            Severity.INFORM,
            f"the control group allows {quota:g} CPUs at a time, and {seen} are seen",
            f"Let libraries not start a thread for each CPU that they see: "
            f"OMP_NUM_THREADS={max(1, int(quota) // wanted)}",
        )
    return None


def _grade_nice(values: Values, _: Values) -> Grade | None:
    nice = values["host.nice"]
    if nice <= 0:
        return None
    return Grade(Severity.WARN, f"processes start there with niceness {nice}")


CHECKS = (
    Check(
        id="locked-memory",
        family=Family.HOST,
        title="enough memory may be locked for RDMA",
        reads="the limit on locked memory that a rank inherits, RDMA adapters in "
        "/sys/class/infiniband, and the capability to lock more",
        threshold="32GiB with an RDMA adapter, a warning where no GPU or no other host "
        "is there to use it; and nine tenths of what most hosts have",
        source="AMD's Primus, preflight on RDMA clusters; what most hosts have: "
        "ronde's own",
        severity=Severity.FAIL,
        fix="docker run --ulimit memlock=-1; on the host LimitMEMLOCK=infinity for "
        "sshd or slurmd, and memlock unlimited in /etc/security/limits.conf",
        needs="",
        why="RDMA pins the buffers that it sends from: ibv_reg_mr fails, and NCCL "
        "stops or falls back to sockets.",
        facts=_LOCKED_FACTS,
        judge=both(
            _judge_locked_memory,
            fewer_than_most(
                "locked-memory",
                ("host.memlock_bytes",),
                lambda values: _limit(values["host.memlock_bytes"]),
                _locked,
                ALIKE_SHARE,
            ),
        ),
    ),
    Check(
        id="open-files",
        family=Family.HOST,
        title="a rank may open enough files",
        reads="the soft limit on open files that a rank inherits",
        threshold=f"{GOOD_OPEN_FILES}; below {FEW_OPEN_FILES} a warning, below "
        f"{MIN_OPEN_FILES} a failure, and no less than most hosts have",
        source="PyTorch's notes on sharing tensors by file descriptors name the "
        "fault; the numbers are ronde's own",
        severity=Severity.FAIL,
        fix="ulimit -n 65536, or nofile in /etc/security/limits.conf; "
        "docker run --ulimit nofile=65536",
        needs="",
        why="Each connection and each tensor that a data loader's worker hands over "
        "is an open file: 'Too many open files', hours after the start.",
        facts=("host.open_files",),
        judge=both(
            graded("open-files", ("host.open_files",), _grade_open_files),
            fewer_than_most(
                "open-files",
                ("host.open_files",),
                lambda values: _limit(values["host.open_files"]),
                _files,
            ),
        ),
    ),
    Check(
        id="process-limit",
        family=Family.HOST,
        title="a user may have enough processes and threads",
        reads="the soft limit on a user's processes that a rank inherits",
        threshold=f"{MIN_PROCESSES}",
        source="ronde's own: eight ranks with the threads of BLAS, NCCL and data "
        "loaders on a large host have a few thousand",
        severity=Severity.WARN,
        fix="ulimit -u unlimited, or nproc in /etc/security/limits.conf",
        needs="",
        why="Threads count as well; at the limit a library ends with 'Resource "
        "temporarily unavailable'.",
        facts=("host.max_processes", "host.capabilities"),
        judge=graded(
            "process-limit",
            ("host.max_processes", "host.capabilities"),
            _grade_processes,
        ),
    ),
    Check(
        id="group-processes",
        family=Family.HOST,
        title="the control group allows enough processes and threads",
        reads="pids.max and pids.current of the control groups around a rank",
        threshold=f"{MIN_PROCESSES} in all, and {MIN_PIDS_LEFT} still free",
        source="ronde's own: as for a user's limit",
        severity=Severity.FAIL,
        fix="docker run --pids-limit -1; TasksMax=infinity in the unit; podPidsLimit "
        "of the kubelet",
        needs="",
        why="No rank, worker or thread can be started beyond it.",
        facts=("host.pids_max", "host.pids_left"),
        judge=graded(
            "group-processes", ("host.pids_max", "host.pids_left"), _grade_pids
        ),
    ),
    Check(
        id="cpu-quota",
        family=Family.HOST,
        title="each rank has a CPU of its own",
        reads="cpu.max (cpu.cfs_quota_us) of the control groups, and the CPUs that "
        "affinity and cpuset leave",
        threshold="a CPU for each rank; a quota below the CPUs that are seen is told",
        source="the kernel's documentation of CPU bandwidth control; a CPU for each "
        "rank is ronde's own",
        severity=Severity.WARN,
        fix="Raise the limit (docker run --cpus, resources.limits.cpu, "
        "sbatch --cpus-per-task), or run fewer ranks there",
        needs="",
        why="A rank beyond its quota stands still for the rest of each 100 ms, and "
        "all others wait for it.",
        facts=("host.cpu_quota", "host.num_cpus"),
        judge=graded("cpu-quota", ("host.cpu_quota", "host.num_cpus"), _grade_cpus),
    ),
    Check(
        id="niceness",
        family=Family.HOST,
        title="ranks start with ordinary priority",
        reads="the niceness that a rank inherits",
        threshold="0 or less",
        source="the kernel's scheduler: each step of niceness costs a quarter of the "
        "share of a CPU",
        severity=Severity.WARN,
        fix="Find what starts ronde there under nice (sshd, a batch system, "
        "CPUSchedulingPolicy or Nice= of a unit)",
        needs="",
        why="Whatever else runs on the host goes first, and all ranks wait.",
        facts=("host.nice",),
        judge=graded("niceness", ("host.nice",), _grade_nice),
    ),
)
