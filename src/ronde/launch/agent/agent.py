"""The agent: owns the ranks of one host and obeys its controller.

It runs under ``python -I -S`` with nothing but the standard library, has one thread
and one loop, and exchanges frames over its standard input and output. Its parent, the
*reaper*, kills what an agent that died left behind.
"""

import errno
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import NoReturn

from ronde.addresses import read_interfaces
from ronde.errors import LaunchError, UsageError
from ronde.launch import messages
from ronde.launch.agent.diagnostics import KernelDiagnostics, StackTaker
from ronde.launch.agent.ranks import RankGroup, allow_ranks, remove_directory
from ronde.launch.agent.relay import (
    OutputSender,
    RemoteProgram,
    StoreRelay,
    Watched,
    name_directory,
)
from ronde.launch.environments import own_environment
from ronde.launch.limits import EXIT_NO_FORK, explain_shortage
from ronde.launch.network import hold_port
from ronde.launch.process_tree import (
    adopt_orphans,
    children,
    die_with_parent,
    has_children,
    require_empty,
    sweep,
)
from ronde.launch.program import enter_directory, require_processes, resolve_program
from ronde.launch.signals import is_kept_ignored, notice_signals, signal_pipe
from ronde.store.local_socket import remove
from ronde.topology.sysfs import read_machine
from ronde.world.environment import network_identity

_LEFTOVER_POLL_S = 0.02
_FENCE_S = 20.0
_USAGE_ERRORS = frozenset(
    {errno.ENOENT, errno.ENOEXEC, errno.EACCES, errno.ENOTDIR, errno.E2BIG}
)
_NUMBERS_BYTES = 4096
_LOCATE_S = 2.0
_NEVER = float("inf")
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class JobPhase(Enum):
    """How far a job is."""

    PREPARING = auto()
    RUNNING = auto()
    STOPPING = auto()
    OVER = auto()


class LocalJob:
    """What an agent does for one job; it reports to the controller as it goes."""

    def __init__(self, job: messages.NodeJob, sender: OutputSender) -> None:
        self.phase = JobPhase.PREPARING
        self._job = job
        self._sender = sender
        self._stacks = StackTaker()
        self.ranks = RankGroup(self._stacks, sender)
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

    def watched(self) -> Watched:
        if self.store is not None:
            yield from self.store.watched()
        yield from self.ranks.watched()

    def prepare(self, directory: Path) -> None:
        job = self._job
        own_path = own_environment().get("PATH", "")
        try:
            require_processes()
            allow_ranks(len(job.ranks))
            if job.epoch:
                require_empty(job.job_marker, _FENCE_S)
            self._directory = enter_directory(job.cwd)
            self._command = resolve_program(job.argv, job.env.get("PATH", own_path))
            if job.address:
                self._port = hold_port(job.address, job.master_port)
            self.ranks.prepare(job)
            self.store = StoreRelay(directory, job.epoch, len(job.ranks), self._sender)
        except (UsageError, LaunchError, OSError) as error:
            shortage = explain_shortage(error) if isinstance(error, OSError) else ""
            self._refuse(shortage or str(error), is_usage=isinstance(error, UsageError))
            return
        self._sender.send(
            messages.Ready(self._port.getsockname()[1] if self._port else 0)
        )

    def start(self, order: messages.Start) -> None:
        if self.phase is not JobPhase.PREPARING or self.store is None:
            raise LaunchError("Start must come once, after NodeJob.")
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
            self._refuse(reason, is_usage=error.errno in _USAGE_ERRORS)
            return
        for complaint in self.ranks.complaints:
            self._sender.send(messages.Notice(complaint))
        self.phase = JobPhase.RUNNING
        for rank in ranks:
            self._sender.send(messages.Started(rank.rank, rank.pid))

    def call_off(self) -> None:
        if self.phase is not JobPhase.PREPARING:
            raise LaunchError("NodeJob must come while no ranks run.")
        self._end()

    def stop(self, number: int) -> None:
        if self.phase is JobPhase.PREPARING:
            self._end()
            self._sender.send(messages.Finished(0, ()))
            return
        if self.phase is JobPhase.RUNNING:
            self.phase = JobPhase.STOPPING
            self._stopped_s = time.monotonic()
            self._stopped_by = number
            self._deadline = self._stopped_s + self._job.grace_s
        if number == signal.SIGKILL:
            # Nobody waits for their output any more.
            self._sender.discard()
            self._deadline = 0.0
        self.ranks.stop(number)

    def advance(self) -> None:
        for stacks in self._stacks.take():
            self._sender.send(stacks)
        if self.phase is JobPhase.RUNNING:
            is_over = not self.ranks.is_running
        elif self.phase is JobPhase.STOPPING:
            is_late = time.monotonic() >= self._deadline
            is_over = is_late or not (self.ranks.is_running or self.ranks.groups_left())
        else:
            return
        if is_over:
            # First: MPI's holders are no leftover of the ranks.
            self.ranks.close()
            swept = sweep(on_reaped=self.note_end)
            self.ranks.close_pipes()
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
            pipe.drain()
        evidence = self._kernel.explain(status, wait_status, pid, self._directory)
        began_s = rank.began_s or time.monotonic()
        traceback_s = max(pipe.traceback_s for pipe in rank.pipes)
        self._sender.send(
            messages.Exited(
                rank.rank, status, began_s, traceback_s, self._stopped_s, evidence
            )
        )
        self.ranks.stop_rest(rank, self._stopped_by)

    def _refuse(self, reason: str, *, is_usage: bool) -> None:
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


def run_reaped(
    work: Callable[[], int],
    directory: Path,
    let_go: Callable[[], object],
    *,
    is_foreground: bool = False,
) -> NoReturn:
    """Fork; run ``work`` in the child; outlive it and sweep what it leaves.

    Both adopt orphans, so any one of the two may be killed: the child gets SIGTERM when
    this process ends, and this process kills every descendant when the child has ended.
    Who of the two is stopped is continued. Must be called from a process with one
    thread, which lets go of the connection to the controller here. Both end here, past
    the interpreter's own end: the child with what ``work`` returns, this process with
    the child's exit code, 128 plus the signal that ended it, or EXIT_NO_FORK.

    In the foreground SIGINT and SIGHUP end the child as well, and a second one at once.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # One that comes before this process passes it on waits.
    signal.pthread_sigmask(signal.SIG_SETMASK, _ENDING)
    parent, others = os.getpid(), children()
    adopt_orphans()
    try:
        child = os.fork()
    except OSError as error:
        print(explain_shortage(error) or str(error), file=sys.stderr)  # noqa: T201
        sys.exit(EXIT_NO_FORK)
    if child == 0:
        code = 1
        try:
            adopt_orphans()
            if die_with_parent(parent, signal.SIGTERM):
                code = work()
        except BaseException as error:  # noqa: BLE001 - the process's outermost line
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            # Somebody may have stopped it, and it has to see this end.
            if os.getppid() == parent:
                os.kill(parent, signal.SIGCONT)
            os._exit(code)
    let_go()
    asked: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        asked.append(number)
        is_final = is_foreground and len(asked) > 1
        os.kill(child, signal.SIGKILL if is_final else signal.SIGTERM)

    for number in (*_ENDING, signal.SIGQUIT):
        is_user = is_foreground and number in _ENDING and not is_kept_ignored(number)
        # By SIGTERM this host wants its ranks to end: the child does that.
        is_passed_on = is_user or number == signal.SIGTERM
        signal.signal(number, pass_on if is_passed_on else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    code = os.waitstatus_to_exitcode(_wait_for_child(child))
    sweep(spared=others)
    remove_directory(child)
    remove(directory)
    if is_foreground and asked and code < 0:
        os._exit(128 + asked[-1])
    os._exit(code if code >= 0 else 128 - code)


def _wait_for_child(child: int) -> int:
    look = os.WEXITED | os.WSTOPPED | os.WNOWAIT
    while True:
        news = os.waitid(os.P_ALL, 0, look)
        if news is None:
            continue
        if news.si_code == os.CLD_STOPPED:
            os.waitid(os.P_PID, news.si_pid, os.WSTOPPED | os.WNOHANG)
            if news.si_pid == child:
                os.kill(child, signal.SIGCONT)
        elif news.si_pid == child:
            # Its number is its own until it is reaped.
            for number in _ENDING:
                signal.signal(number, signal.SIG_IGN)
            return os.waitpid(child, 0)[1]
        else:
            os.waitpid(news.si_pid, 0)


def main(first_message_s: float = _NEVER) -> NoReturn:
    directory = name_directory()  # the reaper must know it as well

    def work() -> int:
        transport = messages.PipeTransport(os.dup(0), os.dup(1))
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        os.close(null)
        return run_agent(transport, directory, first_message_s)

    run_reaped(work, directory, lambda: os.closerange(0, 2))


def run_agent(
    transport: messages.Transport, directory: Path, first_message_s: float = _NEVER
) -> int:
    agent = Agent(transport, directory, first_message_s)
    with suppress(BrokenPipeError, EOFError):
        try:
            agent.run()
        finally:
            # Whatever happened: nothing outlives the agent.
            if has_children():
                sweep()
            remove(directory)
    return 0 if agent.is_leaving else 1


class Agent:
    """Runs one job after another on its host, as long as its controller is there."""

    def __init__(
        self, transport: messages.Transport, directory: Path, first_message_s: float
    ) -> None:
        self.is_leaving = False
        self._transport = transport
        self._decoder = messages.FrameDecoder()
        self._sender = OutputSender(transport.write)
        self._directory = directory
        self._job: LocalJob | None = None
        self._program: RemoteProgram | None = None
        self._lease_s = first_message_s
        self._controller_addresses: tuple[str, ...] = ()
        self._heard_at = time.monotonic()
        self._reaper = os.getppid()
        self._signal_fd, wakeup_fd = signal_pipe()
        signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
        notice_signals((signal.SIGCHLD, *_ENDING))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)

    def run(self) -> None:
        directory = ""
        with suppress(OSError):
            directory = str(Path.cwd())
        self._sender.send(
            messages.Hello(
                protocol=messages.PROTOCOL,
                host=os.uname().nodename,
                identity=network_identity(),
                pid=os.getpid(),
                directory=directory,
                machine=read_machine(environ=own_environment()),
                interfaces=read_interfaces(),
            )
        )
        while not (self.is_leaving and self._sender.is_empty):
            self._serve_ready()
            if time.monotonic() > self._heard_at + self._lease_s:
                self._doubt_controller()
            if self._job is not None:
                self._job.advance()
                if self._job.phase is JobPhase.OVER:
                    self._job = None
            self._sender.flush()

    def _serve_ready(self) -> None:
        poll, serve = select.poll(), dict[int, Callable[[], object]]()
        for fd, events, serve_fd in self._watched():
            # Over a network one descriptor is for both directions.
            if fd in serve:
                poll.modify(fd, events | select.POLLIN)
            else:
                poll.register(fd, events)
                serve[fd] = serve_fd
        due_s = self._heard_at + self._lease_s
        if self._job is not None:
            due_s = min(due_s, self._job.due_s)
        left_s = due_s - time.monotonic()
        limit_ms = None if due_s == _NEVER else max(0.0, left_s) * 1000
        for fd, _ in poll.poll(limit_ms):
            serve[fd]()

    def _watched(self) -> Watched:
        yield self._signal_fd, select.POLLIN, self._read_signal
        yield self._transport.read_fd, select.POLLIN, self._read_control
        if self._sender.is_writing:
            yield self._transport.write_fd, select.POLLOUT, self._sender.flush
        if self._program is not None:
            yield from self._program.watched()
        if self._job is not None:
            yield from self._job.watched()

    def _doubt_controller(self) -> None:
        # Imported where it is needed: most agents hear of their controller.
        from ronde.launch.network import find_answering

        addresses, self._controller_addresses = self._controller_addresses, ()
        if not find_answering({"": addresses}):
            raise EOFError("the controller is silent")
        self._lease_s *= 2

    def _read_control(self) -> None:
        data = self._transport.read()
        if data is None:
            return
        if not data:
            raise EOFError("the controller is gone")
        self._heard_at = time.monotonic()
        for frame in self._decoder.feed(data):
            if isinstance(frame, messages.Output):
                raise LaunchError("an agent takes no output.")
            if isinstance(frame, messages.Relayed):
                if self._job is not None and self._job.store is not None:
                    self._job.store.deliver(frame)
                continue
            self._obey(messages.decode_message(frame, messages.TO_AGENT))
            # What takes long here is no silence of the controller's.
            self._heard_at = max(self._heard_at, time.monotonic())

    def _read_signal(self) -> None:
        if signal.SIGTERM in os.read(self._signal_fd, _NUMBERS_BYTES):
            if os.getppid() != self._reaper:
                raise EOFError("the reaper is gone")
            if self._job is None:
                raise EOFError("there is nothing to end but this")
            self._sender.send(messages.HostEnding(signal.SIGTERM))
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if self._program is not None and self._program.pid == pid:
                self._program.close()
                self._program = None
                code = os.waitstatus_to_exitcode(status)
                reason = f"its program ended with exit code {code}"
                self._sender.send(messages.ProgramExited(reason))
            elif self._job is not None:
                self._job.note_end(pid, status)

    def _obey(self, order: messages.ToAgent) -> None:
        match order:
            case messages.Credit():
                self._sender.grant(order.num_bytes)
            case messages.Ping():
                self._lease_s = order.lease_s or _NEVER
                self._controller_addresses = order.addresses
                self._sender.send(messages.Pong(order.sent_at_s, time.monotonic()))
            case messages.Locate():
                # Imported where it is needed: not for a job on one host.
                from ronde.launch.network import locate

                sources = locate(order.addresses, order.port, _LOCATE_S)
                self._sender.send(messages.Located(sources))
            case messages.StartProgram():
                self._start_program(order.module)
            case messages.ProgramLine():
                if self._program is not None:
                    self._program.write(order.line)
            case messages.NodeJob():
                if self._job is not None:
                    # A host was lost meanwhile, and its controller tries again.
                    self._job.call_off()
                self._job = LocalJob(order, self._sender)
                self._job.prepare(self._directory)
            case messages.Leave():
                self.is_leaving = True
            case _:
                self._obey_for_job(order)

    def _start_program(self, module: str) -> None:
        try:
            self._program = RemoteProgram(module, self._sender)
        except OSError as error:
            reason = f"its program does not start: {error.strerror}"
            self._sender.send(messages.ProgramExited(reason))

    def _obey_for_job(self, order: messages.JobOrder) -> None:
        if isinstance(order, messages.Forward) and order.signal == signal.SIGSTOP:
            # The controller stops as well: its silence does not count until it sends.
            self._heard_at = _NEVER
        if self._job is None:
            # It is over: Finished has crossed the order.
            return
        match order:
            case messages.Start():
                self._job.start(order)
            case messages.StopRanks():
                self._job.stop(order.signal)
            case messages.Forward():
                self._job.ranks.send(order.signal)
            case messages.TakeStacks():
                self._job.ranks.ask_for_stacks()
