"""One start of an elastic job: processes come and go until the last step is done.

What to do is decided by ``membership.policy``; this carries it out and reports what
happens. ``membership.view`` has the messages to and from the ranks.
"""

import secrets
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from ronde.errors import HostError, LaunchError
from ronde.launch.elastic_options import ElasticOptions
from ronde.launch.host import Host
from ronde.launch.hosts.discovery import open_discovery
from ronde.launch.hosts.node import EXIT_INTERNAL, AgentNode, HostLoss
from ronde.launch.job.elastic_hosts import JobHosts
from ronde.launch.job.event_loop import EventLoop
from ronde.launch.job.failure import JobResult, LostHost, signal_name
from ronde.launch.job.host_notices import HostNotices
from ronde.launch.job.plan import JobPlan
from ronde.launch.job.running import Running, RunningWorker
from ronde.launch.job.view_log import ViewLog
from ronde.launch.wire import messages
from ronde.membership import policy, view
from ronde.membership.events import ProcessOrder
from ronde.membership.policy import Membership, Rules, ViewPhase
from ronde.units import format_duration

_STOPPED_S = 1.5  # a process that stands still for so long is lost
_NEVER = float("inf")


def rules_of(options: ElasticOptions) -> Rules:
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


class ElasticRunning(Running):
    """One start of an elastic job.

    In the tables of ``Running`` a rank is a process, by its number.
    """

    def __init__(
        self,
        loop: EventLoop,
        plan: JobPlan,
        jobs: Sequence[messages.NodeJob],
        hosts: JobHosts,
    ) -> None:
        super().__init__(loop, plan.nodes, jobs)
        options = plan.spec.elastic
        if options is None:
            raise AssertionError("the job must be an elastic one")
        self._plan, self._hosts = plan, hosts
        now_s = time.monotonic()
        self._discovery = open_discovery(options, plan.spec.hosts, now_s)
        self._membership = Membership(rules_of(options))
        self._view, self._rank_of = view.View(view.NO_VIEW, ()), dict[int, int]()
        self._pause = PlannedPause()
        self._stopped_s: dict[int, float] = {}
        self._survived: set[int] = set()  # processes whose end ends nothing
        self._hung: set[int] = set()  # processes that are killed once seen where
        self._releasing: set[str] = set()
        self._notices = HostNotices(
            options.min_ranks,
            loop.output.notice,
            lambda of: self._tell((of.members[0].number,), view.Save(of.view)),
        )
        self._reason = ""  # why the job cannot go on, a sentence
        self._is_too_few = False
        self._log = ViewLog(now_s)

    def _begin(self, start: messages.Start) -> None:
        super()._begin(start)
        self._hosts.start = start
        self._hosts.plan_ranks(self._membership.rules.max_ranks)
        # These first, as all others that are known are connected to.
        for node in self._nodes:
            node.watch(is_watched=True)
            self._take_ready(node)
        self._take_hosts(self._plan.spec.hosts or (self._nodes[0].host,))

    def _take_hosts(self, hosts: Sequence[Host]) -> None:
        self._hosts.known = {host.name: host for host in hosts}
        for node in self._nodes:
            self._hosts.widen(node)
        # Of a host of unknown size the agent knows better.
        self._apply(policy.HostsFound({host.name: host.slots for host in hosts}))

    def _take_ready(self, node: AgentNode) -> None:
        self._finished.pop(node.name, None)
        num_slots = len(self._hosts.shares[node.name].places)
        self._apply(policy.HostReady(node.name, num_slots))

    def take(self, node: AgentNode, message: messages.FromAgent) -> None:
        if self._hosts.owns(node):
            self._take_new(node, self._hosts.take(node, message))
            return
        match message:
            case messages.WorkerTexts():
                for rank, text in message.texts:
                    node.require_own(rank)
                    self._take_text(rank, view.decode_text(text, view.FROM_RANK))
            case messages.WorkerStopped():
                node.require_own(message.worker)
                due_s = time.monotonic() + _STOPPED_S if message.is_stopped else _NEVER
                self._stopped_s[message.worker] = due_s
            case messages.WorkerEnding():
                node.require_own(message.worker)
                if message.worker in self._rank_of:  # else nobody waits for it
                    how = describe_end(message.status, message.evidence)
                    self._lose_early(message.worker, message.status, how)
            case messages.HostEnding() | messages.HostLeaving():
                self._take_end(node, message)
            case messages.Finished() if node.name in self._releasing:
                self._releasing.remove(node.name)
                self._nodes.remove(node)
                node.close()
            case _:
                super().take(node, message)

    def _take_new(self, node: AgentNode, problem: str | None) -> None:
        if problem == "" and not self._is_stopping:
            self._nodes.append(node)
            self._take_ready(node)
        elif problem:
            self._hosts.forget(node)
            self._loop.nodes.remove(node)
            node.close()
            self._give_up(node.name, problem)

    def _take_end(
        self, node: AgentNode, message: messages.HostEnding | messages.HostLeaving
    ) -> None:
        if isinstance(message, messages.HostLeaving):
            self._notices.add(node, message.reason, time.monotonic())
        elif self._is_stopping or all(n is node or n.is_over for n in self._nodes):
            super().take(node, message)
        else:
            name = signal_name(message.signal)
            self._apply(policy.HostLeaves(node.name, f"{node.name} ends by {name}"))

    def _take_text(self, number: int, message: view.FromRank) -> None:
        is_new = isinstance(message, view.Settled) and message.view == view.NO_VIEW
        if self._is_stopping or not (is_new or message.view == self._view.view):
            return
        if isinstance(message, view.Settled):
            self._log.note_step(message.applied)
        elif not isinstance(message, view.Entered):
            self._log.note_step(message.step)
        match message:
            case view.Settled():
                reason = message.reason and f"{self._name(number)} {message.reason}"
                self._apply(policy.MemberSettled(number, message.step, reason))
            case view.Done():
                self._apply(policy.MemberDone(number, message.step))
            case view.AtStep():
                self._pause.steps[number] = message.step
                self._stop_after_common_step()
            case view.Failed():
                self._lose_early(number, 1, f"failed with {message.reason}")
            case view.Entered():
                if line := self._log.enter(number, message.step):
                    self._loop.output.notice(line)

    def _lose_early(self, number: int, status: int, how: str) -> None:
        reason = f"{self._name(number)} {how}"
        self._apply(policy.MemberLost(number, status, reason, has_ended=False))

    def _stop_if_caused(self, exited: messages.Exited) -> None:
        number, status = exited.worker, exited.status
        self._stopped_s.pop(number, None)
        reason = f"{self._name(number)} {describe_end(status, exited.evidence)}"
        is_member = number in self._rank_of
        is_training = self._membership.phase in (ViewPhase.RUNNING, ViewPhase.PAUSING)
        is_new = self._view.view == view.NO_VIEW or (is_training and not is_member)
        before = ""
        if is_new and status:
            before = "it took part"
        elif not (is_new or status) and is_training and self._view.view > 0:
            before = "the last step was done"
        is_counted = number not in self._survived
        self._apply(policy.MemberLost(number, status, reason))
        if before and is_counted and not self._is_stopping:
            self._loop.output.notice(f"{reason} before {before}")

    def take_loss(self, node: AgentNode, loss: HostLoss) -> None:
        if self._hosts.owns(node):
            if not self._hosts.take_loss(node, loss):
                self._give_up(node.name, loss.reason)
            return
        if self._is_stopping:
            super().take_loss(node, loss)
            return
        if node in self._nodes:
            self._nodes.remove(node)
        numbers = [n for n, r in self._ranks.items() if r.node is node and not r.exited]
        at_s = node.heard_at_s - self._started_at_s
        lost = LostHost(node.name, tuple(numbers), loss.reason, loss.exit_code, at_s)
        self._lost.append(lost)
        reason = f"{node.name} was lost: {loss.reason}"
        self._apply(policy.HostGone(node.name, reason))

    def take_fault(self, node: AgentNode, error: LaunchError) -> None:
        if node.is_over:
            raise error
        self._loop.lose(self, node, HostLoss(str(error), EXIT_INTERNAL))

    def _give_up(self, name: str, reason: str) -> None:
        self._loop.output.notice(f"{name} cannot take part: {reason}")
        self._apply(policy.HostGone(name, f"{name} cannot take part: {reason}"))

    def _due_s(self) -> float:
        due_s = super()._due_s()
        if self._is_stopping:
            return due_s
        others = self._membership.due_s, self._discovery.due_s, self._notices.due_s
        return min(due_s, self._hosts.due_s(), *others, *self._stopped_s.values())

    def _take_due(self) -> None:
        now_s = time.monotonic()
        if self._is_stopping or now_s > min(self._stacks_by_s, self._status_by_s):
            super()._take_due()
            return
        for number in [n for n, at_s in self._stopped_s.items() if at_s <= now_s]:
            del self._stopped_s[number]
            self._kill(number)
            reason = f"{self._name(number)} was stopped for {_STOPPED_S:g} s"
            self._apply(policy.MemberLost(number, -signal.SIGSTOP, reason))
        for name, reason in self._hosts.advance():
            self._give_up(name, reason)
        if (hosts := self._discovery.advance(now_s)) is not None:
            self._take_hosts(hosts)
        while self._discovery.notices:
            self._loop.output.notice(self._discovery.notices.pop(0))
        for event in (*self._notices.take(self._view, now_s), policy.Tick()):
            self._apply(event)

    def _apply(self, event: policy.Event) -> None:
        if self._is_stopping:
            return
        for order in self._membership.apply(event, time.monotonic()):
            self._carry_out(order)
        if self._hung:
            self._ask_for_stacks(self._hung)
        if isinstance(event, policy.MemberLost):  # perhaps one that was asked
            self._stop_after_common_step()
        is_over = self._membership.phase is ViewPhase.FINISHED
        if is_over and not self._membership.num_living and not self._is_stopping:
            self._stop(signal.SIGTERM)

    def _carry_out(self, order: policy.Order) -> None:
        match order:
            case policy.EndView():
                self._pause = PlannedPause()
                self._log.begin_change()
                self._tell(order.numbers, view.ViewEnded(self._view.view, order.reason))
            case policy.PauseView():
                self._pause = PlannedPause(order.numbers, order.reason)
                self._tell(order.numbers, view.AskStep(self._view.view))
            case policy.BeginView():
                self._begin_view(order)
            case policy.Dismiss():
                self._survived.add(order.number)
                self._tell((order.number,), view.Leave(order.reason))
            case policy.FinishAll():
                self._finish_all()
            case policy.Stop():
                self._reason, self._is_too_few = order.reason, order.is_too_few
                if not order.is_too_few:  # which ends as an error
                    self._loop.output.notice(order.reason)
                self._stop(signal.SIGTERM)
            case _:
                self._staff(order)

    def _staff(self, order: ProcessOrder) -> None:
        match order:
            case policy.Barred():
                self._loop.output.notice(describe_bar(order))
            case policy.Connect():
                self._hosts.connect(order.host)
            case policy.Release():
                self._releasing.add(order.host)
                self._node(order.host).send(messages.StopWorkers(signal.SIGTERM))
            case policy.StartProcess():
                self._start(order.place)
            case policy.Kill():
                self._survived.add(order.number)
                if order.is_hung:
                    if not self._hung:
                        self._loop.output.notice(f"{order.reason}; stacks follow")
                    self._hung.add(order.number)
                else:
                    self._kill(order.number)

    def _start(self, place: view.Place) -> None:
        number, name, _ = place
        known = self._ranks if self._view.members else ()
        living = [p for n in known if (p := self._membership.place_of(n))]
        joining = set(living).difference(self._view.members, [place])
        members = (*self._view.members, *sorted(joining))
        spec, node = self._hosts.rank(place, members), self._node(name)
        is_spare = number >= self._membership.rules.max_ranks
        if self._view.view != view.NO_VIEW or is_spare:
            # It prepares alone, so that nobody waits for that when it joins.
            spec.env["RONDE_JOINS"] = "1"
        node.ranks |= {number}
        self._ranks[number] = RunningWorker(node)
        self._loop.output.add_rank(number, name)
        node.send(messages.StartWorkers((spec,)))

    def _begin_view(self, order: policy.BeginView) -> None:
        before = self._view
        self._log.begin_view(order)
        self._view = view.View(order.view, order.members)
        self._rank_of = self._view.ranks
        self._survived |= {n for n, r in self._ranks.items() if r.exited}
        self._survived |= set(order.gone)
        self._survived |= {n for lost in self._lost for n in lost.ranks}
        self._pause = PlannedPause()
        # Whoever still waits there is not of this view.
        self._loop.store.clear()
        whole = begins_of(order)
        new = {place.number for place in order.new}
        kept = [p.number for p in order.members if p.number not in new]
        if kept:
            base, gone = before.view, order.gone
            self._tell(kept, whole._replace(base=base, gone=gone, new=order.new))
        self._tell(sorted(new), whole)

    def _stop_after_common_step(self) -> None:
        pause = self._pause
        living = [n for n in pause.asked if self._membership.place_of(n)]
        if (step := pause.common_step(living)) is not None:
            self._log.begin_change()
            self._tell(living, view.StopAfter(self._view.view, step, pause.reason))
            self._pause = PlannedPause()

    def _finish_all(self) -> None:
        members = {place.number for place in self._view.members}
        self._survived |= self._ranks.keys() - members
        for number, rank in self._ranks.items():
            if number not in members and not rank.exited:
                self._kill(number)
        self._tell(sorted(members), view.Finish())

    def _kill(self, number: int) -> None:
        self._survived.add(number)
        node = self._ranks[number].node
        if not node.is_over:
            node.send(messages.SignalWorker(number, signal.SIGKILL))

    def _show_stacks(self) -> None:
        super()._show_stacks()
        while self._hung:
            self._kill(self._hung.pop())

    def _node(self, name: str) -> AgentNode:
        return next(n for n in self._nodes if n.name == name and not n.is_over)

    def _tell(self, numbers: Sequence[int], message: view.ToRank) -> None:
        by_node: dict[AgentNode, list[int]] = {}
        for number in numbers:
            rank = self._ranks[number]
            if not rank.node.is_over and not rank.exited:
                by_node.setdefault(rank.node, []).append(number)
        text = view.encode_text(message)
        for node, ranks in by_node.items():
            node.send(messages.SendToWorkers(tuple(ranks), text))

    def _name(self, number: int) -> str:
        host = self._ranks[number].node.name
        return name_process(number, self._rank_of.get(number), host)

    def _judge(self) -> JobResult:
        self._discovery.close()
        if line := self._log.summary():
            self._loop.output.notice(line)
        for number in self._survived:
            self._ranks.pop(number, None)
        self._lost = [h for h in self._lost if not self._survived >= {*h.ranks}]
        result = super()._judge()
        if self._is_too_few and self._interrupted_by is None:
            raise HostError(self._reason)
        code = result.exit_code or int(bool(self._reason))
        return replace(result, exit_code=code, views=tuple(self._log.records))


class PlannedPause:
    """A planned change: the members asked for their steps, and what they answered."""

    def __init__(self, asked: Sequence[int] = (), reason: str = "") -> None:
        self.asked, self.reason = sorted(asked), reason
        self.steps: dict[int, int] = {}

    def common_step(self, living: Sequence[int]) -> int | None:
        """Return the step after which all can stop; None until all have answered."""
        if not living or not self.steps.keys() >= set(living):
            return None
        return max(self.steps[number] for number in living) + 1


def begins_of(order: policy.BeginView) -> view.ViewBegins:
    """Return what those are told who know nothing of the view before."""
    return view.ViewBegins(
        view=order.view,
        key=secrets.token_hex(16),
        base=view.NO_VIEW,
        gone=(),
        new=order.members,
        source=order.source,
        step=order.step,
        is_equal=order.is_equal,
        reason=order.reason,
    )


def describe_bar(order: policy.Barred) -> str:
    """Return why a host has a rest, in one line."""
    failed = (
        "a process" if order.num_failures == 1 else f"{order.num_failures} processes"
    )
    rest = format_duration(order.seconds)
    return f"{order.host} gets no new rank for {rest}, as {failed} failed there"


def describe_end(status: int, evidence: str) -> str:
    """Return how a process ended, in half a sentence."""
    how = f"ended with exit code {status}"
    if status < 0:
        how = f"was killed by {signal_name(-status)}"
    return f"{how} ({evidence})" if evidence else how


def name_process(number: int, rank: int | None, host: str) -> str:
    """Return a process as a rank, with its own number where that differs."""
    if rank is None:
        return f"process {number} on {host}"
    other = f" (process {number})" if rank != number else ""
    return f"rank {rank}{other} on {host}"
