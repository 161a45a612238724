"""A command that needs several ranks starts itself so often, through the launcher."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence

from ronde.launch.agent_start.bootstrap import start_local_agent
from ronde.launch.agent_start.starter import AgentStarter
from ronde.launch.controller.controller import Restarts
from ronde.launch.controller.launch import JobOptions, JobSpec, launch
from ronde.launch.controller.plan import JobRequest
from ronde.launch.failure import JobResult
from ronde.launch.output.files import JobRecords
from ronde.launch.signals import STOPPING, caught_signals
from ronde.render.console import OwnRanksConsole

_GRACE_S = 10.0

RankEnvironment = Callable[[int], Mapping[str, str]]


def run_own_ranks(
    words: Sequence[str],
    size: int,
    *,
    extra_env: Mapping[str, str] | None = None,
    rank_env: RankEnvironment | None = None,
    is_mpi: bool = False,
) -> int:
    """Start ``python -m ronde WORDS`` once a rank on this machine; wait for the end.

    The ranks' output is shown without prefixes, so one rank should print. Ctrl-C and
    SIGTERM go to all ranks, which have 10 s to end as they like.

    Returns:
        The exit code of the rank that failed first by itself, else 0. Where the user
        stopped the ranks, the highest of those that they ended with by themselves.
    """
    with caught_signals() as signal_fd, start_local_agent() as agent:
        given = {} if rank_env is None else {r: rank_env(r) for r in range(size)}
        spec = JobSpec(
            JobRequest(
                argv=(sys.executable, "-m", "ronde", *words),
                env=dict(extra_env or {}),
                rank_env=given,
                grace_s=_GRACE_S,
                is_mpi=is_mpi,
            ),
            num_ranks=size,
        )
        name = time.strftime("%Y%m%d-%H%M%S")
        starter = AgentStarter(agent)
        sink = OwnRanksConsole()
        job = JobOptions(name, Restarts(), JobRecords("", sink.notice))
        return _exit_code(launch(spec, sink, starter, signal_fd, job))


def _exit_code(result: JobResult) -> int:
    """Return the ranks' own code where they had the time to end by themselves."""
    statuses = [end.status for end in result.ended]
    is_asked = result.interrupted_by in STOPPING
    if not is_asked or not statuses or min(statuses) < 0:
        return result.exit_code
    return max(statuses)
