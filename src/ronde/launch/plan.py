"""From what the user asked for to the job of one agent."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ronde.launch.environments import (
    JobFacts,
    NodeFacts,
    rank_environment,
    shared_environment,
)
from ronde.launch.job import Job, RankPlan
from ronde.launch.slots import count_cores
from ronde.world.value import World


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What the user asked for.

    Attributes:
        argv: Program and arguments.
        size: Number of ranks.
        environ: The user's environment.
        extra_env: Variables to set for all ranks.
        cwd: Directory to start in; empty for the present one.
        grace_s: Seconds between the stop signal and the sweep.
        log_dir: Directory for the ranks' output, or empty.
        master_port: Port to meet at, 0 for any.
        is_mpi: The ranks are to be able to initialise MPI.
    """

    argv: tuple[str, ...]
    size: int
    environ: Mapping[str, str]
    extra_env: Mapping[str, str]
    cwd: str = ""
    grace_s: float = 15.0
    log_dir: str = ""
    master_port: int = 0
    is_mpi: bool = False


def plan_job(request: JobRequest, name: str) -> Job:
    """Return the job that runs all ranks on this machine.

    Args:
        request: What the user asked for.
        name: Begins the job's id; a random end makes that unique.
    """
    facts = JobFacts(f"{name}-{os.urandom(3).hex()}", 0, os.urandom(16).hex())
    node = NodeFacts(os.uname().nodename, 0, 1)
    log_dir = str(Path(request.log_dir).absolute()) if request.log_dir else ""
    job = Job(
        job_id=facts.job_id,
        epoch=facts.epoch,
        cookie=facts.cookie,
        argv=request.argv,
        env=shared_environment(
            request.environ,
            request.extra_env,
            num_threads=max(1, count_cores() // request.size),
        ),
        ranks=(),
        cwd=request.cwd,
        grace_s=request.grace_s,
        log_dir=log_dir,
        master_port=request.master_port,
        is_mpi=request.is_mpi,
    )
    return replace(
        job,
        ranks=tuple(
            _rank(job, facts, node, rank, request.size) for rank in range(request.size)
        ),
    )


def _rank(job: Job, facts: JobFacts, node: NodeFacts, rank: int, size: int) -> RankPlan:
    world = World(rank, size, rank, size, 0, 1, (node.host,))
    error_file = f"{job.rank_log_dir(rank)}/error.json" if job.log_dir else ""
    return RankPlan(rank, rank_environment(world, facts, node, error_file=error_file))
