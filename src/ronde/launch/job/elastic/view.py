"""Run the policy of ``ronde.membership`` for an elastic job."""

import secrets
import signal
import time
from collections.abc import Callable, Collection, Sequence
from math import inf

from ronde.errors import HostError
from ronde.launch.elastic_options import ElasticOptions
from ronde.launch.host import Host
from ronde.launch.hosts.discovery import open_discovery
from ronde.launch.hosts.node import AgentNode, HostLoss
from ronde.launch.job.elastic.hosts import JobHosts
from ronde.launch.job.event_loop import EventLoop
from ronde.launch.job.failure import JobResult, ViewRecord, signal_name
from ronde.launch.job.generation import Generation
from ronde.launch.job.plan import JobPlan
from ronde.launch.wire import messages
from ronde.membership import events, view
from ronde.membership.policy import Membership, Rules, ViewPhase, name_worker
from ronde.units import counted, format_duration, list_first

_TOGETHER_S = 1.0
_SAVE_EVERY_S = 10.0
_STOPPED_S = 1.5  # a worker that is stopped for longer is lost


def _rules_of(options: ElasticOptions) -> Rules:
    return Rules(
        min_ranks=options.min_ranks,
        max_ranks=options.max_ranks,
        spares=options.spares,
        is_host_domain=options.failure_domain == "host",
        awaits_joining=options.awaits_joining,
        cooldown_s=options.cooldown_s,
        formation_s=options.elastic_timeout_s,
        settle_s=options.reform_timeout_s,
        reset_limit=options.reset_limit,
    )


class ElasticView:
    """Feeds events to ``membership.policy``, and executes its orders."""

    can_lose_hosts = True
    is_ending = False

    def __init__(
        self, generation: Generation, loop: EventLoop, plan: JobPlan, hosts: JobHosts
    ) -> None:
        options = plan.spec.elastic
        if options is None:
            raise AssertionError("ElasticView needs the options of an elastic job")
        self._generation, self._loop = generation, loop
        self._plan, self._hosts = plan, hosts
        now_s = time.monotonic()
        self._discovery = open_discovery(options, plan.spec.hosts, now_s)
        self._server, self._seen = loop.join_server, -1  # version of its list of nodes
        self._membership = Membership(_rules_of(options), lambda: secrets.token_hex(16))
        self._stopped_s: dict[int, float] = {}  # when stopped workers are lost
        self._releasing: set[str] = set()
        self._notices = HostNotices(
            options.min_ranks,
            loop.output.notice,
            lambda of: self._tell((of.members[0].id,), view.Save(of.view)),
        )
        self._stop: events.Stop | None = None  # of a job that cannot go on
        self._log = ViewLog(now_s)

    @property
    def ranks(self) -> dict[int, int]:
        return self._membership.ranks

    def begin(self, start: messages.Start) -> None:
        self._hosts.start = start
        self._hosts.plan_workers(self._membership.rules.max_ranks)
        nodes = self._generation.nodes
        # Report these before the known hosts, to which connections are then made.
        for node in nodes:
            node.watch(is_watched=True)
            self._on_ready(node)
        self._on_hosts(self._plan.spec.hosts or (nodes[0].host,))

    def _on_hosts(self, hosts: Sequence[Host]) -> None:
        self._hosts.known = {host.name: host for host in hosts}
        for node in self._generation.nodes:
            self._hosts.widen(node)
        self._apply(events.HostsFound({host.name: host.slots for host in hosts}))

    def _on_ready(self, node: AgentNode) -> None:
        num_slots = len(self._hosts.shares[node.name].resources)
        self._apply(events.HostReady(node.name, num_slots))

    # Agents

    def on_message(self, node: AgentNode, message: messages.FromAgent) -> bool:
        if self._hosts.owns(node):
            self._on_new(node, self._hosts.on_message(node, message))
            return True
        match message:
            case messages.WorkerTexts():
                for worker, text in message.texts:
                    node.require_own(worker)
                    self._on_report(worker, view.decode_text(text, view.FROM_RANK))
            case messages.WorkerStopped():
                node.require_own(message.worker)
                due_s = time.monotonic() + _STOPPED_S if message.is_stopped else inf
                self._stopped_s[message.worker] = due_s
            case messages.WorkerEnding():
                node.require_own(message.worker)
                if message.worker in self._membership.ranks:  # no rank waits for others
                    how = describe_end(message.status, message.evidence)
                    lost = events.WorkerLost(message.worker, message.status, how)
                    self._apply(lost._replace(has_ended=False))
            case messages.HostLeaving():
                self._notices.add(node, message.reason, time.monotonic())
            case messages.HostEnding() if self._has_others(node):
                reason = f"{node.name} ends by {signal_name(message.signal)}"
                self._leave(events.HostLeaves(node.name, reason))
            case messages.Finished() if node.name in self._releasing:
                self._releasing.remove(node.name)
                self._generation.nodes.remove(node)
                node.close()
            case _:
                return False
        return True

    def _has_others(self, node: AgentNode) -> bool:
        others = (n for n in self._generation.nodes if n is not node)
        return not self._generation.is_stopping and any(not n.is_over for n in others)

    def _on_new(self, node: AgentNode, problem: str | None) -> None:
        if problem == "" and not self._generation.is_stopping:
            self._generation.add_node(node)
            self._on_ready(node)
        elif problem:
            self._hosts.forget(node)
            self._loop.nodes.remove(node)
            node.close()
            self._give_up(node.name, problem)

    def _on_report(self, worker: int, message: view.FromRank) -> None:
        is_new = isinstance(message, view.Settled) and message.view == view.NO_VIEW
        is_current = is_new or message.view == self._membership.view.view
        if self._generation.is_stopping or not is_current:
            return
        if isinstance(message, view.Entered):
            if line := self._log.enter(worker, message.step):
                self._loop.output.notice(line)
            return
        is_settled = isinstance(message, view.Settled)
        self._log.note_step(message.applied if is_settled else message.step)
        self._apply(events.WorkerReport(worker, message))

    def on_exit(self, exited: messages.Exited) -> None:
        worker, status, membership = exited.worker, exited.status, self._membership
        self._stopped_s.pop(worker, None)
        rank, is_first = membership.ranks.get(worker), not membership.ranks
        is_training = membership.phase in (ViewPhase.RUNNING, ViewPhase.PAUSING)
        before = ""
        if status and (is_first or (is_training and rank is None)):
            before = "it joined"
        elif (
            not status and is_training and rank is not None and membership.view.view > 0
        ):
            before = "the last step was done"
        how = describe_end(status, exited.evidence)
        is_counted = worker not in self._generation.survived
        self._apply(events.WorkerLost(worker, status, how))
        if before and is_counted and not self._generation.is_stopping:
            host = self._generation.workers[worker].node.name
            name = name_worker(worker, rank, host)
            self._loop.output.notice(f"{name} {how} before {before}")

    def on_loss(self, node: AgentNode, loss: HostLoss) -> None:
        nodes = self._generation.nodes
        if self._hosts.owns(node):
            if not self._hosts.on_loss(node, loss):
                self._give_up(node.name, loss.reason)
        elif node in nodes and not self._generation.is_stopping:
            nodes.remove(node)
            reason = f"{node.name} was lost: {loss.reason}"
            self._on_gone(node.name, reason)

    def _give_up(self, name: str, reason: str) -> None:
        self._loop.output.notice(f"{name} cannot be used: {reason}")
        self._on_gone(name, f"{name} cannot be used: {reason}")

    def _on_gone(self, name: str, reason: str) -> None:
        self._apply(events.HostGone(name, reason, self._joins_itself(name)))

    def _leave(self, event: events.HostLeaves) -> None:
        self._apply(event._replace(joins_itself=self._joins_itself(event.host)))

    def _joins_itself(self, name: str) -> bool:
        return self._server is not None and name != self._server.config.head

    def due_s(self) -> float:
        if self._server is not None and self._server.version != self._seen:
            return 0.0
        others = self._membership.due_s, self._discovery.due_s, self._notices.due_s
        return min(self._hosts.due_s(), *others, *self._stopped_s.values())

    def on_due(self) -> None:
        now_s = time.monotonic()
        for worker in [n for n, at_s in self._stopped_s.items() if at_s <= now_s]:
            del self._stopped_s[worker]
            self._generation.kill(worker)
            how = f"was stopped for {_STOPPED_S:g} s"
            self._apply(events.WorkerLost(worker, -signal.SIGSTOP, how))
        for name, reason in self._hosts.advance():
            self._give_up(name, reason)
        hosts = self._discovery.advance(now_s)
        if self._server is not None and self._server.version != self._seen:
            self._seen = self._server.version
            hosts = self._plan.spec.hosts[0], *self._server.hosts
        if hosts is not None:
            self._on_hosts(hosts)
        while self._discovery.notices:
            self._loop.output.notice(self._discovery.notices.pop(0))
        for event in self._notices.on_due(self._membership.view, now_s):
            self._leave(event)
        self._apply(events.TimerExpired())

    # Orders

    def _apply(self, event: events.Event) -> None:
        generation, before = self._generation, self._membership.view
        if generation.is_stopping:
            return
        orders = self._membership.apply(event, time.monotonic())
        if self._membership.view is not before:
            self._on_new_view(before)
        for order in orders:
            self._carry_out(order)
        hung = [o for o in orders if isinstance(o, events.Kill) and o.is_hung]
        if hung:
            self._loop.output.notice(f"{hung[0].reason}; stacks follow")
            generation.kill_hung([each.worker for each in hung])
        is_over = self._membership.phase is ViewPhase.FINISHED
        if is_over and not self._membership.living and not generation.is_stopping:
            generation.stop(signal.SIGTERM)

    def _on_new_view(self, before: view.View) -> None:
        generation, membership = self._generation, self._membership
        self._log.begin_view(membership.view, membership.reason)
        survived = generation.survived
        survived |= {n for n, worker in generation.workers.items() if worker.exited}
        survived |= before.ranks.keys() - membership.ranks.keys()
        survived |= {n for lost in generation.lost for n in lost.ranks}
        # Requests that wait there belong to the previous view.
        self._loop.store.clear()

    def _carry_out(self, order: events.Order) -> None:
        match order:
            case events.Send():
                self._tell(order.workers, order.message)
            case events.StartWorker():
                self._start(order.worker)
            case events.Kill():
                if not order.is_hung:
                    self._generation.kill(order.worker)
            case events.Connect():
                self._hosts.connect(order.host)
            case events.Release():
                self._releasing.add(order.host)
                self._node(order.host).send(messages.StopWorkers(signal.SIGTERM))
            case events.Blacklisted():
                failed = counted(order.num_failures, "failure")
                rest = f"gets no new rank for {format_duration(order.seconds)}"
                text = f"{order.host} {rest} after {failed}"
                self._loop.output.notice(text)
            case events.Stop():
                self._stop = order
                if not order.is_too_few:  # which ends as an error
                    self._loop.output.notice(order.reason)
                self._generation.stop(signal.SIGTERM)

    def _start(self, worker: view.Worker) -> None:
        membership, started = self._membership, self._generation.workers
        members = membership.view.members
        if members:
            living = (each for each in membership.living if each.id in started)
            members += tuple(w for w in living if w.id not in membership.ranks)
        spec = self._hosts.spec(worker, members)
        if members or worker.id >= membership.rules.max_ranks:
            # It prepares before it joins, so that the others need not wait.
            spec.env["RONDE_JOINS"] = "1"
        self._generation.start(self._node(worker.host), spec)

    def _tell(self, workers: Collection[int], message: view.ToRank) -> None:
        generation = self._generation
        match message:
            case view.ViewEnded() | view.StopAfter():
                self._log.begin_change()
            case view.Leave():
                generation.survived.update(workers)
            case view.Finish():
                others = generation.workers.keys() - self._membership.ranks.keys()
                generation.survived |= others
            case _:
                pass
        generation.send_text(workers, view.encode_text(message))

    def _node(self, name: str) -> AgentNode:
        nodes = self._generation.nodes
        return next(n for n in nodes if n.name == name and not n.is_over)

    def finish(self, result: JobResult) -> JobResult:
        """Add the views to the result; raise HostError if there were too few hosts."""
        self._discovery.close()
        if line := self._log.summary():
            self._loop.output.notice(line)
        stop = self._stop
        if stop and stop.is_too_few and result.interrupted_by is None:
            raise HostError(stop.reason)
        code = result.exit_code or int(stop is not None)
        return result._replace(exit_code=code, views=tuple(self._log.records))


def describe_end(status: int, evidence: str) -> str:
    how = f"ended with exit code {status}"
    if status < 0:
        how = f"was killed by {signal_name(-status)}"
    return f"{how} ({evidence})" if evidence else how


class HostNotices:
    """Notices of hosts that will be reclaimed, held until their ranks can leave.

    Notices within a second, such as at Slurm's time limit, are handled together. If all
    hosts of the view will be reclaimed, no rank leaves until another host joins, and
    ``save`` is called repeatedly.
    """

    def __init__(
        self,
        min_ranks: int,
        notice: Callable[[str], None],
        save: Callable[[view.View], None],
    ) -> None:
        self._min_ranks = min_ranks
        self._notice, self._save = notice, save
        self._save_at_s = -inf
        self._reasons: dict[AgentNode, str] = {}
        self._reported: set[AgentNode] = set()
        self.due_s = inf  # of ``on_due``

    def add(self, node: AgentNode, reason: str, now_s: float) -> None:
        self._reasons[node] = reason
        self.due_s = min(self.due_s, now_s + _TOGETHER_S)

    def on_due(self, current: view.View, now_s: float) -> list[events.HostLeaves]:
        """Return an event for each host that its ranks can leave now."""
        if now_s < self.due_s:
            return []
        self._reasons = {n: r for n, r in self._reasons.items() if not n.is_over}
        names = {node.name for node in self._reasons}
        num_others = sum(worker.host not in names for worker in current.members)
        if current.members and num_others < self._min_ranks:
            self._report_staying(current)
        if not num_others:
            self.due_s = now_s + _TOGETHER_S if self._reasons else inf
            if self._reasons and current.members and now_s >= self._save_at_s:
                self._save_at_s = now_s + _SAVE_EVERY_S
                self._save(current)
            return []
        leaving = self._reasons
        self._reasons, self.due_s = {}, inf
        return [
            events.HostLeaves(n.name, f"{n.name}: {why}") for n, why in leaving.items()
        ]

    def _report_staying(self, current: view.View) -> None:
        hosts = {worker.host for worker in current.members}
        staying = [node for node in self._reasons if node.name in hosts]
        nodes = [node for node in staying if node not in self._reported]
        self._reported.update(nodes)
        if nodes:
            first, *others = nodes
            more = list_first([node.name for node in others])
            self._notice(
                f"{first.name}: {self._reasons[first]}{more and f' ({more} too)'}; its "
                "ranks stay until the others can do without them"
            )


class ViewLog:
    """Records each view once all its members run."""

    def __init__(self, started_at_s: float) -> None:
        self.records: list[ViewRecord] = []
        self._started_at_s = started_at_s
        self._change_s = started_at_s  # beginning of the current change
        self._began_s = started_at_s  # beginning of the change to the current view
        self._view, self._reason = view.View(view.NO_VIEW, ()), ""
        self._size_before = 0  # of the previous view
        self._running: dict[int, int] = {}  # steps of members that run
        self._best_step = view.NEW

    def begin_change(self) -> None:
        self._change_s = time.monotonic()

    def begin_view(self, new: view.View, reason: str) -> None:
        self._size_before = len(self._view.members)
        self._view, self._reason, self._running = new, reason, {}
        self._began_s = self._change_s

    def note_step(self, step: int) -> None:
        self._best_step = max(self._best_step, step)

    def summary(self) -> str:
        changes = self.records[1:]
        if not changes:
            return ""
        sizes = [record.size for record in self.records]
        took = format_duration(sum(record.took_s for record in changes))
        lost = counted(sum(record.steps_lost for record in changes), "step")
        ranks = f"{min(sizes)} to {counted(max(sizes), 'rank')}"
        times = counted(len(changes), "change")
        return f"{times} of membership, {ranks}: {took} at a standstill, {lost} lost"

    def enter(self, worker: int, step: int) -> str:
        """Record that a member is running; once all are, return a line to print."""
        self._running[worker] = step
        if len(self._running) < len(self._view.members):
            return ""
        newest = max(self._running.values())
        record = ViewRecord(
            self._view.view,
            self._began_s - self._started_at_s,
            time.monotonic() - self._began_s,
            len(self._running),
            newest,
            max(0, self._best_step - newest),
            self._reason,
        )
        self.records.append(record)
        self._best_step = newest
        if not self._size_before:
            return ""
        where = f"from step {newest}" if newest >= 0 else "from the beginning"
        lost = record.steps_lost
        cost = f", {counted(lost, 'step')} lost" if lost else ""
        ranks = counted(self._size_before, "rank")
        change = f"{ranks} became {record.size} and go on"
        if self._size_before == record.size:
            change = f"another worker replaces it, and {ranks} go on"
        took = format_duration(record.took_s)
        return f"{record.reason}; {change} {where} after {took}{cost}"
