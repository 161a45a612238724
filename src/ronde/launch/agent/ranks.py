"""Bind, start, signal and reap one job's ranks on one host."""

import errno
import os
import resource
import select
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum, auto
from pathlib import Path
from typing import IO, cast

from ronde.errors import LaunchError, UsageError
from ronde.launch.agent.diagnostics import KernelDiagnostics, StackTaker
from ronde.launch.agent.relay import (
    ObserverProgram,
    OutputPipe,
    OutputSender,
    RankChannels,
    RemoteProgram,
    StoreRelay,
)
from ronde.launch.bootstrap import (
    LEAST_OPEN_FILES,
    explain_shortage,
    raise_open_files_limit,
    require_open_files,
)
from ronde.launch.environments import (
    base_environment,
    malloc_environment,
    own_environment,
)
from ronde.launch.network import hold_port
from ronde.launch.program import enter_directory, require_processes, resolve_program
from ronde.launch.signals import Watched
from ronde.launch.wire import messages
from ronde.processes import (
    descendants,
    end_with,
    ending_status,
    is_alive,
    is_dumping_core,
    is_fork,
    require_empty,
    signal_process,
    sweep,
)
from ronde.store.protocol import max_connections
from ronde.topology.cpu_sets import format_list

_NOTICES = "ronde.launch.agent.notices"
_LEFTOVER_POLL_S = 0.02
_FENCE_S = 20.0
_USAGE_ERRORS = frozenset(
    {errno.ENOENT, errno.ENOEXEC, errno.EACCES, errno.ENOTDIR, errno.E2BIG}
)

_FDS_PER_RANK = 4
_OTHER_FDS = 40
_NOT_STARTED = 127  # exit code of a rank that could not start, as in a shell
_LIMIT_BEFORE = resource.getrlimit(resource.RLIMIT_NOFILE)


@contextmanager
def inherited_binding(cpus: Sequence[int]) -> Generator[str]:
    """Bind this process to ``cpus`` in the block; children started there inherit it.

    Yields the reason why some CPUs cannot be used; empty if all can be used.
    """
    before, refused = os.sched_getaffinity(0), ""
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
            # The kernel ignores CPUs outside the cpuset without an error.
            if missing := set(cpus) - os.sched_getaffinity(0):
                refused = f"CPUs {format_list(missing)}: not in the cpuset"
    except OSError as error:
        refused = f"CPUs {format_list(cpus)}: {error.strerror}"
    try:
        yield refused
    finally:
        if cpus:
            os.sched_setaffinity(0, before)


class WorkerProcess:
    """A worker's process; ``is_running`` is true until the process is reaped."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        env: dict[str, str],
        sender: OutputSender,
        passed_fd: int,
    ) -> None:
        end_with_agent = end_with(os.getpid(), signal.SIGKILL)

        def before_exec() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, _LIMIT_BEFORE)
            end_with_agent()

        self.rank = rank
        self.process = subprocess.Popen(
            command,
            env=env,
            # The agent's standard input is the launcher's or empty. Reading from a
            # terminal does not stop a rank, which is in another session.
            stdin=subprocess.DEVNULL if rank else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=[passed_fd],
            # Other threads only wait for mutexes: code between fork and exec is safe.
            preexec_fn=before_exec,  # noqa: PLW1509
        )
        files = self.process.stdout, self.process.stderr
        self.pipes = [
            OutputPipe(rank, stream, cast("IO[bytes]", file), sender)
            for stream, file in zip(messages.Stream, files, strict=True)
        ]
        self.is_running, self.is_stopped = True, False
        self.began_s = 0.0  # when it began to end by itself; 0 for unknown
        self.evidence: str | None = None  # of its end, if known before it is reaped

    @property
    def pid(self) -> int:
        return self.process.pid  # also the number of its process group


def _allow_ranks(num_ranks: int) -> None:
    least = num_ranks * _FDS_PER_RANK + LEAST_OPEN_FILES
    require_open_files(least, _LIMIT_BEFORE[1], f"for {num_ranks} ranks on a host")
    raise_open_files_limit(least + max_connections(num_ranks) + _OTHER_FDS)


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


class JobPhase(Enum):
    """State of a job on one host."""

    PREPARING = auto()
    RUNNING = auto()
    STOPPING = auto()
    OVER = auto()


class LocalJob:
    """The workers of one job on this host.

    This process must be the workers' parent and adopt orphans.
    """

    def __init__(self, job: messages.NodeJob, sender: OutputSender) -> None:
        self.phase = JobPhase.PREPARING
        self._job = job
        self._is_elastic = job.max_ranks > 0
        self._max_ranks = max(len(job.workers), job.max_ranks)
        self._sender = sender
        on_death = self._note_death if self._is_elastic else None
        self.channels = RankChannels(sender, on_death)
        self._by_pid: dict[int, WorkerProcess] = {}
        self._stacks = StackTaker()
        self._kernel = KernelDiagnostics()
        self._command: list[str] = []
        self._directory = ""
        self._env: dict[str, str] = {}
        self._port: socket.socket | None = None
        self.store: StoreRelay | None = None
        self._poller: RemoteProgram | None = None
        self._observer = ObserverProgram(sender)
        self._signalled: set[tuple[int, int]] = set()  # processes, by pid and start
        self._has_spared = False  # some processes were not signalled
        self._is_orphaned = False  # a child has ended since
        self._deadline = 0.0
        self._stopped_s = 0.0
        self._stopped_by = 0
        self._is_suspended = False  # the user has suspended the job

    @property
    def _running(self) -> list[WorkerProcess]:
        return [rank for rank in self._by_pid.values() if rank.is_running]

    @property
    def due_s(self) -> float:
        due_s = min(self._stacks.due_s, self.channels.due_s, self._observer.due_s)
        if self.phase is not JobPhase.STOPPING:
            return due_s
        if self._running:
            return min(due_s, self._deadline)
        return min(self._deadline, time.monotonic() + _LEFTOVER_POLL_S)

    def watched(self) -> Watched:
        if self.store is not None:
            yield from self.store.watched()
        yield from self.channels.watched()
        if self._poller is not None:
            yield from self._poller.watched()
        yield from self._observer.watched()
        if not self._sender.is_full:
            for rank in self._by_pid.values():
                for pipe in rank.pipes:
                    if not pipe.file.closed:
                        yield pipe.file.fileno(), select.POLLIN, pipe.read

    def prepare(self, directory: Path) -> None:
        job = self._job
        own_path = own_environment().get("PATH", "")
        try:
            require_processes()
            _allow_ranks(self._max_ranks)
            if job.epoch or self._is_elastic:
                require_empty(job.job_marker, _FENCE_S)
            self._directory = enter_directory(job.cwd)
            self._command = resolve_program(job.argv, job.env.get("PATH", own_path))
            if job.address:
                self._port = hold_port(job.address, job.master_port)
            self.store = StoreRelay(directory, job.epoch, self._max_ranks, self._sender)
        except (UsageError, LaunchError, OSError) as error:
            shortage = explain_shortage(error) if isinstance(error, OSError) else ""
            self._refuse(shortage or str(error), is_usage=isinstance(error, UsageError))
            return
        self._sender.send(
            messages.Ready(self._port.getsockname()[1] if self._port else 0)
        )

    def start(self, order: messages.Start) -> None:
        if self.phase is not JobPhase.PREPARING or self.store is None:
            raise LaunchError("received Start before NodeJob, or a second Start.")
        self._env = base_environment(own_environment()) | self._job.env
        self._env |= {
            "RONDE_STORE": str(self.store.path),
            "PWD": self._directory,
            "MASTER_ADDR": order.master_addr,
            "MASTER_PORT": str(order.master_port),
        }
        try:
            for spec in self._job.workers:
                self._start_rank(spec)
        except OSError as error:
            sweep()
            reason = explain_shortage(error) or (
                f"cannot start {self._command[0]!r}: {error.strerror}."
            )
            self._refuse(reason, is_usage=error.errno in _USAGE_ERRORS)
            return
        self.phase = JobPhase.RUNNING
        for rank in self._running:
            self._sender.send(messages.Started(rank.rank, rank.pid))
        if self._job.notice:
            self._poll_for_notice()

    def _poll_for_notice(self) -> None:
        try:
            self._poller = RemoteProgram(_NOTICES, self._on_notice, *self._job.notice)
        except OSError as error:
            why = explain_shortage(error) or str(error.strerror)
            text = f"--notice: the process that polls does not start: {why}"
            self._sender.send(messages.Notice(text))

    def _on_notice(self, line: str) -> None:
        kind, _, text = line.partition(" ")
        leaving = kind == "leaving"
        self._sender.send((messages.HostLeaving if leaving else messages.Notice)(text))

    def observe(self, line: str) -> None:
        self._observer.ask(line, {rank.rank: rank.pid for rank in self._running})

    def _end_programs(self) -> None:
        if self._poller is not None:
            self._poller.kill()
        self._poller = None
        self._observer.kill()

    def start_more(self, specs: Sequence[messages.WorkerSpec]) -> None:
        if self.phase is not JobPhase.RUNNING or not self._is_elastic:
            raise LaunchError("received StartWorkers before Start, or for a plain job.")
        for spec in specs:
            try:
                rank = self._start_rank(spec)
                answer = messages.Started(rank.rank, rank.pid)
            except OSError as error:
                self._forget(spec.worker)
                why = explain_shortage(error) or f"{self._command[0]}: {error.strerror}"
                answer = messages.Exited(
                    spec.worker,
                    _NOT_STARTED,
                    time.monotonic(),
                    traceback_s=0.0,
                    stopped_s=0.0,
                    evidence=f"it did not start: {why}",
                )
            self._sender.send(answer)

    def _start_rank(self, spec: messages.WorkerSpec) -> WorkerProcess:
        env = self._env | spec.env
        env |= malloc_environment(env, self._max_ranks)
        env |= self._stacks.environment(spec.worker, env)
        kind = "elastic" if self._is_elastic else "plain"
        with ExitStack() as opened:
            channel = opened.enter_context(self.channels.open(spec.worker))
            fd = channel.fileno()
            # With its inode, since the number may be reused.
            inode = os.fstat(fd).st_ino
            env["RONDE_CHANNEL"] = f"{fd}:{inode}:{spec.worker}:{kind}"
            refused = opened.enter_context(inherited_binding(spec.cpus))
            rank = WorkerProcess(spec.worker, self._command, env, self._sender, fd)
        self._by_pid[rank.pid] = rank
        if refused:
            name = "worker" if self._is_elastic else "rank"
            text = f"{name} {spec.worker} is not bound: {refused}"
            self._sender.send(messages.Notice(text))
        return rank

    def signal_worker(self, number: int, signal_number: int) -> None:
        """Signal a worker's process group, and continue it if it is stopped."""
        for rank in self._running:
            if rank.rank == number:
                _signal_group(rank.pid, signal_number)
                if signal_number not in (signal.SIGKILL, signal.SIGSTOP):
                    _signal_group(rank.pid, signal.SIGCONT)

    def send(self, number: int) -> None:
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self._is_suspended = number == signal.SIGSTOP
        groups = {rank.pid for rank in self._running} | self._groups_left()
        for group in groups:
            _signal_group(group, number)

    def stop(self, number: int) -> None:
        if self.phase is not JobPhase.STOPPING:
            self.phase = JobPhase.STOPPING
            self._stopped_s = time.monotonic()
            self._stopped_by = number
            self._deadline = self._stopped_s + self._job.grace_s
        self._note_exits()
        if number == signal.SIGKILL:
            self._sender.discard()
            self._deadline = 0.0
            self.send(number)
        else:
            self._signal_programs()
        self.send(signal.SIGCONT)

    def _signal_programs(self) -> None:
        """Send the stop signal once to each process; to a fork after its parent ends.

        A parent's last step or checkpoint may need forks such as DataLoader's workers.
        A rank that is already exiting gets no signal, so that it keeps its exit code.
        """
        leaving = {rank.pid for rank in self._running if rank.began_s}
        below = {p.pid: p for p in descendants(os.getpid()) if not p.is_zombie}
        self._has_spared = self._is_orphaned = False
        for process in below.values():
            key = process.pid, process.started
            if process.group not in self._by_pid or key in self._signalled:
                continue
            parent = below.get(process.parent)
            if process.group in leaving or (parent and is_fork(process, parent)):
                self._has_spared = True
            else:
                self._signalled.add(key)
                signal_process(process, self._stopped_by)

    def ask_for_stacks(self, ranks: Collection[int]) -> None:
        pids = {rank.rank: rank.pid for rank in self._running}
        self._stacks.ask({n: pid for n, pid in pids.items() if not ranks or n in ranks})

    def advance(self) -> None:
        for stacks in self._stacks.collect():
            self._sender.send(stacks)
        self.channels.flush()
        is_over, is_late = not self._running, False
        if self.phase is JobPhase.STOPPING:
            is_late = time.monotonic() >= self._deadline
            if self._is_orphaned and not is_late:
                self._signal_programs()
            is_over = is_late or (is_over and not self._groups_left())
        elif self.phase is not JobPhase.RUNNING or self._is_elastic:
            return
        if is_over and (is_late or self._observer.finish()):
            self._end_programs()
            swept = sweep(on_reaped=self.note_end)
            for rank in self._by_pid.values():
                for pipe in rank.pipes:
                    pipe.drain()
                    pipe.file.close()
            self.end()
            self._sender.send_last(messages.Finished(swept.num_killed, swept.stuck))

    def note_stop(self, pid: int, *, is_stopped: bool) -> None:
        rank = self._by_pid.get(pid)
        if rank is None or not self._is_elastic or self._is_suspended:
            return
        if rank.is_stopped != is_stopped:
            rank.is_stopped = is_stopped
            self._sender.send(messages.WorkerStopped(rank.rank, is_stopped))

    def _note_death(self, number: int) -> None:
        rank = next((rank for rank in self._running if rank.rank == number), None)
        wait_status = ending_status(rank.pid) if rank else 0
        # With 0 it may have finished, or its wrapper still runs: wait for its reaping.
        if rank is None or not wait_status or self._stopped_s:
            return
        status = os.waitstatus_to_exitcode(wait_status)
        self.channels.drain(number)
        rank.evidence = self._kernel.explain(
            status, wait_status, rank.pid, self._directory
        )
        self._sender.send(messages.WorkerEnding(number, status, rank.evidence))

    def note_end(self, pid: int, wait_status: int) -> None:
        self._is_orphaned = self._has_spared
        if self._poller is not None and pid == self._poller.pid:
            self._poller.close()
            self._poller = None
            text = "--notice: the process that polls has ended"
            self._sender.send(messages.Notice(text))
        self._observer.note_end(pid)
        rank = self._by_pid.get(pid)
        if rank is None or not rank.is_running:
            return  # an adopted orphan
        rank.is_running = False
        if self._is_elastic:
            _signal_group(pid, signal.SIGKILL)
        self.channels.finish(rank.rank)
        # Popen must know: the agent has reaped it.
        status = rank.process.returncode = os.waitstatus_to_exitcode(wait_status)
        if (status or self._is_elastic) and not self._stopped_s:
            self._note_exits()
        for pipe in rank.pipes:
            pipe.drain()
        evidence = rank.evidence
        if evidence is None:
            evidence = self._kernel.explain(status, wait_status, pid, self._directory)
        began_s = rank.began_s or time.monotonic()
        traceback_s = max(pipe.traceback_s for pipe in rank.pipes)
        self._sender.send(
            messages.Exited(
                rank.rank, status, began_s, traceback_s, self._stopped_s, evidence
            )
        )
        if self._is_elastic:
            del self._by_pid[pid]
            for pipe in rank.pipes:
                pipe.file.close()
            self._forget(rank.rank)

    def _forget(self, rank: int) -> None:
        self.channels.finish(rank)
        self._stacks.forget(rank)

    def _note_exits(self) -> None:
        now_s = time.monotonic()
        by_rank = {rank.rank: rank for rank in self._by_pid.values()}
        for worker, at_s, pid in self.channels.read_exits():
            rank = by_rank.get(worker)
            if rank is None or rank.began_s:
                continue
            # A wrapper may still run after the rank's program has ended.
            if pid == rank.pid or is_alive(pid) or not rank.is_running:
                # A time namespace has its own clock.
                rank.began_s = min(at_s, now_s)
        for rank in self._running:
            if not rank.began_s and is_dumping_core(rank.pid):
                rank.began_s = now_s

    def _groups_left(self) -> set[int]:
        below = descendants(os.getpid())
        return {p.group for p in below if not p.is_zombie} & self._by_pid.keys()

    def _refuse(self, reason: str, *, is_usage: bool) -> None:
        self.end()
        self._sender.send(messages.Refused(reason, is_usage))

    def end(self) -> None:
        self.phase = JobPhase.OVER
        self._end_programs()
        self._kernel.close()
        self._stacks.close()
        self.channels.close()
        if self.store is not None:
            self.store.close()
        if self._port is not None:
            self._port.close()
