"""One job as a value: what runs, how often, in which environment."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank has of its own.

    Attributes:
        rank: Its number among all.
        env: Its own environment variables; they win over the job's.
    """

    rank: int
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Job:
    """All that one agent must know to start its ranks, but where they meet.

    Attributes:
        job_id: Name of the job, also of its directory of logs.
        epoch: Generation of the world, 0 for the first start.
        cookie: Secret that every process of the job carries as ``RONDE_COOKIE``.
        argv: Program and arguments.
        env: Environment of all ranks.
        ranks: The ranks of this agent, ascending.
        cwd: Directory the ranks start in; empty for the agent's own.
        grace_s: Seconds between the stop signal and the sweep.
        log_dir: Directory for the ranks' output, or empty.
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
    log_dir: str
    master_port: int
    is_mpi: bool = False

    @property
    def attempt_log_dir(self) -> str:
        """Directory of this epoch's files; only where there is ``log_dir``."""
        return f"{self.log_dir}/{self.job_id}/attempt_{self.epoch}"

    def rank_log_dir(self, rank: int) -> str:
        """Return the directory of one rank's files; only where there is ``log_dir``."""
        return f"{self.attempt_log_dir}/{rank}"
