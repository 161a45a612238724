"""One attempt of a job: its workers, and its result."""

import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Protocol

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
    Watched,
    interrupter,
)
from ronde.launch.wire import messages

if TYPE_CHECKING:
    from ronde.launch.job.watch_programs import WatchProgram
    from ronde.status.table import WorkerInfo

_CAUSE_WITHIN_S = 5.0  # between the end of a worker that lost a peer, and the peer's
_SWEEP_S = 10.0
_STOP_SIGNALS = STOPPING | {signal.SIGKILL}
_ALL_CREDIT_BYTES = 32 << 20
_STATUS_AFTER_S = 0.5  # a shorter job does not import the status


class JobView(Protocol):
    """Callbacks for ended workers, lost hosts and other events of a job."""

    can_lose_hosts: bool  # the job may go on without one

    @property
    def ranks(self) -> Mapping[int, int]: ...  # of the members, by worker id

    @property
    def is_ending(self) -> bool: ...  # a failure ends the job soon

    def begin(self, start: messages.Start) -> None: ...

    def due_s(self) -> float: ...  # of ``on_due``, monotonic

    def on_due(self) -> None: ...

    def on_message(self, node: AgentNode, message: messages.FromAgent, /) -> bool: ...

    def on_exit(self, exited: messages.Exited) -> None: ...

    def on_loss(self, node: AgentNode, loss: HostLoss, /) -> None: ...

    def finish(self, result: JobResult) -> JobResult: ...


class RunningWorker:
    """A worker's node, pid, last error output, and exit once it has ended."""

    def __init__(self, node: AgentNode) -> None:
        self.node, self.pid, self.tail = node, 0, Tail()
        self.exited: messages.Exited | None = None


class Generation(Handler):
    """One attempt of a job; in a plain job, a worker's id is its rank."""

    def __init__(
        self,
        loop: EventLoop,
        nodes: Sequence[AgentNode],
        jobs: Sequence[messages.NodeJob],
        make_view: "Callable[[Generation], JobView]",
    ) -> None:
        super().__init__(loop)
        self.nodes = list(nodes)
        self.grace_s = jobs[0].grace_s
        self._epoch = jobs[0].epoch
        self.workers: dict[int, RunningWorker] = {}
        for node, job in zip(nodes, jobs, strict=True):
            node.ranks = frozenset(spec.worker for spec in job.workers)
            self.workers |= {spec.worker: RunningWorker(node) for spec in job.workers}
        self.survived: set[int] = set()  # workers whose end does not fail the job
        self.lost: list[LostHost] = []
        self.is_stopping = False
        self._interrupted_by: int | None = None
        self._is_killing = False
        self._finished: dict[str, messages.Finished] = {}
        self._answer_by_s = self._stacks_by_s = inf
        self._stacks: dict[int, messages.Stacks] = {}
        self._stacks_of: tuple[int, ...] = ()  # empty for all
        self._hung: list[int] = []  # to kill once their stacks are shown
        self._started_at_s = 0.0
        self._argv = jobs[0].argv
        self._has_status, self._status_by_s = False, inf
        self.watch_programs: list[WatchProgram] = []
        self._hang = ""  # the verdict on the hang that ends the job
        self._view = make_view(self)

    def run(self, address: str, port: int) -> JobResult:
        self._started_at_s = time.monotonic()
        self._loop.progress.begin("to start their ranks", self._starting)
        self._loop.store = StoreService(self._epoch)
        start = messages.Start(address, port)
        for node in self.nodes:
            node.watch(is_watched=False)
            node.limit_credit(_ALL_CREDIT_BYTES // len(self.nodes))
            node.send(start)
        self._view.begin(start)
        try:
            while not self._loop.serve(
                self, lambda: not self._unfinished(), self._due_s
            ):
                self._on_due()
        finally:
            for each in self.watch_programs:
                each.close()
        for node in self.nodes:
            node.watch(is_watched=False)
        self._report_leftovers()
        return self._view.finish(self._judge())

    def _on_due(self) -> None:
        if time.monotonic() > self._status_by_s:
            self._serve_status()
        elif time.monotonic() > self._stacks_by_s:
            self._show_stacks()
        elif not self.is_stopping:
            self._view.on_due()
        else:
            reason = HostLoss("it does not answer", EXIT_INTERNAL)
            for node in self._unfinished():
                node.transport.kill()
                self._loop.lose(self, node, reason)

    def _judge(self) -> JobResult:
        workers, rank_of = self.workers.items(), self._view.ranks
        exits = [w.exited for n, w in workers if w.exited and n not in self.survived]
        ends = [self.end_of(exited) for exited in exits]
        lost = [
            host._replace(ranks=tuple(sorted(rank_of.get(n, n) for n in host.ranks)))
            for host in self.lost
            if not self.survived >= {*host.ranks}
        ]
        return judge(ends, self._interrupted_by, lost)._replace(hang=self._hang)

    def _starting(self) -> list[str]:
        return list({w.node.name: 0 for w in self.workers.values() if not w.pid})

    def _unfinished(self) -> list[AgentNode]:
        return [n for n in self.nodes if not n.is_over and n.name not in self._finished]

    def _send(self, message: messages.ToAgent) -> None:
        for node in self._unfinished():
            node.send(message)

    def _due_s(self) -> float:
        if self._loop.is_held_back:
            # The end of a job comes after its output, which is stalled.
            self._answer_by_s = max(self._answer_by_s, time.monotonic() + _SWEEP_S)
        due_s = self._answer_by_s if self.is_stopping else self._view.due_s()
        return min(due_s, self._stacks_by_s, self._status_by_s)

    def _serve_status(self) -> None:
        if self._has_status:
            return
        from ronde.launch.job.status import StatusService

        self._has_status, self._status_by_s = True, inf
        loop = self._loop
        with suppress(OSError):  # no room for a socket: the job goes on without
            loop.status = loop.status or StatusService(loop.job_id, self._argv)
            loop.status.begin(self._epoch, self._rows, self._send)
        for each in self.watch_programs:
            if why_not := each.start(loop.status):
                loop.output.notice(f"{each.option} has no effect: {why_not}")

    def on_hang(self, verdict: str) -> None:
        if not (self.is_stopping or self._view.is_ending):
            self._hang, self._interrupted_by = verdict, TIMED_OUT
            self._loop.output.notice(verdict)
            self.stop(signal.SIGTERM)

    def watched(self) -> Watched:
        return chain.from_iterable(each.watched() for each in self.watch_programs)

    def _rows(self) -> "Iterator[WorkerInfo]":
        from ronde.status.table import WorkerInfo

        ranks = self._view.ranks
        for number, worker in self.workers.items():
            state, code = "running" if worker.pid else "starting", None
            if worker.exited is not None:
                state, code = "ended", worker.exited.status
            elif worker.node.is_over:
                state = "lost"
            rank = ranks.get(number)
            if rank is not None or state != "ended":
                known = number, rank, worker.node.name, worker.pid, state, code
                yield WorkerInfo(*known, status_age_s=0.0, status=None)

    # Hosts and workers come and go

    def add_node(self, node: AgentNode) -> None:
        self.nodes.append(node)
        self._finished.pop(node.name, None)

    def start(self, node: AgentNode, spec: messages.WorkerSpec) -> None:
        node.ranks |= {spec.worker}
        self.workers[spec.worker] = RunningWorker(node)
        self._loop.output.add_worker(spec.worker, node.name)
        node.send(messages.StartWorkers((spec,)))

    def send_text(self, workers: Collection[int], text: str) -> None:
        by_node: dict[AgentNode, list[int]] = {}
        for number in workers:
            worker = self.workers[number]
            if not worker.node.is_over and not worker.exited:
                by_node.setdefault(worker.node, []).append(number)
        for node, numbers in by_node.items():
            node.send(messages.SendToWorkers(tuple(numbers), text))

    def kill(self, worker: int) -> None:
        """Kill a worker without failing the job."""
        self.survived.add(worker)
        node = self.workers[worker].node
        if not node.is_over:
            node.send(messages.SignalWorker(worker, signal.SIGKILL))

    def kill_hung(self, workers: Collection[int]) -> None:
        self.survived.update(workers)
        self._hung += workers
        self._ask_for_stacks(workers)

    def stop(self, number: int) -> None:
        """End all workers, first with this signal, then with SIGKILL."""
        self.is_stopping = True
        self._send(messages.StopWorkers(number))
        self._answer_by_s = time.monotonic() + self.grace_s + _SWEEP_S

    # Agents

    def on_message(self, node: AgentNode, message: messages.FromAgent) -> None:
        if self._view.on_message(node, message):
            return
        match message:
            case messages.Started():
                self._worker(node, message.worker).pid = message.pid
                self._on_started()
            case messages.Exited():
                self._worker(node, message.worker).exited = message
                if not self.is_stopping:
                    self._view.on_exit(message)
                self._show_complete_stacks()
            case messages.Stacks():
                node.require_own(message.worker)
                self._stacks[message.worker] = message
                self._show_complete_stacks()
            case messages.Statuses():
                self._on_statuses(message)
            case messages.HostEnding():
                self._on_host_ending(node, message.signal)
            case messages.Finished():
                self._finished[node.name] = message
                node.watch(is_watched=False)
            case messages.Refused():
                require_accepted([(node, message)], len(self.nodes))
            case _:
                super().on_message(node, message)

    def _on_statuses(self, statuses: messages.Statuses) -> None:
        self._serve_status()
        if self._loop.status is not None:
            self._loop.status.on_statuses(statuses)

    def _on_host_ending(self, node: AgentNode, number: int) -> None:
        self._loop.stopped_by = number
        if not self.is_stopping:
            self._loop.notice(node, f"{signal_name(number)}: the job ends")
            self._interrupted_by = number
            self.stop(number)

    def _worker(self, node: AgentNode, number: int) -> RunningWorker:
        node.require_own(number)
        return self.workers[number]

    def _on_started(self) -> None:
        if all(worker.pid for worker in self.workers.values()):
            for node in self.nodes:
                node.watch(is_watched=True)
            size = len(self.workers)
            self._loop.progress.end(f"{size} of {size} ranks started")
            if not self._has_status:
                self._status_by_s = time.monotonic() + _STATUS_AFTER_S

    def on_output(self, output: messages.Output) -> None:
        if self.is_stopping and not self._is_killing:
            self._answer_by_s = max(self._answer_by_s, time.monotonic() + _SWEEP_S)
        if output.stream is messages.Stream.STDERR:
            self.workers[output.worker].tail.add(output.data)

    def on_loss(self, node: AgentNode, loss: HostLoss) -> None:
        if node in self.nodes:
            here = {n for n, worker in self.workers.items() if worker.node is node}
            workers = tuple(sorted(here - self.survived))
            at_s = node.heard_at_s - self._started_at_s
            lost = LostHost(node.name, workers, loss.reason, loss.exit_code, at_s)
            self.lost.append(lost)
        self._view.on_loss(node, loss)

    def on_fault(self, node: AgentNode, error: LaunchError) -> None:
        if node.is_over or not self._view.can_lose_hosts:
            raise error
        self._loop.lose(self, node, HostLoss(str(error), EXIT_INTERNAL))

    def _report_leftovers(self) -> None:
        for node in self.nodes:
            finished = self._finished.get(node.name, messages.Finished(0, ()))
            if finished.num_swept and not self.is_stopping:
                text = "processes that outlived their ranks were killed"
                self._loop.notice(node, f"{finished.num_swept} {text}")
            for text in finished.stuck:
                self._loop.notice(node, f"{text} survives SIGKILL and is left")

    # The user

    def on_signal(self, number: int) -> None:
        """Forward a signal or end the job; a second ending signal kills the ranks."""
        if number in FORWARDED:
            self._send(messages.Forward(number))
        elif number == ASKING:
            self._ask_for_stacks()
        elif number == TIMED_OUT:
            if not (self.is_stopping or self._view.is_ending):
                self._interrupted_by = number
                self._ask_for_stacks()
        elif number in STOPPING and not self.is_stopping:
            self._interrupt(number, number)
        elif number in STOPPING and number != signal.SIGHUP:
            # A closing terminal may send several SIGHUPs. Output is not waited for.
            self._is_killing = True
            self._send(messages.StopWorkers(signal.SIGKILL))
            self._loop.output.discard()
            self._answer_by_s = time.monotonic() + _SWEEP_S

    def on_broken_output(self, number: int) -> None:
        if not self.is_stopping:
            self._interrupted_by = number
            self._loop.is_hurried = True
            self.stop(number if number == signal.SIGHUP else signal.SIGTERM)

    def _interrupt(self, by: int, number: int) -> None:
        self._interrupted_by = by
        self._loop.is_hurried = True
        self.stop(number)
        self._loop.output.notice(
            f"{interrupter(by)}: the ranks have {self.grace_s:g} s to end; Ctrl-C "
            "kills them now"
        )

    def _ask_for_stacks(self, workers: Collection[int] = ()) -> None:
        if self._stacks_by_s == inf:
            self._stacks.clear()
            self._stacks_of = tuple(workers)
            self._stacks_by_s = time.monotonic() + ANSWER_S
            self._send(messages.TakeStacks(self._stacks_of))

    def _missing_stacks(self) -> dict[int, messages.Stacks]:
        return {
            number: messages.Stacks(number, ())
            for number, worker in self.workers.items()
            if not self._stacks_of or number in self._stacks_of
            if not (number in self._stacks or worker.exited or worker.node.is_over)
        }

    def _show_complete_stacks(self) -> None:
        if self._stacks_by_s < inf and not self._missing_stacks():
            self._show_stacks()

    def _show_stacks(self) -> None:
        self._stacks_by_s = inf
        self._loop.output.stacks([*(self._stacks | self._missing_stacks()).values()])
        if self._interrupted_by == TIMED_OUT and not self.is_stopping:
            self._interrupt(TIMED_OUT, signal.SIGTERM)
        while self._hung:
            self.kill(self._hung.pop())

    def end_of(self, exited: messages.Exited) -> RankEnd:
        number, worker = exited.worker, self.workers[exited.worker]
        rank = self._view.ranks.get(number, number)
        traceback, stopped_s = worker.tail.traceback(), exited.stopped_s
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
            rank=rank,
            host=worker.node.name,
            pid=worker.pid,
            status=exited.status,
            at_s=max(0.0, began_s - worker.node.clock_offset_s - self._started_at_s),
            was_stopped=was_stopped,
            stderr_tail=worker.tail.lines(),
            traceback=traceback,
            evidence=exited.evidence,
            was_leaving=was_leaving,
            worker=-1 if rank == number else number,
        )


class FixedView:
    """The view of a plain job: the job ends with the first failure.

    A worker that lost a peer may exit before that peer. So the other workers are
    stopped a moment later, since a stopped worker cannot show its own exit code.
    """

    can_lose_hosts = False

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._cause_by_s = inf
        self._awaited: set[int] = set()  # workers that may be the cause

    @property
    def ranks(self) -> dict[int, int]:
        return {worker: worker for worker in self._generation.workers}

    @property
    def is_ending(self) -> bool:
        return self._cause_by_s < inf

    def begin(self, start: messages.Start) -> None:
        """Do nothing: the agents start the workers of a plain job."""

    def due_s(self) -> float:
        return self._cause_by_s

    def on_due(self) -> None:
        self._generation.stop(signal.SIGTERM)

    def on_message(self, *_: object) -> bool:
        return False

    def on_exit(self, exited: messages.Exited) -> None:
        was_awaited = exited.worker in self._awaited
        self._awaited.discard(exited.worker)
        if exited.status:
            end = self._generation.end_of(exited)
            if was_awaited and not end.is_secondary:
                self._awaited.clear()
            else:
                self._awaited |= self._find_awaited(end)
            wait_s = min(self._generation.grace_s, _CAUSE_WITHIN_S)
            self._cause_by_s = min(self._cause_by_s, time.monotonic() + wait_s)
        if self.is_ending and not self._awaited:
            self._generation.stop(signal.SIGTERM)

    def _find_awaited(self, end: RankEnd) -> set[int]:
        workers = self._generation.workers
        running = {n: worker for n, worker in workers.items() if worker.exited is None}
        if end.is_secondary or end.status < 0 or end.traceback:
            return find_awaited(end, running.keys())
        # It shows no reason. A recent exception of another worker may be the cause;
        # unless it was handled, that worker ends too.
        after_s = time.monotonic() - _CAUSE_WITHIN_S
        return {
            number
            for number, worker in running.items()
            if worker.tail.written_at_s > after_s
            and (traceback := worker.tail.traceback())
            and not has_lost_peer(traceback)
        }

    def on_loss(self, *_: object) -> None:
        if not self._generation.is_stopping:
            self._generation.stop(signal.SIGTERM)

    def finish(self, result: JobResult) -> JobResult:
        return result


def require_accepted(
    answers: Sequence[tuple[AgentNode, messages.FromAgent]], num_hosts: int
) -> None:
    """Raise an error with the reasons of all agents that refused the job."""
    by_reason: dict[str, list[str]] = {}
    is_usage = True
    for node, answer in answers:
        if isinstance(answer, messages.Refused):
            by_reason.setdefault(answer.reason, []).append(node.name)
            is_usage = is_usage and answer.is_usage
    lines = [f"{', '.join(hosts)}: {reason}" for reason, hosts in by_reason.items()]
    if lines:
        lines = [*by_reason] if num_hosts == 1 else lines
        raise (UsageError if is_usage else LaunchError)("\n".join(lines))
