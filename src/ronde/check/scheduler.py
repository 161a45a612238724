"""What a scheduler gave the job on this host, and what there really is.

Schedulers write it into the environment of what they start. An agent that was started
by ssh has none of it: then there are no facts, and nothing to check.
"""

import math
import os
import re
from collections.abc import Callable, Mapping

from ronde.check.check import (
    FAIL,
    INFORM,
    WARN,
    FactReader,
    Family,
    Fleet,
    Problem,
    Problems,
    UnreadableError,
    Values,
    each_host,
)
from ronde.errors import RondeError
from ronde.launch.environments import own_environment
from ronde.launch.hosts.sources import allocated_names
from ronde.topology.machine import read_cores, read_gpus
from ronde.world.launcher_env import parse_tasks_per_node

# Facts: what was given here; only those that are known.
NAME, CPUS, GPUS = "scheduler.name", "scheduler.cpus", "scheduler.gpus"
# Facts: what ranks may use.
CORES, VISIBLE_GPUS = "scheduler.cores", "scheduler.visible_gpus"
_THREADS, _QUOTA = "host.num_cpus", "host.cpu_quota"

Environment = Mapping[str, str]


def read(reader: FactReader) -> None:
    root, environ = reader.root, own_environment()
    for name, mark, given in _SCHEDULERS:
        if mark not in environ:
            continue
        reader.values[NAME] = name
        for fact, read_given in given.items():
            with reader.reading(fact):
                try:
                    value = read_given(environ)
                except RondeError as error:
                    raise UnreadableError(str(error)) from None
                if value is not None:
                    reader.values[fact] = value
        reader.keep(CORES, lambda: len(read_cores(root)))
        reader.keep(VISIBLE_GPUS, lambda: count_visible_gpus(root, environ))
        return


def count_visible_gpus(root: str, environ: Environment) -> int:
    """Return how many GPUs ranks see that inherit an environment."""
    # Where there is none, a list of GPUs to be seen would be believed.
    return len(read_gpus(root, environ)) if read_gpus(root, {}) else 0


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


def _lsf_cpus(environ: Environment) -> int | None:
    """Return the slots on this host, of ``host1 8 host2 4``."""
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    slots = dict(zip(words[::2], words[1::2], strict=True))
    name = _own_name(tuple(slots))
    return int(slots[name]) if name else None


def _kubernetes_gpus(environ: Environment) -> int | None:
    """Return the GPUs that NVIDIA's device plugin lists, where it lists GPUs alone."""
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


def _number(environ: Environment, *names: str) -> int | None:
    """Return the first of some variables that there is."""
    for name, text in ((name, environ[name]) for name in names if name in environ):
        if not re.fullmatch(r"[0-9]{1,18}", text.strip(), re.ASCII):
            raise UnreadableError(f"{name} is no whole number: {text!r}")
        return int(text)
    return None


_Given = dict[str, Callable[[Environment], int | None]]
_SLURM = "Slurm"
_SCHEDULERS: tuple[tuple[str, str, _Given], ...] = (
    (
        _SLURM,
        "SLURM_JOB_ID",
        # Not SLURM_JOB_GPUS: steps inherit it from the first node.
        {CPUS: _slurm_cpus, GPUS: lambda e: _number(e, "SLURM_GPUS_ON_NODE")},
    ),
    # Of one chunk; this host may have several chunks of the job.
    ("PBS", "PBS_JOBID", {CPUS: lambda e: _number(e, "NCPUS", "PBS_NUM_PPN")}),
    ("LSF", "LSB_JOBID", {CPUS: _lsf_cpus}),
    # Last: the others may run inside of it.
    ("Kubernetes", "KUBERNETES_SERVICE_HOST", {GPUS: _kubernetes_gpus}),
)
"""Name, the variable that shows it, and how to read what it gave."""


def _given_here(values: Values, fact: str, what: str) -> str:
    what += "s" * (values[fact] != 1)
    return f"{values[NAME]} gave the job {values[fact]} {what} here, but "


@each_host(Family.HOST, FAIL, CPUS, CORES, _THREADS, _QUOTA)
def scheduler_cpus(values: Values, _: Fleet) -> Problems:
    """The CPUs that the scheduler gave the job may be used.

    reads: what Slurm, PBS or LSF gave; CPUs that affinity, cpuset and quota leave
    threshold: no fewer; a failure below half. Under Slurm, more cores are shown
    source: sbatch(1), srun(1), manuals of PBS and LSF; some count cores, some threads
    fix: taskset -cp $$ shows which may be used; start it by srun --cpu-bind=none, or
        ask for --cpus-per-task; scontrol show node shows what Slurm believes
    needs: an agent that the scheduler started, not ssh
    why: All ranks of the host share the few CPUs that are left to this one task.
    """
    given, threads = values[CPUS], values[_THREADS]
    usable = min(threads, values[_QUOTA] or math.inf)
    what = _given_here(values, CPUS, "CPU")
    if usable < given:
        severity = FAIL if 2 * usable < given else WARN
        yield Problem(f"{what}only {usable:g} may be used", severity)
    # Slurm counts threads on some clusters, and cores on others.
    elif values[NAME] == _SLURM and values[CORES] > given:
        what += f"{threads} may be used, which may be other jobs'"
        yield Problem(what, INFORM)


@each_host(Family.GPU, FAIL, GPUS, VISIBLE_GPUS)
def scheduler_gpus(values: Values, _: Fleet) -> Problems:
    """Ranks see the GPUs that the scheduler gave the job.

    reads: SLURM_GPUS_ON_NODE or NVIDIA_VISIBLE_DEVICES; GPUs that ranks may open
    threshold: as many; to see more is a warning
    source: srun(1): GPUs available to the step; NVIDIA's device plugin
    fix: unset CUDA_VISIBLE_DEVICES, if you have set it; ls -l /dev/nvidia*; where more
        are seen, the administrator can set ConstrainDevices in cgroup.conf
    needs: an agent that the scheduler started, not ssh, and GPUs that were asked for
    why: GPUs stand idle that are paid for; or two jobs use the same one.
    """
    given, seen = values[GPUS], values[VISIBLE_GPUS]
    what = f"{_given_here(values, GPUS, 'GPU')}ranks see {seen}"
    if seen < given:
        yield Problem(what)
    elif seen > given:
        yield Problem(f"{what}, which may be other jobs'", WARN)
