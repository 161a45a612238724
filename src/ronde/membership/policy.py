"""The membership policy of an elastic job, a pure function of events.

It uses no clock, no random numbers and no I/O. Each event comes with its time, and the
result is a list of orders, which the launcher executes.

Note [The members of the next view]
    Survivors stay members, unless they must leave their host and ``min_ranks`` others
    remain. If only one survivor has the newest state, it stays until another has it.
    New workers fill up to ``max_ranks``. Further ones are spares: they wait,
    unconnected, and replace the next member that is lost. New workers on a blacklisted
    host wait too. After a loss the survivors form a view at once if there are
    ``min_ranks``; only then are replacements started.

    A worker that exits with 0 may have finished, so its view continues. If it had not
    finished, the other members lose their peer and settle without a request.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, auto
from math import inf
from typing import NamedTuple

from ronde.membership import events
from ronde.membership.view import (
    NEW,
    NO_VIEW,
    AskStep,
    AtStep,
    Done,
    Entered,
    Failed,
    Finish,
    Leave,
    Settled,
    StopAfter,
    ToRank,
    View,
    ViewBegins,
    ViewEnded,
    Worker,
    order_ranks,
)
from ronde.units import counted, name_rank

RESET_LIMIT_EXCEEDED_MESSAGE = (
    "Horovod was shutdown because worker of resets during elastic job exceeded "
    "limit: {}"
)
"""Horovod's message, which its users search for."""
_FAILURES, _FAILURES_WITHIN_S = 3, 600.0  # of one host, before it is blacklisted
_MAX_IDLE_VIEWS = 3  # consecutive views that failures of the program end at one step
_START_S = 600.0  # limit for the start of a worker
_JOIN_S = 60.0  # with ``awaits_joining``, time to wait for workers that start
_GATHER_S = 5.0  # new workers wait for others that start, to join together


class Rules(NamedTuple):
    """The options of an elastic job that the policy depends on."""

    min_ranks: int
    max_ranks: int
    spares: int = 0
    is_host_domain: bool = False  # a failed rank makes its whole host fail
    awaits_joining: bool = False  # members pause when new workers start, as in Horovod
    cooldown_s: tuple[float, float] = (30.0, 3600.0)  # first and longest, doubling
    formation_s: float = 600.0  # limit on waiting for ``min_ranks``
    settle_s: float = 30.0  # limit for a member to leave a view that has ended
    reset_limit: int | None = None  # on the number of views after the first


class ViewPhase(Enum):
    """State of the current view."""

    FORMING = auto()  # there is none, or members have not yet left the last one
    RUNNING = auto()
    PAUSING = auto()  # it continues up to a common step
    FINISHED = auto()  # all steps are done
    STOPPED = auto()


class _State(IntEnum):  # hashed for every report, so not an ``Enum``
    STARTING = auto()
    WAITING = auto()  # settled
    ACTIVE = auto()
    DONE = auto()


@dataclass(slots=True)
class _WorkerRecord:
    worker: Worker
    since_s: float  # the time it entered its state
    state: _State = _State.STARTING
    step: int = NEW
    is_in_view: bool = False


@dataclass(slots=True)
class _Host:
    slots: int
    is_known: bool = True  # it is among the hosts found last
    is_ready: bool = False
    is_connecting: bool = False
    leaves: str = ""  # why it must be left
    joins_itself: bool = False  # after it was left
    cooldown_s: float = 0.0
    blacklisted_until_s: float = -inf
    failures_s: list[float] = field(default_factory=list[float])
    used: dict[int, int] = field(default_factory=dict[int, int])  # slot to worker id

    @property
    def is_left(self) -> bool:
        return bool(self.leaves) or not self.is_known

    def is_usable(self, now_s: float) -> bool:
        return (
            self.blacklisted_until_s <= now_s and not self.is_left and self.slots != 0
        )


def name_worker(worker: int, rank: int | None, host: str) -> str:
    """Name a worker: ``rank 1 (worker 4) on node2``; omit an id equal to the rank."""
    if rank is None:
        return f"worker {worker} on {host}"
    return f"{name_rank(rank, worker)} on {host}"


class _Roster:
    """The workers and hosts of a job, and the effects of losses on the view.

    ``make_key`` returns a new secret key for each view.
    """

    def __init__(self, rules: Rules, make_key: Callable[[], str]) -> None:
        self.rules = rules
        self.phase = ViewPhase.FORMING
        self.view = View(NO_VIEW, ())
        self.ranks: dict[int, int] = {}  # of the view's members, in their order
        self.due_s = inf  # when ``events.TimerExpired`` is due
        self._workers: dict[int, _WorkerRecord] = {}
        self._make_key = make_key
        self._num = Counter[_State]()  # workers in each state
        # lost, killed or left out, but not ended yet
        self._ending: dict[int, _WorkerRecord] = {}
        self._unwanted: set[int] = set()  # members whose slots must be left
        self._hosts: dict[str, _Host] = {}
        self._next_id = 0
        self._now_s = 0.0  # of the event
        self._reasons = ["the job starts"]  # for the end of the view
        self._is_symptom = False  # the reason is a consequence of another loss
        self._best_step = NEW
        self._num_idle = 0
        self._is_failure = False  # a failure of the program ended the view
        self._is_planned = False  # the view ended after a common step
        self._first_s = inf  # when the job began
        self._forming_since_s = inf
        self._leaver = ""  # a worker that exited with 0 before the first view
        self._is_closing = False  # a rank has exited with 0
        self._is_asking = False  # ``AskStep`` was sent
        self._unanswered: set[int] = set()  # members that have not replied to it
        self._last_step = NEW  # the largest of the replies
        self._orders: list[events.Order] = []

    @property
    def living(self) -> list[Worker]:
        return [record.worker for record in self._workers.values()]

    def blacklisted(self, now_s: float) -> dict[str, float]:
        """Return the remaining seconds of each blacklisted host."""
        left = {n: h.blacklisted_until_s - now_s for n, h in self._hosts.items()}
        return {name: left_s for name, left_s in left.items() if left_s > 0}

    def _host(self, name: str) -> _Host:
        return self._hosts.setdefault(name, _Host(-1, is_known=False))

    def _on_hosts(self, slots: Mapping[str, int]) -> None:
        kept = {name: host for name, host in self._hosts.items() if name in slots}
        gone = {n: host for n, host in self._hosts.items() if n not in slots}
        for host in gone.values():
            host.is_known = False
        for name, number in slots.items():
            host = kept.setdefault(name, _Host(number))
            host.is_known = True
            host.slots = number if number >= 0 else host.slots
        # Known hosts keep their order, new ones follow.
        self._hosts = kept | gone
        for name in self._hosts:
            self._review(name)

    def _review(self, name: str) -> None:
        """Mark a host's members that must leave their slots; kill others that must."""
        for worker in self._workers_on(name):
            reason = self._why_left(self._workers[worker])
            (self._unwanted.add if reason else self._unwanted.discard)(worker)
            if reason and not self._workers[worker].is_in_view:
                self._remove([], reason, killed=[worker])

    @property
    def _present(self) -> list[int]:
        return [worker for worker in self.ranks if worker in self._workers]

    @property
    def _least(self) -> int:
        return max(1, self.rules.min_ranks)

    def _workers_on(self, host: str) -> list[int]:
        return [n for n in self._hosts[host].used.values() if n in self._workers]

    def _why_left(self, record: _WorkerRecord) -> str:
        """Return the reason to leave a worker's slot, or an empty text."""
        name = record.worker.host
        host = self._hosts[name]
        if not host.is_known:
            return f"{name} is no longer among the hosts"
        if 0 <= host.slots <= record.worker.slot:
            return host.leaves or f"{name} has {counted(host.slots, 'slot')} now"
        return host.leaves

    def _enter(self, record: _WorkerRecord, state: _State, step: int) -> None:
        self._num[record.state] -= 1
        self._num[state] += 1
        record.state, record.step, record.since_s = state, step, self._now_s

    def _drop(self, worker: int) -> _WorkerRecord:
        record = self._workers.pop(worker)
        self._num[record.state] -= 1
        self._unwanted.discard(worker)
        self._unanswered.discard(worker)
        if worker not in self._ending:
            del self._hosts[record.worker.host].used[record.worker.slot]
        return record

    def _remove(
        self,
        lost: Collection[int],
        reason: str,
        killed: Collection[int] = (),
        hung: Collection[int] = (),
    ) -> None:
        """Remove workers; if one of them is an active member, the view ends."""
        is_early = self._is_early
        for worker in killed:
            self._orders.append(events.Kill(worker, reason, worker in hung))
            self._ending[worker] = replace(self._workers[worker], since_s=inf)
        dropped = [self._drop(worker) for worker in (*lost, *killed)]
        if dropped and is_early:
            self._stop_early(reason)
        elif self.phase in (ViewPhase.RUNNING, ViewPhase.PAUSING):
            if any(w.state in (_State.ACTIVE, _State.DONE) for w in dropped):
                self._end_view(reason)
        elif any(w.is_in_view for w in dropped):
            known = [] if self._is_symptom else self._reasons
            self._reasons, self._is_symptom = [*known, reason], False

    @property
    def reason(self) -> str:
        """The reason why the view began, ended, or will end."""
        first, *others = self._reasons
        if len(others) > 1:
            return f"{first}, and {len(others)} more were lost"
        return " and ".join(self._reasons)

    @property
    def _is_early(self) -> bool:
        """True until a worker has called ``init()``."""
        return not self.ranks and not self._num[_State.WAITING]

    def _stop_early(self, reason: str) -> None:
        self._stop(f"{reason} before any rank was ready.")

    def _on_early_end(self, event: events.WorkerLost, reason: str) -> None:
        """Handle a worker's exit before the first view."""
        is_alone = self._is_early
        if event.exit_code == 0:
            self._drop(event.worker)
            self._is_closing, self._leaver = True, reason
            if not is_alone:
                self._stop_unjoined()
            return
        if is_alone:
            self._stop_early(reason)
            return
        self._lose(event.worker, reason)
        ready = [host for host in self._hosts.values() if host.is_ready]
        if not any(host.is_usable(self._now_s) for host in ready):
            self._stop(
                "Workers failed on all hosts before they were ready, the last time "
                f"because {reason}."
            )

    def _lose(self, worker: int, reason: str) -> None:
        others = self._count_failures([worker])
        self._remove([worker], reason, killed=others)

    def _stop_unjoined(self) -> None:
        self._stop(
            f"{self._leaver}, while the others wait in hvd.init(). Call it on all "
            "ranks."
        )

    def _stop(self, reason: str, *, is_too_few: bool = False) -> None:
        self.phase = ViewPhase.STOPPED
        self._orders.append(events.Stop(reason, is_too_few))

    def _send(self, workers: Collection[int], message: ToRank) -> None:
        self._orders.append(events.Send(tuple(workers), message))

    def _name(self, worker: int) -> str:
        host = self._workers[worker].worker.host
        return name_worker(worker, self.ranks.get(worker), host)

    def _count_failures(self, numbers: list[int]) -> list[int]:
        """Blacklist hosts of failed workers; return other workers to kill there."""
        others: list[int] = []
        names = Counter(self._workers[worker].worker.host for worker in numbers)
        # A job on one host would lose all ranks.
        is_by_host = self.rules.is_host_domain and len(self._hosts) > 1
        for name, count in names.items():
            host, since_s = self._hosts[name], self._now_s - _FAILURES_WITHIN_S
            host.failures_s = [at_s for at_s in host.failures_s if at_s > since_s]
            host.failures_s += [self._now_s] * count
            if is_by_host:
                others += self._workers_on(name)
            if is_by_host or len(host.failures_s) >= _FAILURES:
                num_failures = len(host.failures_s)
                self._blacklist(host)
                if host.cooldown_s:
                    self._orders.append(
                        events.Blacklisted(name, num_failures, host.cooldown_s)
                    )
        return sorted(set(others).difference(numbers))

    def _blacklist(self, host: _Host) -> None:
        low_s, high_s = self.rules.cooldown_s
        host.cooldown_s = min(max(low_s, 2 * host.cooldown_s), high_s)
        host.blacklisted_until_s = self._now_s + host.cooldown_s
        host.failures_s = []

    def _end_view(self, reason: str) -> None:
        self.phase, self._is_symptom = ViewPhase.FORMING, False
        self._reasons = [reason]
        self._forming_since_s, self._is_closing = self._now_s, False
        self._is_planned = self._is_asking = False
        workers = self._workers
        left = [n for n in self._present if workers[n].state is not _State.WAITING]
        for worker in left:
            workers[worker].since_s = self._now_s
        if left and not self._is_finished():
            self._send(left, ViewEnded(self.view.view, reason))

    @property
    def _is_starting(self) -> bool:
        is_connecting = any(h.is_connecting for h in self._hosts.values())
        return is_connecting or self._num[_State.STARTING] > 0

    def _count_waiting(self) -> None:
        """Start the timeout ``formation_s``, except during the first start."""
        now_s = self._now_s
        self._first_s = min(self._first_s, now_s)
        is_first = not self.ranks and now_s < self._first_s + _START_S
        is_counted = not (is_first and self._is_starting)
        self._forming_since_s = min(self._forming_since_s, now_s) if is_counted else inf

    def _is_finished(self) -> bool:
        """Return True if all members are done or have exited with 0."""
        if not self.ranks:
            return self._is_closing and not self._workers
        present = [self._workers[worker].state for worker in self._present]
        goes_on = self.phase is not ViewPhase.FORMING
        return (bool(present) or goes_on) and all(s is _State.DONE for s in present)

    def _free_slots(self) -> Iterator[tuple[str, int]]:
        for name, host in self._hosts.items():
            has_room = len(host.used) < host.slots or self._unwanted or self._ending
            if host.is_ready and has_room and host.is_usable(self._now_s):
                yield from ((name, n) for n in range(host.slots) if n not in host.used)

    def _starting_hosts(self) -> list[str]:
        """Return the hosts with starting workers for which the members wait."""
        if not (self.rules.awaits_joining and self._num[_State.STARTING]):
            return []
        starting = [w for w in self._workers.values() if w.state is _State.STARTING]
        awaited = [w for w in starting if self._now_s < w.since_s + _JOIN_S]
        return sorted({w.worker.host for w in awaited})

    def _fill(self) -> None:
        """Start workers in free slots; connect to further hosts."""
        workers = self._workers
        num_lacking = self.rules.max_ranks + self.rules.spares
        num_lacking -= len(workers) - len(self._unwanted)
        if num_lacking < 0:
            others = [n for n, w in workers.items() if not w.is_in_view]
            surplus = others[num_lacking:]
            self._remove([], "there are enough without it", killed=surplus)
        # If the survivors suffice, they form their view first.
        can_form = self.phase is ViewPhase.FORMING and len(self._present) >= self._least
        is_ending = self._is_closing or self._num[_State.DONE] > 0
        if num_lacking <= 0 or can_form or is_ending:
            return
        for name, slot in self._free_slots():
            if num_lacking <= 0:
                return
            worker = Worker(self._next_id, name, slot)
            self._next_id += 1
            workers[worker.id] = _WorkerRecord(worker, self._now_s)
            self._num[_State.STARTING] += 1
            self._hosts[name].used[slot] = worker.id
            self._orders.append(events.StartWorker(worker))
            num_lacking -= 1
        for name, host in self._hosts.items():
            if num_lacking <= 0:
                return
            if host.is_connecting:
                num_lacking -= max(1, host.slots)
            elif host.is_usable(self._now_s) and not host.is_ready:
                host.is_connecting = True
                self._orders.append(events.Connect(name))
                num_lacking -= max(1, host.slots)

    def _release(self) -> None:
        for name, host in self._hosts.items():
            if host.is_ready and host.is_left and not host.used:
                if host.leaves and host.joins_itself:
                    host.is_known = False
                elif host.leaves:
                    self._blacklist(host)
                host.is_ready, host.leaves = False, ""
                self._orders.append(events.Release(name))


class Membership(_Roster):
    """The policy as a state machine: it receives events and returns orders."""

    def apply(self, event: events.Event, now_s: float) -> list[events.Order]:
        """Handle an event; return the resulting orders."""
        self._orders, self._now_s = [], now_s
        if self.phase is not ViewPhase.STOPPED:
            self._on_event(event)
            self._stop_together()
        is_over = self.phase in (ViewPhase.FINISHED, ViewPhase.STOPPED)
        if not is_over and (self._orders or not self._awaits_more(event)):
            self._advance()
        return self._orders

    def _awaits_more(self, event: events.Event) -> bool:
        """Return True if an event needs no action until further events arrive.

        This keeps the cost of a change linear in the number of ranks.
        """
        num_active = self._num[_State.ACTIVE]
        message = event.message if isinstance(event, events.WorkerReport) else None
        if isinstance(message, (AtStep, Entered)):
            return True
        if isinstance(message, Settled):
            if not self.ranks or self.phase is ViewPhase.RUNNING:
                self.due_s = min(self.due_s, self._now_s + _GATHER_S)
                return self._num[_State.STARTING] > 0
            num_done = self._num[_State.DONE] if self.phase is ViewPhase.FORMING else 0
            return num_active + num_done > 0
        is_end = isinstance(event, events.WorkerLost) and self._is_closing
        return (is_end or isinstance(message, Done)) and num_active > 0

    # Events

    def _on_event(self, event: events.Event) -> None:
        match event:
            case events.WorkerReport():
                if record := self._workers.get(event.worker):
                    self._on_report(event, record)
            case events.HostsFound():
                self._on_hosts(event.slots)
            case events.HostReady():
                host = self._hosts.setdefault(event.host, _Host(event.slots))
                host.slots, host.is_ready, host.is_connecting = event.slots, True, False
                self._review(event.host)
            case events.HostGone():
                self._on_host_gone(event)
            case events.HostLeaves():
                host = self._host(event.host)
                host.leaves = event.reason if host.is_ready else ""
                host.joins_itself = event.joins_itself
                self._review(event.host)
            case events.WorkerLost():
                self._on_lost(event)
            case events.TimerExpired():
                self._kill_late()

    def _on_report(self, report: events.WorkerReport, record: _WorkerRecord) -> None:
        worker, message = report
        match message:
            case Settled():
                self._on_settled(worker, message)
            case Done() if record.state is _State.ACTIVE:
                since_s = record.since_s
                self._enter(record, _State.DONE, message.step)
                record.since_s = since_s
            case AtStep():
                self._unanswered.discard(worker)
                self._last_step = max(self._last_step, message.step)
            case Failed():
                how = f"failed with {message.reason}"
                self._on_lost(events.WorkerLost(worker, 1, how, has_ended=False))
            case Done() | Entered():
                pass

    def _stop_together(self) -> None:
        """Send ``StopAfter`` once all members have replied."""
        if self._is_asking and not self._unanswered:
            self._is_asking = False
            stop = StopAfter(self.view.view, self._last_step + 1, self.reason)
            if self._present:  # the last of them may have failed meanwhile
                self._send(self._present, stop)

    def _on_host_gone(self, event: events.HostGone) -> None:
        host = self._host(event.host)
        host.is_ready, host.is_connecting, host.leaves = False, False, ""
        if event.joins_itself:
            host.is_known = False
        else:
            self._blacklist(host)
        for worker in host.used.values():
            self._ending.pop(worker, None)
        self._remove(self._workers_on(event.host), event.reason)
        host.used.clear()

    def _on_settled(self, worker: int, message: Settled) -> None:
        if self.phase is ViewPhase.FINISHED:
            return
        record, why = self._workers[worker], message.reason
        was_active = record.state in (_State.ACTIVE, _State.DONE)
        self._enter(record, _State.WAITING, message.step)
        if self._leaver:
            self._stop_unjoined()
            return
        is_asked = self.phase is ViewPhase.PAUSING and not why
        if was_active and not is_asked and self.phase is not ViewPhase.FORMING:
            self._end_view(f"{self._name(worker)} {why or 'left it'}")
            self._is_symptom = True

    def _on_lost(self, event: events.WorkerLost) -> None:
        worker = event.worker
        ended = self._ending.pop(worker, None) if event.has_ended else None
        if ended is not None:
            del self._hosts[ended.worker.host].used[ended.worker.slot]
        record = self._workers.get(worker)
        if record is None:
            return
        reason = f"{self._name(worker)} {event.how}"
        if not event.has_ended:
            self._ending[worker] = replace(record, since_s=self._now_s)
        if self.phase is ViewPhase.FINISHED:
            self._remove([worker], reason)
            if event.exit_code:
                self._stop(f"{reason} after the last step.")
        elif self._is_early or (not self.ranks and event.exit_code >= 0):
            self._on_early_end(event, reason)
        elif event.exit_code == 0 and record.is_in_view:
            self._drop(worker)
            self._is_closing = self.phase is not ViewPhase.FORMING
        else:
            self._is_failure |= event.exit_code > 0 and record.is_in_view
            self._lose(worker, reason)

    def _kill_late(self) -> None:
        late = [n for n, w in self._workers.items() if self._now_s >= self._due_of(w)]
        if late:
            time_s = self._now_s - self._workers[late[0]].since_s
            more = f" and {len(late) - 1} more" if late[1:] else ""
            reason = f"{self._name(late[0])}{more} hung for {time_s:.0f} s"
            killed = late + self._count_failures(late)
            self._remove([], reason, killed=killed, hung=late)
        for worker, record in self._ending.items():
            if self._now_s >= record.since_s + self.rules.settle_s:
                record.since_s = inf
                name = name_worker(worker, None, record.worker.host)
                reason = f"{name} did not end when it was left out"
                self._orders.append(events.Kill(worker, reason, is_hung=True))

    def _due_of(self, record: _WorkerRecord) -> float:
        if record.state is _State.STARTING:
            return record.since_s + _START_S
        is_asked = (
            self.phase is ViewPhase.FORMING and record.state is not _State.WAITING
        )
        return record.since_s + self.rules.settle_s if is_asked else inf

    # What follows

    def _advance(self) -> None:
        if self._is_finished():
            self._finish()
            return
        is_start = not self.ranks
        if is_start:
            self._fill()
        self._count_waiting()
        if self.phase in (ViewPhase.FORMING, ViewPhase.PAUSING):
            self._form()
        if self.phase is ViewPhase.RUNNING:
            self._plan_change()
        if self.phase is not ViewPhase.STOPPED:
            if not is_start:
                self._fill()
            if self.phase is ViewPhase.RUNNING and self._starting_hosts():
                self._plan_change()
            self._release()
            self.due_s = min(self._times(), default=inf)

    def _finish(self) -> None:
        """Let the view's members end, and kill the other workers."""
        self.phase = ViewPhase.FINISHED
        alive = self._workers.keys() | {
            worker for worker, r in self._ending.items() if r.since_s < inf
        }
        for worker in sorted(alive - self.ranks.keys()):
            self._orders.append(events.Kill(worker, "all have done the last step"))
        self._workers = {n: self._workers[n] for n in self._present}
        self._send(self._present, Finish())

    def _form(self) -> None:
        if self._num[_State.ACTIVE]:
            return
        if self._num[_State.DONE]:
            # The others stopped after the last step.
            if self.phase is ViewPhase.PAUSING:
                self._end_view(self.reason)
            return
        if self.phase is ViewPhase.PAUSING:
            self.phase, self._forming_since_s = ViewPhase.FORMING, self._now_s
            self._is_planned = True
        if self.ranks and not self._present:
            self._stop(f"No rank has survived: {self.reason}.")
            return
        is_late = self._now_s >= self._forming_since_s + self.rules.formation_s
        if self._awaits_others(is_late=is_late):
            return
        staying, joining = self._choose()
        if len(staying) + len(joining) >= self._least:
            self._begin(staying, joining)
        elif is_late:
            self._stop_short(len(staying) + len(joining))

    def _awaits_others(self, *, is_late: bool) -> bool:
        if self.ranks:
            return self._is_planned and bool(self._starting_hosts())
        return not is_late and self._is_starting

    def _choose(self) -> tuple[list[int], list[int]]:
        """Return the members that stay in the next view, and the workers that join."""
        workers, present = self._workers, self._present
        joining = [
            worker
            for worker, w in workers.items()
            if w.state is _State.WAITING and not w.is_in_view
            if self._hosts[w.worker.host].blacklisted_until_s <= self._now_s
        ]
        staying = [n for n in present if n not in self._unwanted]
        if len(staying) + len(joining) < self._least:
            staying = present
        newest = max((workers[n].step for n in present), default=NEW)
        if newest != NEW and all(workers[n].step < newest for n in staying):
            # Only this worker has the state: it must stay until others have it.
            source = next(n for n in present if workers[n].step == newest)
            staying = [n for n in present if n in {source, *staying}]
        return staying, joining[: max(0, self.rules.max_ranks - len(staying))]

    def _begin(self, staying: list[int], joining: list[int]) -> None:
        workers, kept = self._workers, set(staying)
        ranked = [(n, r) for r, n in enumerate(self.ranks) if n in kept]
        order = order_ranks(ranked, joining) if ranked else joining
        steps = {n: workers[n].step for n in order}
        newest = max(steps.values())
        if newest > self._best_step:
            self._num_idle = 0
        self._num_idle += self._is_failure
        self._best_step, self._is_failure = max(newest, self._best_step), False
        limit, view = self.rules.reset_limit, self.view.view + 1
        if limit is not None and view > limit:
            self._stop(
                f"{RESET_LIMIT_EXCEEDED_MESSAGE.format(limit)}, the last time because "
                f"{self.reason}. Give a higher --reset-limit, or none."
            )
            return
        if self._num_idle >= _MAX_IDLE_VIEWS:
            self._stop(
                f"{_MAX_IDLE_VIEWS} times in a row a rank failed at step {newest + 1}, "
                f"the last time because {self.reason}."
            )
            return
        for worker in [n for n in self._present if n not in kept]:
            record = self._ending[worker] = workers[worker]
            self._send([worker], Leave(self._why_left(record)))
            self._drop(worker).since_s = self._now_s
        self._start_view(View(view, tuple(workers[n].worker for n in order)), newest)
        for worker in order:
            self._enter(workers[worker], _State.ACTIVE, newest)
            workers[worker].is_in_view = True
        self.phase = ViewPhase.RUNNING

    def _start_view(self, view: View, newest: int) -> None:
        """Send the next view: in full to new members, as a difference to old ones."""
        before, self.view = self.view, view
        former, self.ranks = self.ranks, view.ranks
        steps = [self._workers[worker.id].step for worker in view.members]
        whole = ViewBegins(
            view=view.view,
            key=self._make_key(),
            base=NO_VIEW,
            gone=(),
            new=view.members,
            source=view.members[steps.index(newest)].id,
            step=newest,
            is_equal=newest != NEW and set(steps) == {newest},
            reason=self.reason,
        )
        new = tuple(worker for worker in view.members if worker.id not in former)
        if len(new) < len(view.members):
            gone = tuple(worker for worker in former if worker not in self.ranks)
            change = whole._replace(base=before.view, gone=gone, new=new)
            self._send([worker for worker in self.ranks if worker in former], change)
        if new:
            self._send([worker.id for worker in new], whole)

    def _plan_change(self) -> None:
        if self._is_closing or self._num[_State.DONE]:
            return
        workers, present = self._workers, self._present
        staying, joining = self._choose()
        leaving = set(present).difference(staying)
        reason = self._why_left(workers[min(leaving)]) if leaving else ""
        if joining and not reason:
            first_s = min(workers[n].since_s for n in joining)
            if not self._num[_State.STARTING] or self._now_s >= first_s + _GATHER_S:
                hosts = sorted({workers[n].worker.host for n in joining})
                count = "a rank joins" if len(joining) == 1 else "ranks join"
                reason = f"{count} on {', '.join(hosts)}"
        if not reason and self._starting_hosts():
            reason = f"ranks start on {', '.join(self._starting_hosts())}"
        if reason:
            self.phase, self._reasons = ViewPhase.PAUSING, [reason]
            self._is_asking, self._last_step = True, NEW
            self._unanswered = set(present)
            self._send(present, AskStep(self.view.view))

    def _times(self) -> Iterator[float]:
        workers = self._workers.values()
        # Workers are in the order of their start.
        starting = (w for w in workers if w.state is _State.STARTING)
        yield next((w.since_s + _START_S for w in starting), inf)
        yield from (w.since_s + self.rules.settle_s for w in self._ending.values())
        later = [h.blacklisted_until_s for h in self._hosts.values()]
        if self._starting_hosts():
            later += [
                w.since_s + _JOIN_S for w in workers if w.state is _State.STARTING
            ]
        if self.phase is ViewPhase.FORMING:
            is_settled = not (self._num[_State.ACTIVE] + self._num[_State.DONE])
            yield inf if is_settled else self._forming_since_s + self.rules.settle_s
            later.append(self._forming_since_s + self.rules.formation_s)
        if self.phase is ViewPhase.RUNNING and self._num[_State.WAITING]:
            others = (w for w in workers if not w.is_in_view)
            later += [w.since_s + _GATHER_S for w in others]
        yield from (at_s for at_s in later if at_s > self._now_s)

    def _stop_short(self, size: int) -> None:
        slots = [f"{n}:{h.slots}" for n, h in self._hosts.items() if h.is_ready]
        blacklisted = self.blacklisted(self._now_s)
        left = [f"{name} for {s:.0f} s more" for name, s in blacklisted.items()]
        why = f" Blacklisted: {', '.join(left)}." if left else ""
        self._stop(
            f"{counted(size, 'rank')} for {self.rules.formation_s:g} s, but "
            f"--min-ranks is {self.rules.min_ranks}: {self.reason}. Hosts: "
            f"{', '.join(slots) or 'none'}.{why} Lower --min-ranks, or bring a host "
            "back.",
            is_too_few=True,
        )
