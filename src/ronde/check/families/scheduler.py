"""What a scheduler says that it gave the job, against what there really is."""

import math

from ronde.check.check import Check, Family, Severity
from ronde.check.families.host_judges import Grade, Values, graded
from ronde.check.probes.scheduler import (
    CORES,
    CPUS,
    GPUS,
    LEFT,
    MEMORY,
    MEMORY_LIMIT,
    NAME,
    SLURM,
    VISIBLE_GPUS,
)
from ronde.units import format_duration, format_size

MANY_TIMES = 2.0
"""So many times what there is, no way of counting explains."""

MEMORY_SHARE = 0.9
"""Of what was given: firmware and kernel take a little."""

SHORT_S = 600.0

_THREADS, _QUOTA, _TOTAL = "host.num_cpus", "host.cpu_quota", "host.memory_bytes"


def _grade_cpus(values: Values, _: Values) -> Grade | None:
    name, given, threads = values[NAME], values[CPUS], values[_THREADS]
    usable = min(threads, values[_QUOTA] or math.inf)
    told = f"{name} gave the job {_count(given, 'CPU')} here"
    if usable < given:
        what = f"{told}, but only {usable:g} may be used"
        return Grade(_severity(usable, given), what)
    # Slurm counts threads on some clusters, and cores on others.
    if name == SLURM and values[CORES] > given:
        what = f"{told}, but {threads} may be used, which may be other jobs'"
        return Grade(Severity.INFORM, what)
    return None


def _grade_gpus(values: Values, _: Values) -> Grade | None:
    given, seen = values[GPUS], values[VISIBLE_GPUS]
    told = f"{values[NAME]} gave the job {_count(given, 'GPU')} here, but ranks see "
    if seen < given:
        return Grade(Severity.FAIL, f"{told}{seen}")
    if seen > given:
        what = f"{told}{seen}, which may be other jobs'"
        return Grade(Severity.WARN, what)
    return None


def _grade_memory(values: Values, _: Values) -> Grade | None:
    given, limit, total = values[MEMORY], values[MEMORY_LIMIT], values[_TOTAL]
    there = min(limit or total, total)
    if there >= MEMORY_SHARE * given:
        return None
    whose = "the machine has" if there == total else "its control group allows"
    return Grade(
        _severity(there, given),
        f"{values[NAME]} gave the job {format_size(given)} of memory here, but {whose} "
        f"{format_size(there)}",
    )


def _grade_time(values: Values, _: Values) -> Grade | None:
    left_s = values[LEFT]
    if left_s >= SHORT_S:
        return None
    duration = format_duration(abs(left_s))
    how = f"ends the job in {duration}"
    if left_s < 0:
        how = f"was to end the job {duration} ago"
    return Grade(Severity.WARN, f"{values[NAME]} {how}")


def _severity(there: float, given: float) -> Severity:
    is_much = MANY_TIMES * there < given
    return Severity.FAIL if is_much else Severity.WARN


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


_ENVIRONMENT = "an agent that the scheduler started, not ssh"

CHECKS = (
    Check(
        id="scheduler-cpus",
        family=Family.HOST,
        title="the CPUs that the scheduler gave the job may be used",
        reads="SLURM_JOB_CPUS_PER_NODE, else SLURM_CPUS_ON_NODE; NCPUS or PBS_NUM_PPN; "
        "LSB_MCPU_HOSTS; against the CPUs that affinity, cpuset and quota leave",
        threshold="no fewer; a failure below half. Under Slurm more cores than that "
        "are told",
        source="sbatch(1) and srun(1), the manuals of PBS and LSF; a factor of two may "
        "come of counting cores here and threads there",
        severity=Severity.FAIL,
        fix="taskset -cp $$ says which may be used; start it by srun --cpu-bind=none, "
        "or ask for --cpus-per-task; scontrol show node says what Slurm believes",
        needs=_ENVIRONMENT,
        why="All ranks of the host share the few CPUs that are left to this one task.",
        facts=(CPUS, CORES, _THREADS, _QUOTA),
        judge=graded(
            "scheduler-cpus", (NAME, CPUS, CORES, _THREADS, _QUOTA), _grade_cpus
        ),
    ),
    Check(
        id="scheduler-gpus",
        family=Family.GPU,
        title="ranks see the GPUs that the scheduler gave the job",
        reads="SLURM_GPUS_ON_NODE; in Kubernetes the GPUs of NVIDIA_VISIBLE_DEVICES; "
        "against device files that may be opened, as far as CUDA_VISIBLE_DEVICES, "
        "ROCR_VISIBLE_DEVICES and the like show them",
        threshold="as many; to see more is a warning",
        source="srun(1): GPUs available to the step; NVIDIA's device plugin",
        severity=Severity.FAIL,
        fix="unset CUDA_VISIBLE_DEVICES, if you have set it; ls -l /dev/nvidia*; where "
        "more are seen, the administrator can set ConstrainDevices in cgroup.conf",
        needs=f"{_ENVIRONMENT}, and GPUs that were asked for",
        why="GPUs stand idle that are paid for; or two jobs use the same one.",
        facts=(GPUS, VISIBLE_GPUS),
        judge=graded("scheduler-gpus", (NAME, GPUS, VISIBLE_GPUS), _grade_gpus),
    ),
    Check(
        id="scheduler-memory",
        family=Family.HOST,
        title="the memory that the scheduler gave the job may be taken",
        reads="SLURM_MEM_PER_NODE, SLURM_MEM_PER_CPU or SLURM_MEM_PER_GPU, against the "
        "limits of control groups and MemTotal of /proc/meminfo",
        threshold="90 % of it; a failure below half",
        source="sbatch(1); ronde's own: firmware and kernel take a little, and "
        "AllowedRAMSpace of cgroup.conf may",
        severity=Severity.FAIL,
        fix="cat /proc/self/cgroup, and memory.max of the group and those above it; "
        "ask the administrator about AllowedRAMSpace in cgroup.conf",
        needs=f"{_ENVIRONMENT}: Slurm alone tells it",
        why="The kernel kills ranks that take no more than was asked for.",
        facts=(MEMORY, MEMORY_LIMIT, _TOTAL),
        judge=graded(
            "scheduler-memory", (NAME, MEMORY, MEMORY_LIMIT, _TOTAL), _grade_memory
        ),
    ),
    Check(
        id="scheduler-time",
        family=Family.HOST,
        title="the job has time left",
        reads="SLURM_JOB_END_TIME, which Slurm wrote when the job started; it is not "
        "asked whether that has changed since",
        threshold="10 minutes",
        source="ronde's own",
        severity=Severity.WARN,
        fix="squeue -j $SLURM_JOB_ID -O TimeLeft says what is left now; ask for more "
        "by sbatch --time, and write checkpoints",
        needs=f"{_ENVIRONMENT}: newer versions of Slurm alone tell it",
        why="The job is ended before its first checkpoint.",
        facts=(LEFT,),
        judge=graded("scheduler-time", (NAME, LEFT), _grade_time),
    ),
)
