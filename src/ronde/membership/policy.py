"""Which processes of an elastic job train together: a function of what happened.

No clock, no input or output: every event brings the time, every answer is a list of
orders. The launcher, Horovod's ``ElasticDriver`` and the simulator carry them out.

Note [Who is in the next view]
    Survivors always are, unless their host is to be left and there are ``min_ranks``
    without them; a survivor that alone has the newest state stays until another has it.
    Newcomers fill up to ``max_ranks``; those beyond are spares, which wait, connected
    to nobody, and are in the next view as soon as somebody is lost. So do newcomers on
    a host that is barred, until that ends. A view that lost a member is followed at
    once by one of the survivors if they are ``min_ranks``; only then are others started
    in its place.

    A process that ends with 0 may have finished, so its view goes on: if it had not,
    the others miss it, and settle unasked.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, auto
from math import inf
from typing import NamedTuple

from ronde.membership.events import (
    Barred,
    BeginView,
    Connect,
    Dismiss,
    EndView,
    Event,
    FinishAll,
    HostGone,
    HostLeaves,
    HostReady,
    HostsFound,
    Kill,
    MemberDone,
    MemberLost,
    MemberSettled,
    Order,
    PauseView,
    Release,
    StartProcess,
    Stop,
    Tick,
)
from ronde.membership.view import NEW, NO_VIEW, Place, order_ranks
from ronde.units import counted

RESET_LIMIT_EXCEEDED_MESSAGE = (
    "Horovod was shutdown because number of resets during elastic job exceeded "
    "limit: {}"
)
"""Horovod's words, which its users look for."""
_FAILURES, _FAILURES_WITHIN_S = 3, 600.0  # of one host, before it is barred
_MAX_IDLE_VIEWS = 3  # in a row that a program's failure ended at one step
_START_S = 600.0  # a process may start for so long; at first the others wait for it
_JOIN_S = 60.0  # those that start are awaited for so long where that is wanted
_GATHER_S = 5.0  # newcomers wait for others that start, so that all join at once


class Rules(NamedTuple):
    """What the user asked for."""

    min_ranks: int
    max_ranks: int
    spares: int = 0
    is_host_domain: bool = False  # with one rank its whole host has failed
    # those of the view stop for others as soon as they start, as Horovod's do
    awaits_joining: bool = False
    cooldown_s: tuple[float, float] = (30.0, 3600.0)  # first and longest, doubling
    # for so long fewer than ``min_ranks`` are waited for, once the first have started
    formation_s: float = 600.0
    settle_s: float = 30.0  # within which a member must have left a view that ended
    reset_limit: int | None = None  # so many views may follow the first


class ViewPhase(Enum):
    """What the view does."""

    FORMING = auto()  # there is none, or it has ended and not all have left it
    RUNNING = auto()
    PAUSING = auto()  # it goes on up to a common step
    FINISHED = auto()  # all steps are done
    STOPPED = auto()


class _State(IntEnum):  # hashed for every report, so no ``Enum``
    STARTING = auto()
    WAITING = auto()  # settled
    ACTIVE = auto()
    DONE = auto()


@dataclass(slots=True)
class _Member:
    place: Place
    since_s: float  # when it came to its state
    state: _State = _State.STARTING
    step: int = NEW
    is_in_view: bool = False


@dataclass(slots=True)
class _Host:
    slots: int
    is_known: bool = True  # it is among those found
    is_ready: bool = False
    is_connecting: bool = False
    leaves: str = ""  # why it is to be left
    cooldown_s: float = 0.0
    barred_until_s: float = -inf
    failures_s: list[float] = field(default_factory=list[float])
    used: dict[int, int] = field(default_factory=dict[int, int])  # slot to process

    @property
    def is_left(self) -> bool:
        return bool(self.leaves) or not self.is_known

    def is_usable(self, now_s: float) -> bool:
        return self.barred_until_s <= now_s and not self.is_left and self.slots != 0


class _Roster:
    """The members of a job and its hosts, and what the loss of some of them means."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.phase = ViewPhase.FORMING
        self.view = NO_VIEW
        self.ranks: tuple[int, ...] = ()  # members of the view, by rank
        self.due_s = inf  # when ``Tick`` is due, at the earliest
        self._members: dict[int, _Member] = {}
        self._num = Counter[_State]()  # members in each state
        self._ending: dict[int, _Member] = {}  # killed or dismissed, but not gone yet
        self._unwanted: set[int] = set()  # members of the view whose places are left
        self._hosts: dict[str, _Host] = {}
        self._next_number = 0
        self._reasons = ["the job starts"]  # why the view ended, or is to
        self._is_symptom = False  # that is what another's loss has brought about
        self._best_step = NEW
        self._num_idle = 0
        self._is_failure = False  # the view ended by one of the program
        self._is_planned = False  # it ended after a common step
        self._first_s = inf  # when the job began
        self._forming_since_s = inf
        self._leaver = (
            ""  # who has ended with 0 before the first view, in half a sentence
        )
        self._is_closing = False  # a rank has ended as if all were done
        self._orders: list[Order] = []

    @property
    def num_living(self) -> int:
        return len(self._members)

    def place_of(self, number: int) -> Place | None:
        member = self._members.get(number)
        return member.place if member else None

    def barred(self, now_s: float) -> dict[str, float]:
        """Return for how many seconds more each host is not used."""
        left = {n: h.barred_until_s - now_s for n, h in self._hosts.items()}
        return {name: left_s for name, left_s in left.items() if left_s > 0}

    def _host(self, name: str) -> _Host:
        return self._hosts.setdefault(name, _Host(-1, is_known=False))

    def _take_hosts(self, slots: Mapping[str, int], now_s: float) -> None:
        kept = {name: host for name, host in self._hosts.items() if name in slots}
        gone = {n: host for n, host in self._hosts.items() if n not in slots}
        for host in gone.values():
            host.is_known = False
        for name, number in slots.items():
            host = kept.setdefault(name, _Host(number))
            host.is_known = True
            host.slots = number if number >= 0 else host.slots
        # Known ones keep their order, new ones follow.
        self._hosts = kept | gone
        for name in self._hosts:
            self._review(name, now_s)

    def _review(self, name: str, now_s: float) -> None:
        """Note which of a host's places are left, and kill who waits there."""
        for number in self._members_on(name):
            reason = self._why_left(self._members[number])
            (self._unwanted.add if reason else self._unwanted.discard)(number)
            if reason and not self._members[number].is_in_view:
                self._remove([], reason, now_s, killed=[number])

    @property
    def _present(self) -> list[int]:
        return [number for number in self.ranks if number in self._members]

    @property
    def _least(self) -> int:
        return max(1, self.rules.min_ranks)

    def _members_on(self, host: str) -> list[int]:
        return [n for n in self._hosts[host].used.values() if n in self._members]

    def _why_left(self, member: _Member) -> str:
        """Return why a member's place is not to be used any more, or nothing."""
        name = member.place.host
        host = self._hosts[name]
        if not host.is_known:
            return f"{name} is no longer among the hosts"
        if 0 <= host.slots <= member.place.slot:
            return host.leaves or f"{name} has {counted(host.slots, 'slot')} now"
        return host.leaves

    def _enter(self, member: _Member, state: _State, step: int, now_s: float) -> None:
        self._num[member.state] -= 1
        self._num[state] += 1
        member.state, member.step, member.since_s = state, step, now_s

    def _drop(self, number: int) -> _Member:
        member = self._members.pop(number)
        self._num[member.state] -= 1
        self._unwanted.discard(number)
        if number not in self._ending:
            del self._hosts[member.place.host].used[member.place.slot]
        return member

    def _remove(
        self,
        lost: Collection[int],
        reason: str,
        now_s: float,
        killed: Collection[int] = (),
        hung: Collection[int] = (),
    ) -> None:
        """Forget members; the view ends if one of them took part in it."""
        is_early = self._is_early
        for number in killed:
            self._orders.append(Kill(number, reason, number in hung))
            self._ending[number] = replace(self._members[number], since_s=inf)
        dropped = [self._drop(number) for number in (*lost, *killed)]
        if dropped and is_early:
            self._stop_early(reason)
        elif self.phase in (ViewPhase.RUNNING, ViewPhase.PAUSING):
            if any(m.state in (_State.ACTIVE, _State.DONE) for m in dropped):
                self._end_view(reason, now_s)
        elif any(m.is_in_view for m in dropped):
            known = [] if self._is_symptom else self._reasons
            self._reasons, self._is_symptom = [*known, reason], False

    @property
    def _reason(self) -> str:
        first, *others = self._reasons
        if len(others) > 1:
            return f"{first}, and {len(others)} more were lost"
        return " and ".join(self._reasons)

    @property
    def _is_early(self) -> bool:
        """Whether no rank has shown so far that the program is an elastic one."""
        return self.view == NO_VIEW and not self._num[_State.WAITING]

    def _stop_early(self, reason: str) -> None:
        self._stop(f"{reason} before any rank was ready.")

    def _take_early_end(self, event: MemberLost, now_s: float) -> None:
        """Follow a process that has ended by itself before the first view."""
        is_alone = self._is_early
        if event.exit_code == 0:
            self._drop(event.number)
            self._is_closing, self._leaver = True, event.reason
            if not is_alone:
                self._stop_unjoined()
            return
        if is_alone:
            self._stop_early(event.reason)
            return
        self._lose(event, now_s)
        if not any(h.is_ready and h.is_usable(now_s) for h in self._hosts.values()):
            self._stop(
                f"Processes failed on all hosts before they were ready, the last time "
                f"as {event.reason}."
            )

    def _lose(self, event: MemberLost, now_s: float) -> None:
        others = self._count_failures([event.number], now_s)
        self._remove([event.number], event.reason, now_s, killed=others)

    def _stop_unjoined(self) -> None:
        self._stop(
            f"{self._leaver} without the others, which wait in hvd.init(). Have all "
            "ranks call it."
        )

    def _stop(self, reason: str, *, is_too_few: bool = False) -> None:
        self.phase = ViewPhase.STOPPED
        self._orders.append(Stop(reason, is_too_few))

    def _count_failures(self, numbers: list[int], now_s: float) -> list[int]:
        """Bar hosts where members have failed; return who goes with them."""
        others: list[int] = []
        names = Counter(self._members[number].place.host for number in numbers)
        # Of a job on one host nothing would be left.
        is_by_host = self.rules.is_host_domain and len(self._hosts) > 1
        for name, count in names.items():
            host, since_s = self._hosts[name], now_s - _FAILURES_WITHIN_S
            host.failures_s = [at_s for at_s in host.failures_s if at_s > since_s]
            host.failures_s += [now_s] * count
            if is_by_host:
                others += self._members_on(name)
            if is_by_host or len(host.failures_s) >= _FAILURES:
                num_failures = len(host.failures_s)
                self._bar(host, now_s)
                if host.cooldown_s:
                    self._orders.append(Barred(name, num_failures, host.cooldown_s))
        return sorted(set(others).difference(numbers))

    def _bar(self, host: _Host, now_s: float) -> None:
        low_s, high_s = self.rules.cooldown_s
        host.cooldown_s = min(max(low_s, 2 * host.cooldown_s), high_s)
        host.barred_until_s = now_s + host.cooldown_s
        host.failures_s = []

    def _end_view(self, reason: str, now_s: float) -> None:
        self.phase, self._is_symptom = ViewPhase.FORMING, False
        self._reasons = [reason]
        self._forming_since_s, self._is_closing = now_s, False
        self._is_planned = False
        members = self._members
        left = [n for n in self._present if members[n].state is not _State.WAITING]
        for number in left:
            members[number].since_s = now_s
        if left and not self._is_finished():
            self._orders.append(EndView(tuple(left), reason))

    @property
    def _is_starting(self) -> bool:
        is_connecting = any(h.is_connecting for h in self._hosts.values())
        return is_connecting or self._num[_State.STARTING] > 0

    def _count_waiting(self, now_s: float) -> None:
        """Count the time without enough members, but not that of the first start."""
        self._first_s = min(self._first_s, now_s)
        is_first = self.view == NO_VIEW and now_s < self._first_s + _START_S
        is_counted = not (is_first and self._is_starting)
        self._forming_since_s = min(self._forming_since_s, now_s) if is_counted else inf

    def _is_finished(self) -> bool:
        """Return whether all of the view have done the last step, or ended with 0."""
        if self.view == NO_VIEW:
            return self._is_closing and not self._members
        present = [self._members[number].state for number in self._present]
        goes_on = self.phase is not ViewPhase.FORMING
        return (bool(present) or goes_on) and all(s is _State.DONE for s in present)

    def _free_slots(self, now_s: float) -> Iterator[tuple[str, int]]:
        for name, host in self._hosts.items():
            has_room = len(host.used) < host.slots or self._unwanted or self._ending
            if host.is_ready and has_room and host.is_usable(now_s):
                yield from ((name, n) for n in range(host.slots) if n not in host.used)

    def _starting_hosts(self, now_s: float) -> list[str]:
        """Return where members start that are to be awaited."""
        if not (self.rules.awaits_joining and self._num[_State.STARTING]):
            return []
        starting = [m for m in self._members.values() if m.state is _State.STARTING]
        awaited = [m for m in starting if now_s < m.since_s + _JOIN_S]
        return sorted({m.place.host for m in awaited})


class Membership(_Roster):
    """The state of an elastic job's membership."""

    def apply(self, event: Event, now_s: float) -> list[Order]:
        """Return what follows from an event, in order."""
        self._orders = []
        if self.phase is not ViewPhase.STOPPED:
            self._take(event, now_s)
        is_over = self.phase in (ViewPhase.FINISHED, ViewPhase.STOPPED)
        if not is_over and (self._orders or not self._awaits_more(event, now_s)):
            self._advance(now_s)
        return self._orders

    def _awaits_more(self, event: Event, now_s: float) -> bool:
        """Return whether a report is one of many, and nothing follows before the last.

        This is what keeps a change linear in the number of ranks.
        """
        num_active = self._num[_State.ACTIVE]
        if isinstance(event, MemberSettled):
            if self.view == NO_VIEW or self.phase is ViewPhase.RUNNING:
                self.due_s = min(self.due_s, now_s + _GATHER_S)
                return self._num[_State.STARTING] > 0
            num_done = self._num[_State.DONE] if self.phase is ViewPhase.FORMING else 0
            return num_active + num_done > 0
        is_end = isinstance(event, MemberLost) and self._is_closing
        return (is_end or isinstance(event, MemberDone)) and num_active > 0

    # Events

    def _take(self, event: Event, now_s: float) -> None:
        match event:
            case HostsFound():
                self._take_hosts(event.slots, now_s)
            case HostReady():
                host = self._hosts.setdefault(event.host, _Host(event.slots))
                host.slots, host.is_ready, host.is_connecting = event.slots, True, False
                self._review(event.host, now_s)
            case HostGone():
                self._take_host_gone(event, now_s)
            case HostLeaves():
                host = self._host(event.host)
                host.leaves = event.reason if host.is_ready else ""
                self._review(event.host, now_s)
            case MemberSettled():
                self._take_settled(event, now_s)
            case MemberDone():
                member = self._members.get(event.number)
                if member is not None and member.state is _State.ACTIVE:
                    self._enter(member, _State.DONE, event.step, member.since_s)
            case MemberLost():
                self._take_lost(event, now_s)
            case Tick():
                self._kill_late(now_s)

    def _take_host_gone(self, event: HostGone, now_s: float) -> None:
        host = self._host(event.host)
        host.is_ready, host.is_connecting, host.leaves = False, False, ""
        self._bar(host, now_s)
        for number in host.used.values():
            self._ending.pop(number, None)
        self._remove(self._members_on(event.host), event.reason, now_s)
        host.used.clear()

    def _take_settled(self, event: MemberSettled, now_s: float) -> None:
        member = self._members.get(event.number)
        if member is None or self.phase is ViewPhase.FINISHED:
            return
        was_active = member.state in (_State.ACTIVE, _State.DONE)
        self._enter(member, _State.WAITING, event.step, now_s)
        if self._leaver:
            self._stop_unjoined()
            return
        is_asked = self.phase is ViewPhase.PAUSING and not event.reason
        if was_active and not is_asked and self.phase is not ViewPhase.FORMING:
            reason = event.reason or f"rank of process {event.number} left it"
            self._end_view(reason, now_s)
            self._is_symptom = True

    def _take_lost(self, event: MemberLost, now_s: float) -> None:
        ended = self._ending.pop(event.number, None) if event.has_ended else None
        if ended is not None:
            del self._hosts[ended.place.host].used[ended.place.slot]
        member = self._members.get(event.number)
        if member is None:
            return
        if not event.has_ended:
            self._ending[event.number] = replace(member, since_s=now_s)
        if self.phase is ViewPhase.FINISHED:
            self._remove([event.number], event.reason, now_s)
            if event.exit_code:
                self._stop(f"{event.reason} after the last step.")
        elif self._is_early or (self.view == NO_VIEW and event.exit_code >= 0):
            self._take_early_end(event, now_s)
        elif event.exit_code == 0 and member.is_in_view:
            self._drop(event.number)
            self._is_closing = self.phase is not ViewPhase.FORMING
        else:
            self._is_failure |= event.exit_code > 0 and member.is_in_view
            self._lose(event, now_s)

    def _kill_late(self, now_s: float) -> None:
        late = [n for n, m in self._members.items() if now_s >= self._due_of(m)]
        if late:
            first = self._members[late[0]]
            what = f"process {late[0]}"
            if late[0] in self.ranks:
                what = f"rank {self.ranks.index(late[0])}"
            more = f" and {len(late) - 1} more" if late[1:] else ""
            time_s = now_s - first.since_s
            reason = f"{what} on {first.place.host}{more} hung for {time_s:.0f} s"
            killed = late + self._count_failures(late, now_s)
            self._remove([], reason, now_s, killed=killed, hung=late)
        for number, member in self._ending.items():
            if now_s >= member.since_s + self.rules.settle_s:
                member.since_s = inf
                host = member.place.host
                reason = f"process {number} on {host} did not end when it was left out"
                self._orders.append(Kill(number, reason, is_hung=True))

    def _due_of(self, member: _Member) -> float:
        if member.state is _State.STARTING:
            return member.since_s + _START_S
        is_asked = (
            self.phase is ViewPhase.FORMING and member.state is not _State.WAITING
        )
        return member.since_s + self.rules.settle_s if is_asked else inf

    # What follows

    def _advance(self, now_s: float) -> None:
        if self._is_finished():
            self.phase = ViewPhase.FINISHED
            self._members = {n: self._members[n] for n in self._present}
            self._orders.append(FinishAll())
            return
        is_start = self.view == NO_VIEW
        if is_start:
            self._fill(now_s)
        self._count_waiting(now_s)
        if self.phase in (ViewPhase.FORMING, ViewPhase.PAUSING):
            self._form(now_s)
        if self.phase is ViewPhase.RUNNING:
            self._plan_change(now_s)
        if self.phase is not ViewPhase.STOPPED:
            if not is_start:
                self._fill(now_s)
            if self.phase is ViewPhase.RUNNING and self._starting_hosts(now_s):
                self._plan_change(now_s)
            self._release(now_s)
            self.due_s = min(self._times(now_s), default=inf)

    def _form(self, now_s: float) -> None:
        if self._num[_State.ACTIVE]:
            return
        if self._num[_State.DONE]:
            # The others stopped after the last step.
            if self.phase is ViewPhase.PAUSING:
                self._end_view(self._reason, now_s)
            return
        if self.phase is ViewPhase.PAUSING:
            self.phase, self._forming_since_s = ViewPhase.FORMING, now_s
            self._is_planned = True
        if self.view != NO_VIEW and not self._present:
            self._stop(f"No rank has survived: {self._reason}.")
            return
        is_late = now_s >= self._forming_since_s + self.rules.formation_s
        if self._awaits_others(now_s, is_late=is_late):
            return
        staying, joining = self._choose(now_s)
        if len(staying) + len(joining) >= self._least:
            self._begin(staying, joining, now_s)
        elif is_late:
            self._stop_short(len(staying) + len(joining), now_s)

    def _awaits_others(self, now_s: float, *, is_late: bool) -> bool:
        if self.view != NO_VIEW:
            return self._is_planned and bool(self._starting_hosts(now_s))
        return not is_late and self._is_starting

    def _choose(self, now_s: float) -> tuple[list[int], list[int]]:
        """Return who of the view goes on, and who joins, if all settle now."""
        members, present = self._members, self._present
        joining = [
            number
            for number, m in members.items()
            if m.state is _State.WAITING and not m.is_in_view
            if self._hosts[m.place.host].barred_until_s <= now_s
        ]
        staying = [n for n in present if n not in self._unwanted]
        if len(staying) + len(joining) < self._least:
            staying = present
        newest = max((members[n].step for n in present), default=NEW)
        if newest != NEW and all(members[n].step < newest for n in staying):
            # It alone has the state: it leaves once others have it, too.
            source = next(n for n in present if members[n].step == newest)
            staying = [n for n in present if n in {source, *staying}]
        return staying, joining[: max(0, self.rules.max_ranks - len(staying))]

    def _begin(self, staying: list[int], joining: list[int], now_s: float) -> None:
        members, kept = self._members, set(staying)
        ranked = [(n, r) for r, n in enumerate(self.ranks) if n in kept]
        order = order_ranks(ranked, joining) if ranked else joining
        steps = {n: members[n].step for n in order}
        newest = max(steps.values())
        if newest > self._best_step:
            self._num_idle = 0
        self._num_idle += self._is_failure
        self._best_step, self._is_failure = max(newest, self._best_step), False
        self.view += 1
        limit = self.rules.reset_limit
        if limit is not None and self.view > limit:
            self._stop(
                f"{RESET_LIMIT_EXCEEDED_MESSAGE.format(limit)}, the last time as "
                f"{self._reason}. Give a higher --reset-limit, or none."
            )
            return
        if self._num_idle >= _MAX_IDLE_VIEWS:
            self._stop(
                f"{_MAX_IDLE_VIEWS} times in a row a rank failed at step {newest + 1}, "
                f"the last time as {self._reason}."
            )
            return
        for number in [n for n in self._present if n not in kept]:
            member = self._ending[number] = members[number]
            self._orders.append(Dismiss(number, self._why_left(member)))
            self._drop(number).since_s = now_s
        self._orders.append(
            BeginView(
                view=self.view,
                members=tuple(members[n].place for n in order),
                gone=tuple(n for n in self.ranks if n not in kept),
                new=tuple(members[n].place for n in joining),
                source=next(n for n in order if steps[n] == newest),
                step=newest,
                is_equal=newest != NEW and set(steps.values()) == {newest},
                reason=self._reason,
            )
        )
        for number in order:
            self._enter(members[number], _State.ACTIVE, newest, now_s)
            members[number].is_in_view = True
        self.ranks, self.phase = tuple(order), ViewPhase.RUNNING

    def _plan_change(self, now_s: float) -> None:
        if self._is_closing or self._num[_State.DONE]:
            return
        members, present = self._members, self._present
        staying, joining = self._choose(now_s)
        leaving = set(present).difference(staying)
        reason = self._why_left(members[min(leaving)]) if leaving else ""
        if joining and not reason:
            first_s = min(members[n].since_s for n in joining)
            if not self._num[_State.STARTING] or now_s >= first_s + _GATHER_S:
                hosts = sorted({members[n].place.host for n in joining})
                count = "a rank joins" if len(joining) == 1 else "ranks join"
                reason = f"{count} on {', '.join(hosts)}"
        if not reason and self._starting_hosts(now_s):
            reason = f"ranks start on {', '.join(self._starting_hosts(now_s))}"
        if reason:
            self.phase, self._reasons = ViewPhase.PAUSING, [reason]
            self._orders.append(PauseView(tuple(present), reason))

    def _fill(self, now_s: float) -> None:
        """Start processes where there is room; connect to hosts that may have it."""
        members = self._members
        num_lacking = self.rules.max_ranks + self.rules.spares
        num_lacking -= len(members) - len(self._unwanted)
        if num_lacking < 0:
            others = [n for n, m in members.items() if not m.is_in_view]
            surplus = others[num_lacking:]
            self._remove([], "there are enough without it", now_s, killed=surplus)
        # Survivors that will do settle first.
        can_form = self.phase is ViewPhase.FORMING and len(self._present) >= self._least
        is_ending = self._is_closing or self._num[_State.DONE] > 0
        if num_lacking <= 0 or can_form or is_ending:
            return
        for name, slot in self._free_slots(now_s):
            if num_lacking <= 0:
                return
            place = Place(self._next_number, name, slot)
            self._next_number += 1
            members[place.number] = _Member(place, now_s)
            self._num[_State.STARTING] += 1
            self._hosts[name].used[slot] = place.number
            self._orders.append(StartProcess(place))
            num_lacking -= 1
        for name, host in self._hosts.items():
            if num_lacking <= 0:
                return
            if host.is_connecting:
                num_lacking -= max(1, host.slots)
            elif host.is_usable(now_s) and not host.is_ready:
                host.is_connecting = True
                self._orders.append(Connect(name))
                num_lacking -= max(1, host.slots)

    def _release(self, now_s: float) -> None:
        for name, host in self._hosts.items():
            if host.is_ready and host.is_left and not host.used:
                if host.leaves:
                    self._bar(host, now_s)
                host.is_ready, host.leaves = False, ""
                self._orders.append(Release(name))

    def _times(self, now_s: float) -> Iterator[float]:
        members = self._members.values()
        # Those that start are in the order of their times.
        starting = (m for m in members if m.state is _State.STARTING)
        yield next((m.since_s + _START_S for m in starting), inf)
        yield from (m.since_s + self.rules.settle_s for m in self._ending.values())
        later = [h.barred_until_s for h in self._hosts.values()]
        if self._starting_hosts(now_s):
            later += [
                m.since_s + _JOIN_S for m in members if m.state is _State.STARTING
            ]
        if self.phase is ViewPhase.FORMING:
            is_settled = not (self._num[_State.ACTIVE] + self._num[_State.DONE])
            yield inf if is_settled else self._forming_since_s + self.rules.settle_s
            later.append(self._forming_since_s + self.rules.formation_s)
        if self.phase is ViewPhase.RUNNING and self._num[_State.WAITING]:
            others = (m for m in members if not m.is_in_view)
            later += [m.since_s + _GATHER_S for m in others]
        yield from (at_s for at_s in later if at_s > now_s)

    def _stop_short(self, size: int, now_s: float) -> None:
        slots = [f"{n}:{h.slots}" for n, h in self._hosts.items() if h.is_ready]
        barred = [f"{n} for {s:.0f} s more" for n, s in self.barred(now_s).items()]
        why = f" Barred: {', '.join(barred)}." if barred else ""
        self._stop(
            f"size must be at least min-ranks, {self.rules.min_ranks}, got {size} for "
            f"{self.rules.formation_s:g} s, as {self._reason}. Hosts: "
            f"{', '.join(slots) or 'none'}.{why} Lower --min-ranks, or bring a host "
            "back.",
            is_too_few=True,
        )
