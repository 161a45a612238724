"""One job's ranks on one host, from the check to the sweep."""

import errno
import selectors
import signal
import socket
import time
from enum import Enum, auto
from pathlib import Path

from ronde.errors import LaunchError, UsageError
from ronde.launch import messages
from ronde.launch.agent.diagnostics import KernelDiagnostics, StackTaker
from ronde.launch.agent.ranks import RankGroup, allow_ranks
from ronde.launch.agent.relay import OutputReader, OutputSender, StoreRelay
from ronde.launch.environments import own_environment
from ronde.launch.limits import explain_shortage
from ronde.launch.placement.network import hold_port
from ronde.launch.process_tree import await_empty, sweep
from ronde.launch.program import enter_directory, require_processes, resolve_program

_LEFTOVER_POLL_S = 0.02
_FENCE_S = 20.0
_USAGE_ERRORS = frozenset(
    {errno.ENOENT, errno.ENOEXEC, errno.EACCES, errno.ENOTDIR, errno.E2BIG}
)


class JobPhase(Enum):
    """How far a job is."""

    PREPARING = auto()
    RUNNING = auto()
    STOPPING = auto()
    OVER = auto()


class LocalJob:
    """What an agent does for one job; it reports to the controller as it goes."""

    def __init__(
        self, job: messages.NodeJob, sender: OutputSender, reader: OutputReader
    ) -> None:
        self.phase = JobPhase.PREPARING
        self._job = job
        self._sender = sender
        self._reader = reader
        self._stacks = StackTaker()
        self.ranks = RankGroup(self._stacks)
        self._command: list[str] = []
        self._directory = ""
        self._port: socket.socket | None = None
        self.store: StoreRelay | None = None  # the ranks' way to the store
        self._deadline = 0.0
        self._stopped_s = 0.0
        self._stopped_by = 0
        self._kernel = KernelDiagnostics()

    @property
    def due_s(self) -> float:
        """When ``advance`` must be called at the latest, on the monotonic clock."""
        due_s = self._stacks.due_s
        if self.phase is not JobPhase.STOPPING:
            return due_s
        if self.ranks.is_running:
            return min(due_s, self._deadline)
        return min(self._deadline, time.monotonic() + _LEFTOVER_POLL_S)

    def prepare(self, directory: Path, selector: selectors.BaseSelector) -> None:
        """Check that the job can start here; send Ready or Refused."""
        job = self._job
        own_path = own_environment().get("PATH", "")
        try:
            require_processes()
            allow_ranks(len(job.ranks))
            if job.epoch:
                _fence_off(job.job_marker)
            self._directory = enter_directory(job.cwd)
            self._command = resolve_program(job.argv, job.env.get("PATH", own_path))
            if job.address:
                self._port = hold_port(job.address, job.master_port)
            self.ranks.prepare(job)
            self.store = StoreRelay(
                directory, job.epoch, len(job.ranks), selector, self._sender
            )
        except (UsageError, LaunchError, OSError) as error:
            shortage = explain_shortage(error) if isinstance(error, OSError) else ""
            self._refuse(shortage or str(error), isinstance(error, UsageError))
            return
        self._sender.send(
            messages.Ready(self._port.getsockname()[1] if self._port else 0)
        )

    def start(self, order: messages.Start) -> None:
        """Start the ranks; send Started for each, or Refused."""
        if self.phase is not JobPhase.PREPARING or self.store is None:
            raise LaunchError("Start must come once, after Prepare.")
        where = {
            "RONDE_STORE": str(self.store.path),
            # What the agent was started with may name another one.
            "PWD": self._directory,
            "MASTER_ADDR": order.master_addr,
            "MASTER_PORT": str(order.master_port),
        }
        try:
            ranks = self.ranks.start(self._job, self._command, where)
        except OSError as error:
            sweep()
            reason = explain_shortage(error) or (
                f"program must be one that can start, but {self._command[0]!r} does "
                f"not: {error.strerror}."
            )
            self._refuse(reason, error.errno in _USAGE_ERRORS)
            return
        for complaint in self.ranks.complaints:
            self._sender.send(messages.Notice(complaint))
        self.phase = JobPhase.RUNNING
        at_s = time.monotonic()
        for rank in ranks:
            self._sender.send(messages.Started(rank.rank, rank.pid, at_s))
            for pipe in rank.pipes:
                self._reader.add(pipe)

    def call_off(self) -> None:
        if self.phase is not JobPhase.PREPARING:
            raise LaunchError("Prepare must come while no ranks run.")
        self._end()

    def take_stacks(self) -> None:
        if self.phase in (JobPhase.RUNNING, JobPhase.STOPPING):
            self.ranks.ask_for_stacks()

    def stop(self, number: int) -> None:
        """Signal the ranks; what is left after the grace is killed."""
        if self.phase is JobPhase.PREPARING:
            self._end()
            self._sender.send(messages.Finished(0, ()))
            return
        if self.phase is JobPhase.RUNNING:
            self.phase = JobPhase.STOPPING
            self._stopped_s = time.monotonic()
            self._stopped_by = number
            self._deadline = self._stopped_s + self._job.grace_s
        self.ranks.stop(number)

    def kill(self) -> None:
        """End the ranks without grace; nobody waits for their output any more."""
        self._sender.discard()
        self.stop(signal.SIGKILL)
        self._deadline = 0.0

    def advance(self) -> None:
        """Send stacks that have come; end the job when its time has come."""
        for stacks in self._stacks.take():
            self._sender.send(stacks)
        if self.phase is JobPhase.RUNNING:
            is_over = not self.ranks.is_running
        elif self.phase is JobPhase.STOPPING:
            is_late = time.monotonic() >= self._deadline
            is_over = is_late or not self.ranks.has_members()
        else:
            return
        if is_over:
            # First: MPI's holders are no leftover of the ranks.
            self.ranks.close()
            swept = sweep(on_reaped=self.note_end)
            self._reader.close()
            self._end()
            self._sender.send_last(messages.Finished(swept.num_killed, swept.stuck))

    def note_end(self, pid: int, wait_status: int) -> None:
        """Send Exited for a child that was reaped, if it is a rank."""
        rank = self.ranks.find(pid)
        if rank is None:
            return
        status = rank.reaped(wait_status)
        if status and not self._stopped_s:
            self.ranks.look_for_ends()
        for pipe in rank.pipes:
            self._reader.drain(pipe)
        evidence = self._kernel.explain(status, wait_status, pid, self._directory)
        began_s = rank.began_s or time.monotonic()
        traceback_s = max(pipe.traceback_s for pipe in rank.pipes)
        self._sender.send(
            messages.Exited(
                rank.rank, status, began_s, traceback_s, self._stopped_s, evidence
            )
        )
        self.ranks.stop_rest(rank, self._stopped_by)

    def _refuse(self, reason: str, is_usage: bool) -> None:  # noqa: FBT001
        self._end()
        self._sender.send(messages.Refused(reason, is_usage))

    def _end(self) -> None:
        self.phase = JobPhase.OVER
        self._kernel.close()
        self.ranks.close()
        self._stacks.close()
        if self.store is not None:
            self.store.close()
        if self._port is not None:
            self._port.close()
            self._port = None


def _fence_off(job_marker: str) -> None:
    left = await_empty(job_marker, _FENCE_S)
    if left:
        raise LaunchError(
            "processes of the generation before must have ended, but "
            f"{', '.join(map(str, left[:8]))} run after {_FENCE_S:g} s. End them."
        )
