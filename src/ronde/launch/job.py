"""One job as a value: what runs, how often, in which environment."""

from typing import NamedTuple

from ronde.topology.machine import UNKNOWN_NODE


class RankPlan(NamedTuple):
    """What one rank has of its own.

    Attributes:
        rank: Its number among all.
        env: Its own environment variables; they win over the job's.
        cpus: Those that it may use; empty leaves it all of the agent's.
        memory_node: Where its memory is to lie, or ``UNKNOWN_NODE``.
    """

    rank: int
    env: dict[str, str]
    cpus: tuple[int, ...] = ()
    memory_node: int = UNKNOWN_NODE


class Job(NamedTuple):
    """All that one agent must know to start its ranks, but where they meet.

    Attributes:
        job_id: Name of the job, also of its directory of logs.
        epoch: Generation of the world, 0 for the first start.
        cookie: A random mark that every process of the job carries as
            ``RONDE_COOKIE``, to be known by. It is no secret: it opens nothing.
        argv: Program and arguments.
        env: Environment of all ranks, on top of what the agent itself has.
        ranks: The ranks of this agent, ascending.
        cwd: Directory the ranks start in; empty for the agent's own.
        grace_s: Seconds between the stop signal and the sweep.
        address: Numeric address that the ranks meet at, where rank 0 is here.
        master_port: Port to bind for the ranks to meet at, or 0 for any.
        is_mpi: The ranks are to be able to initialise MPI.
    """

    job_id: str
    epoch: int
    cookie: str
    argv: tuple[str, ...]
    env: dict[str, str]
    ranks: tuple[RankPlan, ...]
    cwd: str
    grace_s: float
    address: str
    master_port: int
    is_mpi: bool
