"""What a scheduler gave the job on this host, and what there really is.

Schedulers write it into the environment of what they start. An agent that was started
by ssh has none of it: then there are no facts, and nothing to check.
"""

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping

from ronde.check.check import FAIL, INFORM, WARN, Family, Problem, each_host
from ronde.check.facts import Fleet, Reading, UnreadableError, Value, Values
from ronde.errors import RondeError
from ronde.launch.environments import own_environment
from ronde.launch.hosts.sources import allocated_names
from ronde.topology.kernel_files import read_number
from ronde.topology.machine import list_groups, read_cores, read_gpus
from ronde.units import format_duration, format_size
from ronde.world.launcher_env import parse_tasks_per_node

NAME, CPUS, GPUS = "scheduler.name", "scheduler.cpus", "scheduler.gpus"
MEMORY, LEFT = "scheduler.memory_bytes", "scheduler.left_s"
"""Facts: what was given here, and for how long still; only those that are known."""

CORES, VISIBLE_GPUS = "scheduler.cores", "scheduler.visible_gpus"
MEMORY_LIMIT = "scheduler.memory_limit_bytes"
"""Facts: what there is: what ranks may use; a limit of 0 is none."""

MANY_TIMES = 2.0
"""So many times what there is, no way of counting explains."""

MEMORY_SHARE = 0.9
"""Of what was given: firmware and kernel take a little."""

SHORT_S = 600.0

_THREADS, _QUOTA, _TOTAL = "host.num_cpus", "host.cpu_quota", "host.memory_bytes"
_UNLIMITED_BYTES = 1 << 60
_MIB = 1 << 20

Environment = Mapping[str, str]


def read(reading: Reading) -> None:
    """Read what was given, and what there is of that."""
    root, environ = reading.root, own_environment()
    for name, mark, given in _SCHEDULERS:
        if mark not in environ:
            continue
        reading.values[NAME] = name
        for fact, read_given in given.items():
            with reading.reading(fact):
                value = _read_given(read_given, environ)
                if value is not None:
                    reading.values[fact] = value
        reading.keep(CORES, lambda: len(read_cores(root)))
        reading.keep(VISIBLE_GPUS, lambda: count_visible_gpus(root, environ))
        reading.keep(MEMORY_LIMIT, lambda: read_memory_limit(root))
        return


def _read_given(read: Callable[[Environment], Value], environ: Environment) -> Value:
    try:
        return read(environ)
    except RondeError as error:
        raise UnreadableError(str(error)) from None


def count_visible_gpus(root: str, environ: Environment) -> int:
    """Return how many GPUs ranks see that inherit an environment."""
    # Where there is none, a list of GPUs to be seen would be believed.
    return len(read_gpus(root, environ)) if read_gpus(root, {}) else 0


def read_memory_limit(root: str) -> int:
    """Return the tightest limit of this process's control groups, 0 for none."""
    limits = [
        read_number(f"{group}/{file}", _UNLIMITED_BYTES)
        for group in list_groups(root, "memory")
        for file in ("memory.max", "memory.limit_in_bytes")
    ]
    tightest = min(limits, default=_UNLIMITED_BYTES)
    return tightest if tightest < _UNLIMITED_BYTES else 0


def _slurm_cpus(environ: Environment) -> int | None:
    """Return the job's CPUs on this node, of which a step may have fewer."""
    name = "SLURM_JOB_CPUS_PER_NODE"
    names = allocated_names(environ)
    # Slurm names the node to what it starts there.
    node = environ.get("SLURMD_NODENAME") or _own_name(names)
    if name in environ and node in names:
        counts = parse_tasks_per_node(environ[name], name)
        if len(counts) == len(names):
            return counts[names.index(node)]
    return _number(environ, "SLURM_CPUS_ON_NODE")


def _slurm_gpus(environ: Environment) -> int | None:
    # Not SLURM_JOB_GPUS: steps inherit it from the first node.
    return _number(environ, "SLURM_GPUS_ON_NODE")


def _slurm_memory(environ: Environment) -> int | None:
    """Return the memory on this node; the three variables exclude each other."""
    for name, num in (
        ("SLURM_MEM_PER_NODE", 1),
        ("SLURM_MEM_PER_CPU", _slurm_cpus(environ)),
        ("SLURM_MEM_PER_GPU", _slurm_gpus(environ)),
    ):
        each = _number(environ, name)
        # Zero is all memory of the node, however much that is.
        if each and num:
            return each * num * _MIB
    return None


def _slurm_left(environ: Environment) -> float | None:
    ends_at_s = _number(environ, "SLURM_JOB_END_TIME")
    return ends_at_s - time.time() if ends_at_s else None


def _pbs_cpus(environ: Environment) -> int | None:
    """Return the CPUs of a chunk; this host may have several chunks of the job."""
    ncpus = _number(environ, "NCPUS")
    return _number(environ, "PBS_NUM_PPN") if ncpus is None else ncpus


def _lsf_cpus(environ: Environment) -> int | None:
    """Return the slots on this host, of ``host1 8 host2 4``."""
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    slots = dict(zip(words[::2], words[1::2], strict=True))
    name = _own_name(tuple(slots))
    return int(slots[name]) if name else None


def _kubernetes_gpus(environ: Environment) -> int | None:
    """Return the GPUs that NVIDIA's device plugin lists.

    Images bring ``all`` along, and instances of a GPU (MIG) are not counted here.
    """
    devices = environ.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    is_list = all(re.fullmatch(r"GPU-[0-9a-fA-F-]+", each) for each in devices)
    return len(devices) if is_list else None


def _own_name(names: tuple[str, ...]) -> str:
    """Return which of some hosts this one is, with or without its domain; or empty."""
    own = os.uname().nodename
    if own in names:
        return own
    short = [name for name in names if name.partition(".")[0] == own.partition(".")[0]]
    return short[0] if len(short) == 1 else ""


def _number(environ: Environment, name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text.strip(), re.ASCII):
        raise UnreadableError(f"{name} is no whole number: {text!r}")
    return int(text)


_SLURM = "Slurm"
_SCHEDULERS: tuple[
    tuple[str, str, dict[str, Callable[[Environment], Value | None]]], ...
] = (
    (
        _SLURM,
        "SLURM_JOB_ID",
        {
            CPUS: _slurm_cpus,
            GPUS: _slurm_gpus,
            MEMORY: _slurm_memory,
            LEFT: _slurm_left,
        },
    ),
    ("PBS", "PBS_JOBID", {CPUS: _pbs_cpus}),
    ("LSF", "LSB_JOBID", {CPUS: _lsf_cpus}),
    # Last: the others may run inside of it.
    ("Kubernetes", "KUBERNETES_SERVICE_HOST", {GPUS: _kubernetes_gpus}),
)
"""Name, the variable that shows it, and how to read what it gave."""


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


@each_host(
    Family.HOST,
    FAIL,
    """scheduler-cpus: the CPUs that the scheduler gave the job may be used
    reads: SLURM_JOB_CPUS_PER_NODE, else SLURM_CPUS_ON_NODE; NCPUS or PBS_NUM_PPN;
        LSB_MCPU_HOSTS; against the CPUs that affinity, cpuset and quota leave
    threshold: no fewer; a failure below half. Under Slurm, more cores are shown
    source: sbatch(1) and srun(1), the manuals of PBS and LSF; a factor of two may come
        of counting cores here and threads there
    fix: taskset -cp $$ shows which may be used; start it by srun --cpu-bind=none, or
        ask for --cpus-per-task; scontrol show node shows what Slurm believes
    needs: an agent that the scheduler started, not ssh
    why: All ranks of the host share the few CPUs that are left to this one task.
    """,
    CPUS,
    CORES,
    _THREADS,
    _QUOTA,
)
def _scheduler_cpus(values: Values, _: Fleet) -> Iterator[Problem]:
    given, threads = values[CPUS], values[_THREADS]
    usable = min(threads, values[_QUOTA] or math.inf)
    what = f"{values[NAME]} gave the job {_count(given, 'CPU')} here, but "
    if usable < given:
        severity = FAIL if MANY_TIMES * usable < given else WARN
        yield Problem(f"{what}only {usable:g} may be used", severity)
    # Slurm counts threads on some clusters, and cores on others.
    elif values[NAME] == _SLURM and values[CORES] > given:
        what += f"{threads} may be used, which may be other jobs'"
        yield Problem(what, INFORM)


@each_host(
    Family.GPU,
    FAIL,
    """scheduler-gpus: ranks see the GPUs that the scheduler gave the job
    reads: SLURM_GPUS_ON_NODE; in Kubernetes the GPUs of NVIDIA_VISIBLE_DEVICES; against
        device files that may be opened, as far as CUDA_VISIBLE_DEVICES,
        ROCR_VISIBLE_DEVICES and the like show them
    threshold: as many; to see more is a warning
    source: srun(1): GPUs available to the step; NVIDIA's device plugin
    fix: unset CUDA_VISIBLE_DEVICES, if you have set it; ls -l /dev/nvidia*; where more
        are seen, the administrator can set ConstrainDevices in cgroup.conf
    needs: an agent that the scheduler started, not ssh, and GPUs that were asked for
    why: GPUs stand idle that are paid for; or two jobs use the same one.
    """,
    GPUS,
    VISIBLE_GPUS,
)
def _scheduler_gpus(values: Values, _: Fleet) -> Iterator[Problem]:
    given, seen = values[GPUS], values[VISIBLE_GPUS]
    what = f"{values[NAME]} gave the job {_count(given, 'GPU')} here, but ranks see "
    if seen < given:
        yield Problem(f"{what}{seen}")
    elif seen > given:
        yield Problem(f"{what}{seen}, which may be other jobs'", WARN)


@each_host(
    Family.HOST,
    FAIL,
    """scheduler-memory: the memory that the scheduler gave the job may be taken
    reads: SLURM_MEM_PER_NODE, SLURM_MEM_PER_CPU or SLURM_MEM_PER_GPU, against the
        limits of control groups and MemTotal of /proc/meminfo
    threshold: 90 % of it; a failure below half
    source: sbatch(1); ronde's own: firmware and kernel take a little, and
        AllowedRAMSpace of cgroup.conf may
    fix: cat /proc/self/cgroup, and memory.max of the group and those above it; ask the
        administrator about AllowedRAMSpace in cgroup.conf
    needs: an agent that Slurm started, not ssh
    why: The kernel kills ranks that take no more than was asked for.
    """,
    MEMORY,
    MEMORY_LIMIT,
    _TOTAL,
)
def _scheduler_memory(values: Values, _: Fleet) -> Iterator[Problem]:
    given, limit, total = values[MEMORY], values[MEMORY_LIMIT], values[_TOTAL]
    usable = min(limit or total, total)
    if usable < MEMORY_SHARE * given:
        whose = "the machine has" if usable == total else "its control group allows"
        yield Problem(
            f"{values[NAME]} gave the job {format_size(given)} of memory here, but "
            f"{whose} {format_size(usable)}",
            FAIL if MANY_TIMES * usable < given else WARN,
        )


@each_host(
    Family.HOST,
    WARN,
    """scheduler-time: the job has time left
    reads: SLURM_JOB_END_TIME, which Slurm wrote when the job started; later changes of
        the time limit are unknown
    threshold: 10 minutes
    source: ronde's own
    fix: squeue -j $SLURM_JOB_ID -O TimeLeft shows what is left now; ask for more by
        sbatch --time, and write checkpoints
    needs: an agent that a newer Slurm started, not ssh
    why: The job is ended before its first checkpoint.
    """,
    LEFT,
)
def _scheduler_time(values: Values, _: Fleet) -> Iterator[Problem]:
    left_s = values[LEFT]
    duration = format_duration(abs(left_s))
    if left_s < 0:
        yield Problem(f"{values[NAME]} was to end the job {duration} ago")
    elif left_s < SHORT_S:
        yield Problem(f"{values[NAME]} ends the job in {duration}")
