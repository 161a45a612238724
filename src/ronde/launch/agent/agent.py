"""The agent, which runs the ranks of one host for a controller.

The agent runs under ``python -I -S`` with the standard library alone. One thread runs
its loop; the threads of ``RankChannels`` only wait. It exchanges frames over standard
input and output. Its parent, the *reaper*, kills the processes that a dead agent left.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ronde.addresses import read_interfaces
from ronde.launch.agent.ranks import JobPhase, LocalJob
from ronde.launch.agent.relay import OutputSender, RemoteProgram, name_directory
from ronde.launch.bootstrap import explain_shortage
from ronde.launch.environments import own_environment
from ronde.launch.limits import EXIT_NO_FORK, EXIT_UNREACHABLE
from ronde.launch.network import find_answering, locate
from ronde.launch.signals import (
    InterruptedStartError,
    Watched,
    is_kept_ignored,
    notice_signals,
    serve_ready,
    signal_pipe,
)
from ronde.launch.wire import messages
from ronde.memory import nearest_limit
from ronde.processes import (
    adopt_orphans,
    children,
    die_with_parent,
    has_children,
    sweep,
)
from ronde.store.local_socket import remove
from ronde.topology.sysfs import read_machine
from ronde.world.environment import network_identity

_NUMBERS_BYTES = 4096
_NEVER = float("inf")
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WAIT_OPTIONS = os.WNOHANG | os.WUNTRACED | os.WCONTINUED


def run_reaped(
    work: Callable[[], int],
    directory: Path,
    disconnect: Callable[[], object],
    *,
    is_foreground: bool = False,
) -> NoReturn:
    """Run ``work`` in a forked child, and kill all remaining descendants afterwards.

    This works even if one of the two processes is killed: both adopt orphans, and the
    child gets SIGTERM when this process ends. If one is stopped, the other resumes it.
    The caller must have only one thread. ``disconnect`` closes the connection to the
    controller in this process.

    This function does not return. The child exits with the result of ``work``. This
    process exits with the child's exit code, with 128 plus its signal, or with
    EXIT_NO_FORK. With ``is_foreground``, SIGINT and SIGHUP also end the child, and a
    second signal kills it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Signals wait until this process passes them on.
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
            # The parent must notice this end even if it was stopped.
            if os.getppid() == parent:
                os.kill(parent, signal.SIGCONT)
            os._exit(code)
    disconnect()
    received: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        is_final = is_foreground and len(received) > 1
        os.kill(child, signal.SIGKILL if is_final else signal.SIGTERM)

    for number in (*_ENDING, signal.SIGQUIT):
        is_user = is_foreground and number in _ENDING and not is_kept_ignored(number)
        # SIGTERM means that the host ends the job: the child handles it.
        is_passed_on = is_user or number == signal.SIGTERM
        signal.signal(number, pass_on if is_passed_on else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    code = os.waitstatus_to_exitcode(_wait_for_child(child))
    sweep(spared=others)
    remove(directory)
    # Released by the head, or without it.
    if is_foreground and received and (code < 0 or code == EXIT_UNREACHABLE):
        os._exit(128 + received[-1])
    os._exit(code if code >= 0 else 128 - code)


def _wait_for_child(child: int) -> int:
    while True:
        event = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        if event is None:
            continue
        if event.si_code == os.CLD_STOPPED:
            os.waitid(os.P_PID, event.si_pid, os.WSTOPPED | os.WNOHANG)
            if event.si_pid == child:
                os.kill(child, signal.SIGCONT)
        elif event.si_pid == child:
            # Reap it after this: a signal must not reach a process that reuses its pid.
            for number in _ENDING:
                signal.signal(number, signal.SIG_IGN)
            return os.waitpid(child, 0)[1]
        else:
            os.waitpid(event.si_pid, 0)


def main(first_message_s: float = _NEVER, input_fd: int = -1) -> NoReturn:
    """Run an agent; rank 0 inherits ``input_fd`` as standard input."""
    directory = name_directory()  # the reaper removes it
    null = os.open(os.devnull, os.O_RDWR)
    input_fd = null if input_fd < 0 else input_fd

    def work() -> int:
        transport = messages.PipeTransport(os.dup(0), os.dup(1))
        os.dup2(input_fd, 0)
        os.dup2(null, 1)
        close_inputs()
        return run_agent(transport, directory, first_message_s)

    def close_inputs() -> None:
        for fd in {null, input_fd}:
            os.close(fd)

    def disconnect() -> None:
        os.closerange(0, 2)
        close_inputs()

    run_reaped(work, directory, disconnect)


def run_agent(
    transport: messages.Transport, directory: Path, first_message_s: float = _NEVER
) -> int:
    try:
        with suppress(BrokenPipeError):
            Agent(transport, directory, first_message_s).run()
    except EOFError:
        return 1
    except InterruptedStartError as error:
        return 128 + error.number
    finally:
        if has_children():
            sweep()
        remove(directory)
    return 0


class Agent:
    """Runs a controller's jobs, one after another, until the controller disconnects."""

    def __init__(
        self, transport: messages.Transport, directory: Path, first_message_s: float
    ) -> None:
        self._is_leaving = False
        self._transport = transport
        self._reader = messages.MessageDecoder((*messages.TO_AGENT, messages.Relayed))
        self._sender = OutputSender(transport.write)
        self._directory = directory
        self._job: LocalJob | None = None
        self._had_job = False  # its ranks have ended, perhaps not those of others
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
        self._sender.send(
            messages.Hello(
                protocol=messages.PROTOCOL,
                host=os.uname().nodename,
                identity=network_identity(),
                machine=read_machine(environ=own_environment()),
                interfaces=read_interfaces(),
            )
        )
        while not self._is_leaving:
            due_s = self._heard_at + self._lease_s
            if self._job is not None:
                due_s = min(due_s, self._job.due_s)
            serve_ready(self._watched(), due_s - time.monotonic())
            if time.monotonic() > self._heard_at + self._lease_s:
                self._probe_controller()
            if self._job is not None:
                self._job.advance()
                if self._job.phase is JobPhase.OVER:
                    self._job, self._had_job = None, True
            self._sender.flush()

    def _watched(self) -> Watched:
        yield self._signal_fd, select.POLLIN, self._read_signal
        yield self._transport.read_fd, select.POLLIN, self._read_control
        if self._sender.is_writing:
            yield self._transport.write_fd, select.POLLOUT, self._sender.flush
        if self._program is not None:
            yield from self._program.watched()
        if self._job is not None:
            yield from self._job.watched()

    def _probe_controller(self) -> None:
        addresses, self._controller_addresses = self._controller_addresses, ()
        if not find_answering({"": addresses}):
            raise EOFError("the controller is silent")
        self._lease_s *= 2

    def _read_control(self) -> None:
        # Twice: with the last data TLS may have read the end, which poll does not show.
        data = self._transport.read()
        more = self._transport.read() if data else None
        if data is None:
            return
        self._is_leaving = b"" in (data, more)
        self._heard_at = time.monotonic()
        for message in self._reader.feed(data + (more or b"")):
            if not isinstance(message, messages.Relayed):
                self._handle(message)
            elif self._job is not None and self._job.store is not None:
                self._job.store.deliver(message)
            # Do not count a slow step here as silence of the controller.
            self._heard_at = max(self._heard_at, time.monotonic())

    def _read_signal(self) -> None:
        if signal.SIGTERM in os.read(self._signal_fd, _NUMBERS_BYTES):
            if os.getppid() != self._reaper:
                raise EOFError("the reaper has ended")
            if self._job is None and not self._had_job:
                raise InterruptedStartError(signal.SIGTERM)
            self._sender.send(messages.HostEnding(signal.SIGTERM))
        while True:
            try:
                pid, status = os.waitpid(-1, _WAIT_OPTIONS)
            except ChildProcessError:
                return
            if not pid:
                return
            self._note_child(pid, status)

    def _note_child(self, pid: int, status: int) -> None:
        if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
            if self._job is not None:
                self._job.note_stop(pid, is_stopped=os.WIFSTOPPED(status))
        elif self._program is not None and self._program.pid == pid:
            self._program.close()
            self._program = None
            code = os.waitstatus_to_exitcode(status)
            reason = f"its program ended with exit code {code}"
            self._sender.send(messages.ProgramExited(reason))
        elif self._job is not None:
            self._job.note_end(pid, status)

    def _handle(self, order: messages.ToAgent) -> None:
        match order:
            case messages.Credit():
                self._sender.grant(order.num_bytes)
            case messages.Ping():
                self._lease_s = order.lease_s or _NEVER
                self._controller_addresses = order.addresses
                memory = nearest_limit()
                pong = messages.Pong(order.sent_at_s, time.monotonic(), *memory)
                self._sender.send(pong)
            case messages.Locate():
                sources = locate(order.addresses, order.port)
                self._sender.send(messages.Located(sources))
            case messages.StartProgram():
                self._start_program(order.module)
            case messages.ProgramLine():
                if self._program is not None:
                    self._program.write(order.line)
            case messages.NodeJob():
                if self._job is not None:
                    # The controller lost another host and starts again.
                    self._job.end()
                self._job = LocalJob(order, self._sender)
                self._job.prepare(self._directory)
            case messages.Forward(signal=signal.SIGSTOP):
                # The controller is suspended too: wait until it sends again.
                self._heard_at = _NEVER
                self._handle_for_job(order)
            case _:
                self._handle_for_job(order)

    def _start_program(self, module: str) -> None:
        try:
            self._program = RemoteProgram(
                module, lambda line: self._sender.send(messages.ProgramLine(line))
            )
        except OSError as error:
            reason = f"its program does not start: {error.strerror}"
            self._sender.send(messages.ProgramExited(reason))

    def _handle_for_job(self, order: messages.JobOrder) -> None:
        if self._job is None:
            return  # the order crossed Finished on the way
        match order:
            case messages.Start():
                self._job.start(order)
            case messages.StartWorkers():
                self._job.start_more(order.workers)
            case messages.SignalWorker():
                self._job.signal_worker(order.worker, order.signal)
            case messages.SendToWorkers():
                self._job.channels.send(order.workers, order.text)
            case messages.StopWorkers():
                self._job.stop(order.signal)
            case messages.Forward():
                self._job.send(order.signal)
            case messages.TakeStacks():
                self._job.ask_for_stacks(order.workers)
            case messages.Observe():
                self._job.observe(order.line)
