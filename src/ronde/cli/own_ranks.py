"""A command that needs several ranks starts itself so often, through the launcher."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence

from ronde.launch.arranging import Wish
from ronde.launch.boot import start_local_agent
from ronde.launch.chronicle import Chronicle
from ronde.launch.controller import Restarts
from ronde.launch.hiring import Hiring
from ronde.launch.launching import Undertaking, launch
from ronde.launch.plan import JobRequest
from ronde.launch.signals import STOPPING, caught_signals
from ronde.launch.verdict import Verdict
from ronde.render.own_ranks import OwnRanksConsole

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

    Args:
        words: What each rank is started with. Say in them that it is a rank, or it
            starts ranks of its own.
        size: Number of ranks.
        extra_env: Variables to set for all ranks.
        rank_env: Further variables of one rank, by its number.
        is_mpi: The ranks are to be able to initialise MPI, for the engine ``mpi``.

    Returns:
        The exit code of the rank that failed first by itself, else 0. Where the user
        stopped the ranks, the highest of those that they ended with by themselves.

    Raises:
        UsageError: MPI is not installed; nothing was started.
        LaunchError: The launcher itself failed.
    """
    with caught_signals() as signal_fd, start_local_agent() as agent:
        given = {} if rank_env is None else {r: rank_env(r) for r in range(size)}
        wish = Wish(
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
        hiring = Hiring(agent)
        sink = OwnRanksConsole()
        job = Undertaking(name, Restarts(), Chronicle("", sink.notice))
        return _exit_code(launch(wish, sink, hiring, signal_fd, job))


def _exit_code(verdict: Verdict) -> int:
    """Return the ranks' own code where they had the time to end by themselves."""
    statuses = [end.status for end in verdict.ended]
    is_asked = verdict.interrupted_by in STOPPING
    if not is_asked or not statuses or min(statuses) < 0:
        return verdict.exit_code
    return max(statuses)
