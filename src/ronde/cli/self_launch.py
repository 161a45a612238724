"""A command that needs several ranks starts itself once for each, by the launcher."""

import sys
from collections.abc import Mapping, Sequence

from ronde.launch.agent_start.bootstrap import start_local_agent
from ronde.launch.agent_start.starter import AgentStarter
from ronde.launch.controller import JobSpec, launch
from ronde.launch.signals import STOPPING, caught_signals
from ronde.render.console import SelfLaunchConsole

_GRACE_S = 10.0


def run_self(
    words: Sequence[str],
    size: int,
    *,
    env: Mapping[str, str] | None = None,
    rank_env: Mapping[int, Mapping[str, str]] | None = None,
    is_mpi: bool = False,
) -> int:
    """Start ``python -m ronde WORDS`` once per rank on this machine; wait for the end.

    Ctrl-C and SIGTERM go to all ranks, which have 10 s to end. Returns the exit code of
    the rank that failed first, else 0; after Ctrl-C the highest of all.
    """
    with caught_signals() as signal_fd, start_local_agent() as agent:
        spec = JobSpec(
            argv=(sys.executable, "-m", "ronde", *words),
            env=dict(env or {}),
            rank_env=dict(rank_env or {}),
            grace_s=_GRACE_S,
            is_mpi=is_mpi,
            num_ranks=size,
        )
        sink = SelfLaunchConsole()
        result = launch(spec, AgentStarter(agent), signal_fd, sink)
    statuses = [end.status for end in result.ended]
    is_asked = result.interrupted_by in STOPPING
    if not is_asked or not statuses or min(statuses) < 0:
        return result.exit_code
    return max(statuses)
