"""What agents are asked before ranks run, and one run of all ranks to its result."""

import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ronde.errors import LaunchError, UsageError
from ronde.launch.agent.diagnostics import ANSWER_S
from ronde.launch.hosts.node import EXIT_INTERNAL, AgentNode, HostLoss
from ronde.launch.job.event_loop import EventLoop, Handler, StoreService
from ronde.launch.job.failure import (
    JobResult,
    LostHost,
    RankEnd,
    Tail,
    find_awaited,
    has_lost_peer,
    judge,
    signal_name,
)
from ronde.launch.signals import (
    ASKING,
    FORWARDED,
    STOPPING,
    TIMED_OUT,
    InterruptedStartError,
    interrupter,
)
from ronde.launch.wire import messages
from ronde.units import counted

if TYPE_CHECKING:
    from ronde.status.table import WorkerInfo


def require_accepted(
    answers: Sequence[tuple[AgentNode, messages.FromAgent]], num_hosts: int
) -> None:
    """Raise with the reasons of all agents that refuse a job."""
    by_reason: dict[str, list[str]] = {}
    is_usage = True
    for node, answer in answers:
        if isinstance(answer, messages.Refused):
            by_reason.setdefault(answer.reason, []).append(node.name)
            is_usage = is_usage and answer.is_usage
    lines = [
        reason if num_hosts == 1 else f"{', '.join(hosts)}: {reason}"
        for reason, hosts in by_reason.items()
    ]
    if lines:
        raise (UsageError if is_usage else LaunchError)("\n".join(lines))


class Answer(NamedTuple):
    """What came of a question to one host."""

    line: str  # the program's answer; empty where there was none
    failure: str  # why there was none, in half a sentence; empty where there was one
    asked_s: float = 0.0  # when it was sent off, on the monotonic clock
    answered_s: float = 0.0  # when the answer was here


class RemotePrograms(Handler):
    """One program on each host, which answers each line with one line."""

    def __init__(
        self, loop: EventLoop, nodes: Sequence[AgentNode], module: str
    ) -> None:
        super().__init__(loop)
        self._nodes = {node.name: node for node in nodes}
        self._ended: dict[str, str] = {}
        self._waiting: dict[str, float] = {}
        self._answers: dict[str, Answer] = {}
        self._num_late: dict[str, int] = dict.fromkeys(self._nodes, 0)
        for node in nodes:
            # A host that falls silent is to be noticed, whatever its program does.
            node.watch(is_watched=True)
            node.send(messages.StartProgram(module))

    def ask(self, questions: Mapping[str, str], timeout_s: float) -> dict[str, Answer]:
        self._answers, self._waiting = {}, {}
        for name, line in questions.items():
            if name in self._ended:
                self._answers[name] = Answer("", self._ended[name])
                continue
            self._waiting[name] = time.monotonic()
            self._nodes[name].send(messages.ProgramLine(line))
        due_s = time.monotonic() + timeout_s
        self._loop.serve(self, lambda: not self._waiting, lambda: due_s)
        for name in list(self._waiting):
            self._num_late[name] += 1
            self._fail(name, f"no answer within {timeout_s:g} s")
        return {name: self._answers[name] for name in questions}

    def take(self, node: AgentNode, message: messages.FromAgent) -> None:
        name = node.name
        match message:
            case messages.ProgramLine():
                if self._num_late[name]:
                    # It belongs to a question that nobody waits for any more.
                    self._num_late[name] -= 1
                elif name in self._waiting:
                    asked_s, now_s = self._waiting.pop(name), time.monotonic()
                    self._answers[name] = Answer(message.line, "", asked_s, now_s)
            case messages.ProgramExited():
                self._end(name, message.reason)
            case messages.HostEnding():
                self._end(name, "its host ended its agent")
            case _:
                super().take(node, message)

    def _end(self, name: str, reason: str) -> None:
        self._ended[name] = reason
        self._fail(name, reason)

    def _fail(self, name: str, reason: str) -> None:
        if self._waiting.pop(name, None) is not None:
            self._answers[name] = Answer("", reason)

    def take_loss(self, node: AgentNode, loss: HostLoss) -> None:
        self._end(node.name, loss.reason)

    def take_signal(self, number: int) -> None:
        if number in STOPPING:
            raise InterruptedStartError(number)


_SWEEP_S = 10.0
_CAUSE_WITHIN_S = 5.0
"""For so long ranks are not stopped while who lost its peer has ended, and the peer has
not: stopped, it could not show with its exit code why."""
_STOP_SIGNALS = STOPPING | {signal.SIGKILL}
_ALL_CREDIT_BYTES = 32 << 20
_NEVER = float("inf")
_STATUS_AFTER_S = 0.5
"""A job that is shorter needs no status, and starts and ends without importing it."""


@dataclass(slots=True)
class RunningWorker:
    """A rank as it runs and ends."""

    node: AgentNode
    pid: int = 0
    tail: Tail = field(default_factory=Tail)
    exited: messages.Exited | None = None


class Running(Handler):
    """One run of all ranks."""

    def __init__(
        self,
        loop: EventLoop,
        nodes: Sequence[AgentNode],
        jobs: Sequence[messages.NodeJob],
    ) -> None:
        super().__init__(loop)
        self._nodes = list(nodes)
        self._grace_s = jobs[0].grace_s
        self._epoch = jobs[0].epoch
        self._ranks: dict[int, RunningWorker] = {}
        for node, job in zip(nodes, jobs, strict=True):
            node.ranks = frozenset(spec.worker for spec in job.workers)
            self._ranks |= {spec.worker: RunningWorker(node) for spec in job.workers}
        self._rank_of = {worker: worker for worker in self._ranks}
        self._finished: dict[str, messages.Finished] = {}
        self._lost: list[LostHost] = []
        self._is_stopping = False
        self._is_killing = False
        self._interrupted_by: int | None = None
        self._answer_by_s = self._cause_by_s = self._stacks_by_s = _NEVER
        self._awaited: set[int] = set()
        self._stacks: dict[int, messages.Stacks] = {}
        self._stacks_of: tuple[int, ...] = ()  # empty for all
        self._started_at_s = 0.0
        self._argv = jobs[0].argv
        self._has_status, self._status_by_s = False, _NEVER

    def run(self, address: str, port: int) -> JobResult:
        """Start all ranks; return when nothing is left of them on any host."""
        self._started_at_s = time.monotonic()
        self._loop.progress.begin("to start their ranks", self._starting)
        self._loop.store = StoreService(self._epoch)
        self._begin(messages.Start(address, port))
        while not self._loop.serve(self, lambda: not self._unfinished(), self._due_s):
            self._take_due()
        for node in self._nodes:
            node.watch(is_watched=False)
        self._report_leftovers()
        return self._judge()

    def _begin(self, start: messages.Start) -> None:
        for node in self._nodes:
            node.watch(is_watched=False)
            node.limit_credit(_ALL_CREDIT_BYTES // len(self._nodes))
            node.send(start)

    def _take_due(self) -> None:
        """Do what the time has come for."""
        if time.monotonic() > self._status_by_s:
            self._serve_status()
        elif time.monotonic() > self._stacks_by_s:
            self._show_stacks()
        elif not self._is_stopping:
            self._stop(signal.SIGTERM)
        else:
            reason = HostLoss("it does not answer", EXIT_INTERNAL)
            for node in self._unfinished():
                node.transport.kill()
                self._loop.lose(self, node, reason)

    def _judge(self) -> JobResult:
        exited = [(n, rank.exited) for n, rank in self._ranks.items() if rank.exited]
        ends = [self._end(number, exited) for number, exited in exited]
        return judge(ends, self._interrupted_by, self._lost)

    def _starting(self) -> list[str]:
        waiting = (rank.node.name for rank in self._ranks.values() if not rank.pid)
        return list(dict.fromkeys(waiting))

    def _unfinished(self) -> list[AgentNode]:
        return [
            n for n in self._nodes if not n.is_over and n.name not in self._finished
        ]

    def _send(self, message: messages.ToAgent) -> None:
        for node in self._unfinished():
            node.send(message)

    def _due_s(self) -> float:
        if self._loop.is_held_back:
            # The end of a job comes after its output, which nobody takes now.
            self._answer_by_s = max(self._answer_by_s, time.monotonic() + _SWEEP_S)
        end_by_s = self._answer_by_s if self._is_stopping else self._cause_by_s
        return min(end_by_s, self._stacks_by_s, self._status_by_s)

    def _serve_status(self) -> None:
        # Imported where it is needed: see ``_STATUS_AFTER_S``.
        from ronde.launch.job.status import StatusService

        self._has_status, self._status_by_s = True, _NEVER
        loop = self._loop
        with suppress(OSError):  # no room for a socket: the job goes on without
            loop.status = loop.status or StatusService(loop.job_id, self._argv)
            loop.status.begin(self._epoch, self._rows)

    def _rows(self) -> "Iterator[WorkerInfo]":
        """Yield all workers, but those of an elastic job that have ended and left."""
        from ronde.status.table import WorkerInfo

        for worker, each in self._ranks.items():
            state, code = "running" if each.pid else "starting", None
            if each.exited is not None:
                state, code = "ended", each.exited.status
            elif each.node.is_over:
                state = "lost"
            rank = self._rank_of.get(worker)
            if rank is not None or state != "ended":
                known = worker, rank, each.node.name, each.pid, state, code
                yield WorkerInfo(*known, status_age_s=0.0, status=None)

    def take(self, node: AgentNode, message: messages.FromAgent) -> None:
        match message:
            case messages.Started() | messages.Exited() | messages.Stacks():
                node.require_own(message.worker)
                self._take_rank(self._ranks[message.worker], message)
            case messages.Statuses():
                if not self._has_status:
                    self._serve_status()
                if self._loop.status is not None:
                    self._loop.status.take(message)
            case messages.HostEnding():
                if not self._is_stopping:
                    name = signal_name(message.signal)
                    self._loop.notice(node, f"{name}: the job ends")
                    self._interrupted_by = message.signal
                    self._stop(message.signal)
            case messages.Finished():
                self._finished[node.name] = message
                node.watch(is_watched=False)
            case messages.Refused():
                require_accepted([(node, message)], len(self._nodes))
            case _:
                super().take(node, message)

    def _take_rank(
        self,
        rank: RunningWorker,
        message: messages.Started | messages.Exited | messages.Stacks,
    ) -> None:
        match message:
            case messages.Started():
                rank.pid = message.pid
                if all(each.pid for each in self._ranks.values()):
                    self._take_start()
            case messages.Exited():
                rank.exited = message
                if not self._is_stopping:
                    self._stop_if_caused(message)
            case messages.Stacks():
                self._stacks[message.worker] = message
        if self._stacks_by_s < _NEVER and not self._unheard():
            self._show_stacks()

    def _take_start(self) -> None:
        for node in self._nodes:
            node.watch(is_watched=True)
        self._loop.progress.end(f"{counted(len(self._ranks), 'rank')} started")
        if not self._has_status:
            self._status_by_s = time.monotonic() + _STATUS_AFTER_S

    def take_output(self, output: messages.Output) -> None:
        if self._is_stopping and not self._is_killing:
            self._answer_by_s = max(self._answer_by_s, time.monotonic() + _SWEEP_S)
        if output.stream is messages.Stream.STDERR:
            self._ranks[output.worker].tail.add(output.data)

    def take_loss(self, node: AgentNode, loss: HostLoss) -> None:
        ranks = tuple(n for n, rank in self._ranks.items() if rank.node is node)
        at_s = node.heard_at_s - self._started_at_s
        self._lost.append(LostHost(node.name, ranks, loss.reason, loss.exit_code, at_s))
        if not self._is_stopping:
            self._stop(signal.SIGTERM)

    def take_signal(self, number: int) -> None:
        """Pass it on, or end the job; a second one ends it now."""
        if number in FORWARDED:
            self._send(messages.Forward(number))
        elif number == ASKING:
            self._ask_for_stacks()
        elif number == TIMED_OUT:
            if not self._is_stopping and self._cause_by_s == _NEVER:
                self._interrupted_by = number
                self._ask_for_stacks()
        elif number in STOPPING and not self._is_stopping:
            self._interrupt(number, number)
        elif number in STOPPING and number != signal.SIGHUP:
            # A terminal that closes may send several of those. No output holds the end
            # back: who asks twice does not read any more.
            self._is_killing = True
            self._send(messages.StopWorkers(signal.SIGKILL))
            self._loop.output.discard()
            self._answer_by_s = time.monotonic() + _SWEEP_S

    def _interrupt(self, by: int, number: int) -> None:
        self._interrupted_by = by
        self._loop.is_hurried = True
        self._stop(number)
        self._loop.output.notice(
            f"{interrupter(by)}: the ranks have {self._grace_s:g} s to end; Ctrl-C "
            "kills them now"
        )

    def _ask_for_stacks(self, ranks: Collection[int] = ()) -> None:
        if self._stacks_by_s == _NEVER:
            self._stacks.clear()
            self._stacks_of = tuple(ranks)
            self._stacks_by_s = time.monotonic() + ANSWER_S
            self._send(messages.TakeStacks(self._stacks_of))

    def _unheard(self) -> list[int]:
        return [
            number
            for number, rank in self._ranks.items()
            if not self._stacks_of or number in self._stacks_of
            if not (number in self._stacks or rank.exited or rank.node.is_over)
        ]

    def _show_stacks(self) -> None:
        self._stacks_by_s = _NEVER
        unheard = {number: messages.Stacks(number, ()) for number in self._unheard()}
        self._loop.output.stacks(list((self._stacks | unheard).values()))
        if self._interrupted_by == TIMED_OUT and not self._is_stopping:
            self._interrupt(TIMED_OUT, signal.SIGTERM)

    def take_broken_output(self, number: int) -> None:
        if not self._is_stopping:
            self._interrupted_by = number
            self._loop.is_hurried = True
            self._stop(number if number == signal.SIGHUP else signal.SIGTERM)

    def _stop_if_caused(self, exited: messages.Exited) -> None:
        number = exited.worker
        was_awaited = number in self._awaited
        self._awaited.discard(number)
        if exited.status:
            end = self._end(number, exited)
            if was_awaited and not end.is_secondary:
                self._awaited.clear()
            else:
                self._awaited |= self._find_awaited(end)
            limit_s = time.monotonic() + min(self._grace_s, _CAUSE_WITHIN_S)
            self._cause_by_s = min(self._cause_by_s, limit_s)
        if self._cause_by_s < _NEVER and not self._awaited:
            self._stop(signal.SIGTERM)

    def _find_awaited(self, end: RankEnd) -> set[int]:
        running = {n: rank for n, rank in self._ranks.items() if rank.exited is None}
        if end.is_secondary or end.status < 0 or end.traceback:
            return find_awaited(end, running.keys())
        # It does not say why. Another one's exception, of a moment ago, may be the
        # cause; unless it was handled, that one ends, too.
        after_s = time.monotonic() - _CAUSE_WITHIN_S
        return {
            number
            for number, rank in running.items()
            if rank.tail.written_at_s > after_s
            and (traceback := rank.tail.traceback())
            and not has_lost_peer(traceback)
        }

    def _stop(self, number: int) -> None:
        self._is_stopping = True
        self._send(messages.StopWorkers(number))
        self._answer_by_s = time.monotonic() + self._grace_s + _SWEEP_S

    def _report_leftovers(self) -> None:
        for node in self._nodes:
            finished = self._finished.get(node.name, messages.Finished(0, ()))
            if finished.num_swept and not self._is_stopping:
                count = f"{finished.num_swept} processes"
                self._loop.notice(
                    node, f"{count} that outlived their ranks were killed"
                )
            for text in finished.stuck:
                self._loop.notice(node, f"{text} survives SIGKILL and is left")

    def _end(self, number: int, exited: messages.Exited) -> RankEnd:
        rank = self._ranks[number]
        traceback, stopped_s = rank.tail.traceback(), exited.stopped_s
        began_s, was_leaving = exited.began_s, False
        if traceback and exited.status > 0 and not stopped_s:
            began_s = min(began_s, exited.traceback_s)
        is_ours = -exited.status in _STOP_SIGNALS
        was_stopped = stopped_s > 0 and (is_ours or began_s >= stopped_s)
        if was_stopped:
            first_s = min(began_s, exited.traceback_s) if traceback else began_s
            was_leaving = stopped_s - 2 * _CAUSE_WITHIN_S < first_s < stopped_s
            began_s = first_s if was_leaving else began_s
        return RankEnd(
            rank=number,
            host=rank.node.name,
            pid=rank.pid,
            status=exited.status,
            at_s=max(0.0, began_s - rank.node.clock_offset_s - self._started_at_s),
            was_stopped=was_stopped,
            stderr_tail=rank.tail.lines(),
            traceback=traceback,
            evidence=exited.evidence,
            was_leaving=was_leaving,
        )
