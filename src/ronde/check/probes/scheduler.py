"""What a scheduler says that it gave the job on this host, and what there really is.

Schedulers say it in the environment of what they start. An agent that was started by
ssh has none of it: then there are no facts, and nothing to check.
"""

import os
import re
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ronde.check.facts import Reading, UnreadableError, Value
from ronde.errors import RondeError
from ronde.launch.hosts.slurm import allocated_names
from ronde.launch.inherited import own_environment
from ronde.topology.kernel_files import read_number
from ronde.topology.machine import list_groups, read_cores, read_gpus
from ronde.world.slurm import parse_tasks_per_node

NAME = "scheduler.name"
CPUS = "scheduler.cpus"
GPUS = "scheduler.gpus"
MEMORY = "scheduler.memory_bytes"
LEFT = "scheduler.left_s"
"""Facts: what was given here, and for how long still; only those that are told."""

CORES = "scheduler.cores"
"""Fact: physical cores that may be used here."""

VISIBLE_GPUS = "scheduler.visible_gpus"
"""Fact: GPUs that a rank would see here."""

MEMORY_LIMIT = "scheduler.memory_limit_bytes"
"""Fact: what control groups allow; 0 for no limit."""

SLURM = "Slurm"

_UNLIMITED_BYTES = 1 << 60
_MIB = 1 << 20

Environment = Mapping[str, str]
_Tell = Callable[[Environment], Value | None]
"""Returns a fact; None where it is not told."""


class _Scheduler(NamedTuple):
    """One kind: its name, the variable that gives it away, and what it tells."""

    name: str
    mark: str
    tells: Mapping[str, _Tell]


def read(reading: Reading) -> None:
    """Take down what was given, and what there is of that."""
    root = str(reading.settings.get("root", "/")).rstrip("/")
    environ = own_environment()
    scheduler = next((each for each in _SCHEDULERS if each.mark in environ), None)
    if scheduler is None:
        return
    reading.values[NAME] = scheduler.name
    for fact, tell in scheduler.tells.items():
        with reading.reading(fact):
            given = _ask(tell, environ)
            if given is not None:
                reading.values[fact] = given
    reading.keep(CORES, lambda: len(read_cores(root)))
    reading.keep(VISIBLE_GPUS, lambda: count_visible_gpus(root, environ))
    reading.keep(MEMORY_LIMIT, lambda: read_memory_limit(root))


def _ask(tell: _Tell, environ: Environment) -> Value | None:
    try:
        return tell(environ)
    except RondeError as error:
        raise UnreadableError(str(error)) from None


def count_visible_gpus(root: str, environ: Environment) -> int:
    """Return how many GPUs ranks see that inherit an environment.

    Args:
        root: Where ``proc``, ``sys`` and ``dev`` are; empty for this machine.
        environ: The environment.
    """
    # Where there is none, a list of GPUs to be seen would be believed.
    return len(read_gpus(root, environ)) if read_gpus(root, {}) else 0


def read_memory_limit(root: str) -> int:
    """Return the tightest limit of this process's control groups, 0 for none.

    Args:
        root: Where ``proc`` and ``sys`` are; empty for this machine.
    """
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
    # What Slurm starts on a node is told which one it is.
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


_SCHEDULERS = (
    _Scheduler(
        SLURM,
        "SLURM_JOB_ID",
        {
            CPUS: _slurm_cpus,
            GPUS: _slurm_gpus,
            MEMORY: _slurm_memory,
            LEFT: _slurm_left,
        },
    ),
    _Scheduler("PBS", "PBS_JOBID", {CPUS: _pbs_cpus}),
    _Scheduler("LSF", "LSB_JOBID", {CPUS: _lsf_cpus}),
    # Last: the others may run inside of it.
    _Scheduler("Kubernetes", "KUBERNETES_SERVICE_HOST", {GPUS: _kubernetes_gpus}),
)
