"""All ranks of one agent: started together, signalled together, reaped one by one."""

import os
import signal
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

from ronde.launch.affinity import inherited_binding
from ronde.launch.environments import malloc_environment
from ronde.launch.forwarded import base_environment
from ronde.launch.inherited import own_environment
from ronde.launch.job import Job
from ronde.launch.lineage import descendants, is_dumping_core
from ronde.launch.mpi_world import MpiWorld
from ronde.launch.rank_process import RankProcess, start_rank
from ronde.launch.stacks import StackTaker

_NOTICES_BYTES = 64 << 10


class RankGroup:
    """The ranks of one agent, which must be their parent and adopt orphans.

    Args:
        stacks: Is to take their stacks.
    """

    def __init__(self, stacks: StackTaker) -> None:
        self._by_pid: dict[int, RankProcess] = {}
        self._mpi: MpiWorld | None = None
        self._notices = -1
        self._spared: set[int] = set()
        self._stacks = stacks
        self.complaints: list[str] = []
        """What of the ranks' binding the kernel refused."""

    @property
    def is_running(self) -> bool:
        """Whether any rank has not ended."""
        return any(rank.is_running for rank in self._by_pid.values())

    def prepare(self, job: Job) -> None:
        """Start what the ranks of the job need before them.

        Raises:
            UsageError: They are to use MPI and there is none.
            LaunchError: MPI does not start.
        """
        if job.is_mpi:
            self._mpi = MpiWorld(len(job.ranks), _environment(job))

    def start(
        self,
        job: Job,
        command: Sequence[str],
        whereabouts: dict[str, str],
    ) -> list[RankProcess]:
        """Start all ranks of the job.

        Args:
            job: Whose ranks.
            command: Path and arguments.
            whereabouts: Environment variables that say where the ranks are and meet.

        Raises:
            OSError: One could not be started; those before it are running.
        """
        base = _environment(job) | whereabouts
        self._notices, notices = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        inode = os.fstat(notices).st_ino
        try:
            for plan in job.ranks:
                env = base | plan.env
                env |= malloc_environment(env, len(job.ranks))
                env |= self._stacks.environment(plan.rank, env)
                env["RONDE_EXIT_PIPE"] = f"{notices}:{inode}:{plan.rank}"
                if self._mpi is not None:
                    env |= self._mpi.environment(plan.rank)
                with inherited_binding(plan.cpus, plan.memory_node) as refused:
                    rank = start_rank(plan.rank, command, env, inherited_fds=[notices])
                self._by_pid[rank.pid] = rank
                if refused:
                    self.complaints.append(f"rank {plan.rank} is not bound: {refused}")
        finally:
            os.close(notices)
        return list(self._by_pid.values())

    def ask_for_stacks(self) -> None:
        """Ask all ranks that run where they are."""
        ranks = self._by_pid.values()
        self._stacks.ask({rank.rank: rank.pid for rank in ranks if rank.is_running})

    def close(self) -> None:
        """End what ``prepare`` started; the ranks need it no more."""
        if self._mpi is not None:
            self._mpi.close()
            self._mpi = None
        if self._notices >= 0:
            os.close(self._notices)
            self._notices = -1

    def look_for_ends(self) -> None:
        """Take note of ranks that have begun to end and are not reaped yet.

        They say so themselves (``world.exit_notice``), or dump core.
        """
        now_s = time.monotonic()
        by_rank = {rank.rank: rank for rank in self._by_pid.values()}
        with suppress(BlockingIOError):
            for line in os.read(self._notices, _NOTICES_BYTES).splitlines():
                # Whoever has the pipe may write anything.
                with suppress(ValueError, KeyError):
                    number, at_s, pid = line.split()
                    # What is in a time namespace has a clock of its own.
                    by_rank[int(number)].noticed(min(float(at_s), now_s), int(pid))
        for rank in by_rank.values():
            if rank.is_running and not rank.began_s and is_dumping_core(rank.pid):
                rank.began_s = now_s

    def find(self, pid: int) -> RankProcess | None:
        """Return the rank that was this child; None for an adopted orphan.

        One that was reaped already is not looked for: its number may be an orphan's.
        """
        rank = self._by_pid.get(pid)
        return rank if rank is not None and rank.is_running else None

    def send(self, number: int, spared: Collection[int] = ()) -> None:
        """Signal every process group of a rank that has members left, but the spared.

        A rank that has ended is no reason to forget what it left in its group: while a
        member lives, the kernel gives the group's number to nobody else.
        """
        groups = {pid for pid, rank in self._by_pid.items() if rank.is_running}
        for group in (groups | self._groups_left()).difference(spared):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def stop(self, number: int) -> None:
        """Signal every group, and wake what is stopped so that it takes notice.

        A rank that ends by itself already may do so, for its exit code; SIGKILL spares
        none. What it leaves in its group is signalled after its end: ``stop_rest``.
        """
        self.look_for_ends()
        if number != signal.SIGKILL:
            ranks = self._by_pid.values()
            self._spared = {r.pid for r in ranks if r.is_running and r.began_s}
        self.send(number, self._spared if number != signal.SIGKILL else ())
        self.send(signal.SIGCONT)

    def stop_rest(self, rank: RankProcess, number: int) -> None:
        """Signal what a rank that was spared left in its group."""
        if rank.pid in self._spared and rank.pid in self._groups_left():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, number)

    def has_members(self) -> bool:
        """Whether any process is left in the process group of any rank."""
        return self.is_running or bool(self._groups_left())

    def _groups_left(self) -> set[int]:
        below = descendants(os.getpid())
        return {p.group for p in below if not p.is_zombie} & self._by_pid.keys()


def _environment(job: Job) -> dict[str, str]:
    """Return what all ranks of a job have here."""
    return base_environment(own_environment()) | job.env
