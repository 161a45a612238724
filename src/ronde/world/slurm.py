"""Slurm's variables: what ``srun`` gives the tasks of a step.

In an allocation without a step (``salloc``, a batch script) nobody is a rank yet, and
Slurm's numbers describe what could be started: they are no claim.
"""

import re
from collections.abc import Mapping

from ronde.errors import WorldError
from ronde.world.reading import Place, Reading, check_place, integer
from ronde.world.value import Launcher

_PSEUDO_STEPS = range(4294967290, 4294967293)
"""Interactive, batch and extern: shells that Slurm counts as steps, not ``srun``."""

_MAX_NODES = 1 << 20


def read_slurm(environ: Mapping[str, str]) -> Reading | None:
    """Read the step's variables; None outside a step.

    Raises:
        WorldError: They are not numbers, or not all of them can be true.
    """
    step = environ.get("SLURM_STEP_ID")
    if step is None or (step.isdecimal() and int(step) in _PSEUDO_STEPS):
        return None
    names = {
        "rank": "SLURM_PROCID",
        "size": _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "local_rank": "SLURM_LOCALID",
        "node_rank": "SLURM_NODEID",
        "num_nodes": _first(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    }
    tasks_name = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    place = Place(**{key: integer(environ, name) for key, name in names.items()})
    check_place(place, names)
    if tasks_name in environ:
        tasks = parse_tasks_per_node(environ[tasks_name], tasks_name)
        place = _place_among(place, tasks, f"{tasks_name}={environ[tasks_name]}", names)
    said = ("SLURM_STEP_ID", *names.values(), tasks_name)
    return Reading(
        launcher=Launcher.SLURM,
        place=place,
        said=tuple(f"{name}={environ[name]}" for name in said if name in environ),
        missing=tuple(
            names[key] for key in ("rank", "size") if names[key] not in environ
        ),
        job_id=f"{environ.get('SLURM_JOB_ID', '')}.{step}",
    )


def parse_tasks_per_node(text: str, name: str = "tasks per node") -> list[int]:
    """Expand Slurm's run-length form: ``4(x2),3`` is ``[4, 4, 3]``.

    Raises:
        WorldError: It is not of that form; the message calls it ``name``.
    """
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(
            r"\s*([0-9]{1,9})(?:\(x([0-9]{1,7})\))?\s*", part, re.ASCII
        )
        repeat = int(match[2] or 1) if match else 0
        if match is None or not 0 < repeat <= _MAX_NODES - len(tasks):
            raise WorldError(
                f"{name} must be counts such as 4(x2),3, got {text!r}. "
                f"Start the program with srun, which sets it."
            )
        tasks += [int(match[1])] * repeat
    return tasks


def _place_among(
    place: Place, tasks: list[int], said: str, names: Mapping[str, str]
) -> Place:
    """Complete ``place`` from the number of tasks on every node."""
    if place.size is not None and sum(tasks) != place.size:
        raise WorldError(
            f"{names['size']} must be the sum of the tasks of all nodes: {said} is "
            f"{' + '.join(map(str, tasks))} = {sum(tasks)}, got {place.size}. "
            f"Start the program with srun, which sets both."
        )
    node = 0 if len(tasks) == 1 else place.node_rank
    local_rank = place.local_rank
    if node is None or local_rank is None:
        return place
    if node >= len(tasks) or local_rank >= tasks[node]:
        raise WorldError(
            f"{names['local_rank']} must be below the tasks of node {node} in {said}, "
            f"got {local_rank}. Start the program with srun, which sets all three."
        )
    return Place(
        rank=place.rank,
        size=place.size,
        local_rank=local_rank,
        local_size=tasks[node],
        cross_rank=sum(count > local_rank for count in tasks[:node]),
        cross_size=sum(count > local_rank for count in tasks),
        node_rank=node,
        num_nodes=len(tasks),
    )


def _first(environ: Mapping[str, str], *names: str) -> str:
    """Return the first name that is set, or the last one."""
    return next((name for name in names if name in environ), names[-1])
