"""The controller: runs one job through an agent and says how it ended."""

import select
import signal
import subprocess
import time
from dataclasses import dataclass, field, replace

from ronde.errors import LaunchError, UsageError
from ronde.launch.agent_link import AgentLink
from ronde.launch.frames import Output, Stream
from ronde.launch.job import Job
from ronde.launch.lineage import children, sweep
from ronde.launch.messages import (
    PROTOCOL,
    Credit,
    Exited,
    Finished,
    Forward,
    FromAgent,
    Kill,
    Notice,
    Prepare,
    Ready,
    Refused,
    Start,
    Started,
    Stop,
)
from ronde.launch.signals import (
    FORWARDED,
    STOPPING,
    SUSPENDING,
    read_signals,
    suspend_self,
)
from ronde.launch.sink import Sink
from ronde.launch.tail import Tail
from ronde.launch.verdict import RankEnd, Verdict, judge, signal_name

_MASTER_ADDR = "127.0.0.1"
_MAX_BACKLOG_BYTES = 256 << 10
_CREDIT_STEP_BYTES = 32 << 10
_ANSWER_S = 60.0
_SWEEP_S = 10.0
_LAST_OUTPUT_S = 1.0


def run_job(
    job: Job, sink: Sink, agent: "subprocess.Popen[bytes]", signal_fd: int
) -> Verdict:
    """Run a job on this machine to its end, whatever that is.

    Guarantees that when it returns or raises, no process of the job is left, but those
    that the kernel does not let die, which were named. For the case that its agent is
    killed this process should adopt orphans (``lineage.adopt_orphans``).

    Args:
        job: What to run.
        sink: Gets all output.
        agent: From ``boot.start_local_agent``; ends here.
        signal_fd: From ``signals.caught_signals``: reads the user's signals.

    Raises:
        UsageError: The job cannot be started as it was asked for; nothing was started.
        LaunchError: The agent failed.
    """
    others = children() - {agent.pid}
    link = AgentLink(agent)
    is_clean = False
    try:
        verdict = Controller(job, sink, link, signal_fd).run()
        is_clean = link.wait(_SWEEP_S)
    finally:
        link.close()
        if not is_clean:
            link.wait(_SWEEP_S)
            sweep(on_reaped=_ignore, spared=others)
    sink.finished(verdict)
    is_interrupted = verdict.interrupted_by is not None
    is_read = _write_out(sink, signal_fd, is_hurried=is_interrupted)
    if verdict.exit_code == 0 and not is_read:
        return replace(verdict, exit_code=128 + signal.SIGPIPE)
    return verdict


def _ignore(_pid: int, _status: int) -> None:
    """Need no status: the agent was to report it."""


@dataclass(slots=True)
class _Rank:
    pid: int = 0
    tail: Tail = field(default_factory=Tail)
    exited: Exited | None = None


class Controller:
    """One run of one job: the messages of its agent, the signals of its user.

    Args:
        job: What to run.
        sink: Gets all output.
        link: To an agent that was told nothing yet.
        signal_fd: Reads the user's signals.
    """

    def __init__(self, job: Job, sink: Sink, link: AgentLink, signal_fd: int) -> None:
        self._job = job
        self._sink = sink
        self._link = link
        self._signal_fd = signal_fd
        self._ranks = {plan.rank: _Rank() for plan in job.ranks}
        self._host = ""
        self._owed_bytes = 0
        self._is_stopping = False
        self._interrupted_by: int | None = None
        self._finished: Finished | None = None
        self._answer_by = time.monotonic() + _ANSWER_S

    def run(self) -> Verdict:
        """Run the job; return when the agent says that nothing is left of it.

        Raises:
            UsageError: The agent refused the job.
            LaunchError: The agent failed or does not answer.
        """
        self._link.send(Prepare(PROTOCOL, self._job))
        while self._finished is None:
            timeout_s = self._due()
            for fd in _wait(
                (self._signal_fd, self._link.output_fd, self._link.error_fd),
                (self._link.input_fd, *self._sink.pending_fds),
                timeout_s,
            ):
                self._serve(fd)
            self._grant()
            if time.monotonic() > self._answer_by:
                raise LaunchError("agent must answer, but it does not. All was ended.")
        if self._finished.num_swept and not self._is_stopping:
            self._sink.notice(
                f"{self._finished.num_swept} processes that outlived their ranks "
                "were killed"
            )
        for text in self._finished.stuck:
            self._sink.notice(f"{text} does not end even when killed; it is left")
        ends = [self._end(rank) for rank in self._ranks if self._ranks[rank].exited]
        return judge(ends, self._interrupted_by)

    def _due(self) -> float | None:
        now = time.monotonic()
        if self._is_held_back():
            self._answer_by = max(self._answer_by, now + _SWEEP_S)
        times = [self._answer_by]
        tick_at = self._sink.tick(now)
        if tick_at is not None:
            times.append(tick_at)
        left_s = min(times) - now
        return None if left_s == float("inf") else max(0.0, left_s)

    def _serve(self, fd: int) -> None:
        if fd == self._signal_fd:
            for number in read_signals(fd):
                self._take_signal(number)
        elif fd == self._link.output_fd:
            self._receive()
        elif fd == self._link.error_fd:
            self._link.read_errors()
        elif fd == self._link.input_fd:
            self._link.flush()
        else:
            self._write_to(fd)

    def _write_to(self, fd: int) -> None:
        try:
            self._sink.write_to(fd)
        except BrokenPipeError:
            if not self._is_stopping:
                self._interrupted_by = signal.SIGPIPE
                self._stop(signal.SIGTERM)

    def _receive(self) -> None:
        received = self._link.receive()
        if received is None:
            while self._link.read_errors():
                if not _wait((self._link.error_fd,), (), 0.1):
                    break
            said = self._link.last_words
            raise LaunchError(
                "agent must run until the job is over, but it is gone; all its ranks "
                "were ended." + (f" It said: {said}" if said else "")
            )
        now = time.monotonic()
        for message in received:
            if isinstance(message, Output):
                self._take_output(message, now)
            else:
                self._take(message)

    def _take_output(self, output: Output, now_s: float) -> None:
        if output.stream is Stream.STDERR and output.rank in self._ranks:
            self._ranks[output.rank].tail.add(output.data)
        self._owed_bytes += len(output.data)
        if self._interrupted_by is None or not self._is_held_back():
            self._sink.output(output, now_s)

    def _is_held_back(self) -> bool:
        """Whether so much waits to be shown that the agent must wait."""
        return self._sink.backlog_bytes >= _MAX_BACKLOG_BYTES

    def _grant(self) -> None:
        """Let the agent send more, unless what it sent cannot be shown.

        A job that the user ends is not held back: what nobody reads is dropped then.
        """
        if self._owed_bytes < _CREDIT_STEP_BYTES:
            return
        if self._interrupted_by is not None or not self._is_held_back():
            self._link.send(Credit(self._owed_bytes))
            self._owed_bytes = 0

    def _take(self, message: FromAgent) -> None:
        match message:
            case Ready():
                self._host = message.host
                if not self._is_stopping:
                    self._answer_by = float("inf")
                    self._link.send(Start(_MASTER_ADDR, message.master_port))
            case Refused():
                error = UsageError if message.is_usage else LaunchError
                raise error(message.reason)
            case Started():
                self._known(message.rank).pid = message.pid
            case Exited():
                self._known(message.rank).exited = message
                if message.status != 0 and not self._is_stopping:
                    self._stop(signal.SIGTERM)
            case Notice():
                self._sink.notice(message.text)
            case Finished():
                self._finished = message

    def _known(self, rank: int) -> _Rank:
        if rank not in self._ranks:
            raise LaunchError(f"agent must speak of its own ranks, got rank {rank}.")
        return self._ranks[rank]

    def _take_signal(self, number: int) -> None:
        if number in FORWARDED:
            self._link.send(Forward(number))
        elif number == SUSPENDING:
            self._link.send(Forward(signal.SIGSTOP))
            suspend_self()
            self._link.send(Forward(signal.SIGCONT))
        elif number in STOPPING and not self._is_stopping:
            self._interrupted_by = number
            self._stop(number)
            self._sink.notice(
                f"{signal_name(number)}: the ranks have {self._job.grace_s:g} s to "
                "end; Ctrl-C kills them now"
            )
        elif number in STOPPING:
            # No credit holds the end back: who asks twice does not read any more.
            self._link.send(Kill())
            self._sink.discard()
            self._answer_by = time.monotonic() + _SWEEP_S

    def _stop(self, number: int) -> None:
        self._is_stopping = True
        self._link.send(Stop(number))
        self._answer_by = time.monotonic() + self._job.grace_s + _SWEEP_S

    def _end(self, rank: int) -> RankEnd:
        known = self._ranks[rank]
        if known.exited is None:
            raise AssertionError(f"rank {rank} did not end")
        return RankEnd(
            rank=rank,
            host=self._host,
            pid=known.pid,
            status=known.exited.status,
            at_s=known.exited.at_s,
            was_stopped=known.exited.was_stopped,
            stderr_tail=known.tail.lines(),
        )


def _wait(
    readable: tuple[int, ...],
    writable: tuple[int | None, ...],
    timeout_s: float | None,
) -> list[int]:
    """Return the descriptors that are ready; poll, since epoll refuses plain files."""
    poll = select.poll()
    for fd in readable:
        poll.register(fd, select.POLLIN)
    for fd in writable:
        if fd is not None:
            poll.register(fd, select.POLLOUT)
    timeout_ms = None if timeout_s is None else timeout_s * 1000
    return [fd for fd, _ in poll.poll(timeout_ms)]


def _write_out(sink: Sink, signal_fd: int, *, is_hurried: bool) -> bool:
    """Write what is left; a signal, or a job that was interrupted, ends the wait.

    Returns:
        False when nobody reads the standard output any more.
    """
    timeout_s = _LAST_OUTPUT_S if is_hurried else None
    is_read = True
    while sink.pending_fds:
        ready = _wait((signal_fd,), sink.pending_fds, timeout_s)
        if not ready or signal_fd in ready:
            sink.discard()
            break
        for fd in ready:
            try:
                sink.write_to(fd)
            except BrokenPipeError:
                is_read = False
    return is_read
