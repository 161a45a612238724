"""Which processes of an elastic job train together: a function of what happened.

No clock, no input or output: every event brings the time, every answer is a list of
orders. The launcher, Horovod's ``ElasticDriver`` and the simulator carry them out.

Note [Who is in the next view]
    Survivors always are, unless their host is to be left; a survivor that alone has
    the newest state stays until another has it. Newcomers fill up to ``max_ranks``;
    those beyond are spares, which wait, connected to nobody, and are in the next view
    as soon as somebody is lost. A view that lost a member is followed at once by one of
    the survivors if they are ``min_ranks``; only then are others started in its place.

    A process that ends with 0 may have finished, so its view goes on: if it had not,
    the others miss it, and settle unasked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import NamedTuple

from ronde.membership.view import NEW, NO_VIEW, Place, order_ranks

_FAILURES, _FAILURES_WITHIN_S = 3, 600.0  # of one host, before it is barred
_MAX_IDLE_VIEWS = 3
_GATHER_S = 5.0  # newcomers wait for others that start, so that all join at once


class Rules(NamedTuple):
    """What the user asked for."""

    min_ranks: int
    max_ranks: int
    spares: int = 0
    is_host_domain: bool = False  # with one rank its whole host has failed
    cooldown_s: tuple[float, float] = (30.0, 3600.0)  # first and longest, doubling
    formation_s: float = 600.0  # for so long fewer than ``min_ranks`` are waited for
    settle_s: float = 30.0  # within which a member must have left a view that ended
    reset_limit: int | None = None  # so many views may follow the first


class HostsFound(NamedTuple):
    """All hosts that may be used, in their order, with their slots; -1 for unknown."""

    slots: Mapping[str, int]


class HostReady(NamedTuple):
    """An agent is there, and ranks can be started."""

    host: str
    slots: int


class HostGone(NamedTuple):
    """A host did not get ready, or was lost with all that ran there."""

    host: str
    reason: str  # in half a sentence: ``node1 was lost: no message from it for 5 s``


class HostLeaves(NamedTuple):
    """A host is to be left at the next step boundary."""

    host: str
    reason: str


class MemberSettled(NamedTuple):
    """See ``view.Settled``."""

    number: int
    step: int
    reason: str = ""


class MemberDone(NamedTuple):
    """A member has applied the last step."""

    number: int
    step: int


class MemberLost(NamedTuple):
    """A process has ended."""

    number: int
    exit_code: int  # as ``subprocess`` has it
    reason: str  # in half a sentence: ``rank 2 on node1 was killed by SIGKILL``


class Tick(NamedTuple):
    """It is time to look at the clock: see ``Membership.due_s``."""


Event = (
    HostsFound
    | HostReady
    | HostGone
    | HostLeaves
    | MemberSettled
    | MemberDone
    | MemberLost
    | Tick
)


class Connect(NamedTuple):
    """Bring an agent to a host."""

    host: str


class Release(NamedTuple):
    """A host has no member any more and is not used for now."""

    host: str


class Start(NamedTuple):
    """Start a process."""

    place: Place


class Kill(NamedTuple):
    """End a process now; ``MemberLost`` is not awaited."""

    number: int
    reason: str


class EndView(NamedTuple):
    """Have these members break off."""

    numbers: tuple[int, ...]
    reason: str


class PauseView(NamedTuple):
    """Have these members settle after a common step."""

    numbers: tuple[int, ...]
    reason: str


class BeginView(NamedTuple):
    """Have the members of a view connect, in the order of their ranks."""

    view: int
    members: tuple[Place, ...]
    gone: tuple[int, ...]  # members of the view before
    new: tuple[Place, ...]  # not in the view before
    source: int
    step: int
    is_equal: bool
    reason: str


class Dismiss(NamedTuple):
    """Have a member that has settled end with 0."""

    number: int
    reason: str


class FinishAll(NamedTuple):
    """All have applied the last step; end who is not in the view."""


class Stop(NamedTuple):
    """The job cannot go on."""

    reason: str  # a sentence
    is_too_few: bool = False  # ranks, for too long


Order = (
    Connect
    | Release
    | Start
    | Kill
    | EndView
    | PauseView
    | BeginView
    | Dismiss
    | FinishAll
    | Stop
)


class Phase(Enum):
    """What the view does."""

    FORMING = auto()  # there is none, or it has ended and not all have left it
    RUNNING = auto()
    PAUSING = auto()  # it goes on up to a common step
    FINISHED = auto()  # all steps are done
    STOPPED = auto()


class _State(Enum):
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


@dataclass(slots=True)
class _Host:
    slots: int
    is_known: bool = True  # it is among those found
    is_ready: bool = False
    is_connecting: bool = False
    is_leaving: bool = False
    barred_until_s: float = -inf
    num_bars: int = 0
    failures_s: list[float] = field(default_factory=list[float])

    def is_usable(self, now_s: float) -> bool:
        is_free = self.barred_until_s <= now_s
        return self.is_known and not self.is_leaving and is_free and self.slots != 0


class Membership:
    """The state of an elastic job's membership."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.phase = Phase.FORMING
        self.view = NO_VIEW
        self.ranks: tuple[int, ...] = ()  # members of the view, by rank
        self.due_s = inf  # when ``Tick`` is due
        self._members: dict[int, _Member] = {}
        self._hosts: dict[str, _Host] = {}
        self._next_number = 0
        self._reason = "the job starts"
        self._best_step = NEW
        self._num_idle = 0  # views in a row that a program's failure ended at one step
        self._is_failure = False  # the view ended by one
        self._forming_since_s: float | None = None
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

    def apply(self, event: Event, now_s: float) -> list[Order]:
        """Return what follows from an event, in order."""
        self._orders = []
        if not self._is_stopped:
            self._take(event, now_s)
        if not self._is_stopped:
            self._advance(now_s)
        return self._orders

    # Events

    def _take(self, event: Event, now_s: float) -> None:
        match event:
            case HostsFound():
                self._take_hosts(event.slots)
            case HostReady():
                host = self._hosts.setdefault(event.host, _Host(event.slots))
                host.slots, host.is_ready, host.is_connecting = event.slots, True, False
            case HostGone():
                self._take_host_gone(event, now_s)
            case HostLeaves():
                self._host(event.host).is_leaving = True
                self._reason = event.reason
            case MemberSettled():
                self._take_settled(event, now_s)
            case MemberDone():
                self._take_done(event)
            case MemberLost():
                self._take_lost(event, now_s)
            case Tick():
                self._kill_late(now_s)

    def _host(self, name: str) -> _Host:
        return self._hosts.setdefault(name, _Host(-1, is_known=False))

    def _take_hosts(self, slots: Mapping[str, int]) -> None:
        kept = {name: host for name, host in self._hosts.items() if name in slots}
        gone = {n: host for n, host in self._hosts.items() if n not in slots}
        for name, host in gone.items():
            if host.is_known and self._members_on(name):
                self._reason = f"{name} is no longer among the hosts"
            host.is_known = False
        for name, number in slots.items():
            host = kept.setdefault(name, _Host(number))
            host.is_known = True
            host.slots = number if number >= 0 else host.slots
        # Known ones keep their order, new ones follow.
        self._hosts = kept | gone

    def _take_host_gone(self, event: HostGone, now_s: float) -> None:
        host = self._host(event.host)
        host.is_ready = host.is_connecting = host.is_leaving = False
        self._bar(host, now_s)
        for number in self._members_on(event.host):
            self._remove(number, event.reason, now_s)

    def _take_settled(self, event: MemberSettled, now_s: float) -> None:
        member = self._members.get(event.number)
        if member is None:
            return
        was_active = member.state in (_State.ACTIVE, _State.DONE)
        member.state, member.step, member.since_s = _State.WAITING, event.step, now_s
        is_unasked = self.phase is Phase.RUNNING or event.reason
        if was_active and is_unasked and self.phase is not Phase.FORMING:
            self._end_view(event.reason or f"rank of process {event.number} left it")

    def _take_done(self, event: MemberDone) -> None:
        member = self._members.get(event.number)
        if member is not None and member.state is _State.ACTIVE:
            member.state, member.step = _State.DONE, event.step
        if all(self._members[n].state is _State.DONE for n in self._present):
            self.phase = Phase.FINISHED
            self._orders.append(FinishAll())
            self._members = {n: self._members[n] for n in self._present}

    def _take_lost(self, event: MemberLost, now_s: float) -> None:
        member = self._members.get(event.number)
        if member is None:
            return
        name = member.place.host
        if self.phase is Phase.FINISHED or event.exit_code == 0:
            del self._members[event.number]
            self._is_closing = True
            if event.exit_code:
                self._stop(f"{event.reason} after the last step.")
            return
        is_first = self.view == NO_VIEW and member.state is _State.STARTING
        self._is_failure = event.exit_code > 0
        self._remove(event.number, event.reason, now_s)
        has_others = any(m.state is _State.WAITING for m in self._members.values())
        if is_first and self._is_failure and not has_others:
            self._stop(f"{event.reason} before any rank was ready.")
            return
        self._count_failure(name, now_s)
        if self.rules.is_host_domain:
            for number in self._members_on(name):
                self._kill(number, event.reason, now_s)

    def _count_failure(self, name: str, now_s: float) -> None:
        host = self._host(name)
        host.failures_s = [
            *(at_s for at_s in host.failures_s if at_s > now_s - _FAILURES_WITHIN_S),
            now_s,
        ]
        if self.rules.is_host_domain or len(host.failures_s) >= _FAILURES:
            self._bar(host, now_s)

    def _bar(self, host: _Host, now_s: float) -> None:
        low_s, high_s = self.rules.cooldown_s
        host.barred_until_s = now_s + min(low_s * 2**host.num_bars, high_s)
        host.num_bars += 1
        host.failures_s = []

    def _kill_late(self, now_s: float) -> None:
        for number, member in list(self._members.items()):
            if now_s >= self._due_of(member):
                limit_s = now_s - member.since_s
                place = member.place
                reason = f"process {number} on {place.host} gave no word"
                self._kill(number, f"{reason} for {limit_s:.0f} s", now_s)
                self._count_failure(place.host, now_s)

    def _due_of(self, member: _Member) -> float:
        if member.state is _State.STARTING:
            return member.since_s + self.rules.formation_s
        is_asked = self.phase is Phase.FORMING and member.state is not _State.WAITING
        return member.since_s + self.rules.settle_s if is_asked else inf

    # Members

    @property
    def _is_stopped(self) -> bool:
        return self.phase is Phase.STOPPED

    @property
    def _present(self) -> list[int]:
        return [number for number in self.ranks if number in self._members]

    def _members_on(self, host: str) -> list[int]:
        return [n for n, m in self._members.items() if m.place.host == host]

    def _is_wanted(self, member: _Member) -> bool:
        host = self._hosts.get(member.place.host)
        if host is None or not host.is_known or host.is_leaving:
            return False
        return host.slots < 0 or member.place.slot < host.slots

    def _kill(self, number: int, reason: str, now_s: float) -> None:
        self._orders.append(Kill(number, reason))
        self._remove(number, reason, now_s)

    def _remove(self, number: int, reason: str, now_s: float) -> None:
        member = self._members.pop(number)
        if member.state not in (_State.ACTIVE, _State.DONE):
            return
        if self.phase in (Phase.RUNNING, Phase.PAUSING):
            self._end_view(reason)
            for each in self._members.values():
                each.since_s = max(each.since_s, now_s)

    def _end_view(self, reason: str) -> None:
        self.phase, self._reason = Phase.FORMING, reason
        self._forming_since_s = None
        members = self._members
        left = [n for n in self._present if members[n].state is not _State.WAITING]
        if left:
            self._orders.append(EndView(tuple(left), reason))

    # What follows

    def _advance(self, now_s: float) -> None:
        if self._forming_since_s is None:
            self._forming_since_s = now_s
        for number, member in list(self._members.items()):
            if number not in self.ranks and not self._is_wanted(member):
                self._kill(number, "its host is left", now_s)
        if self.phase in (Phase.FORMING, Phase.PAUSING):
            self._form(now_s)
        if self.phase is Phase.RUNNING:
            self._plan_change(now_s)
        if self.phase in (Phase.FORMING, Phase.RUNNING, Phase.PAUSING):
            self._fill(now_s)
        self._release(now_s)
        self.due_s = min(self._times(now_s), default=inf)

    def _form(self, now_s: float) -> None:
        members = self._members.values()
        if any(m.state in (_State.ACTIVE, _State.DONE) for m in members):
            return
        survivors = self._present
        if self.view != NO_VIEW and not survivors:
            if self._is_closing and not self._members:
                self.phase = Phase.FINISHED
            else:
                self._stop(f"No rank has survived: {self._reason}.")
            return
        is_start = self.view == NO_VIEW
        is_late = now_s >= (self._forming_since_s or now_s) + self.rules.formation_s
        if is_start and not is_late:
            if any(m.state is _State.STARTING for m in members):
                return
            if any(h.is_connecting for h in self._hosts.values()):
                return
        waiting = {n: m for n, m in self._members.items() if m.state is _State.WAITING}
        leaving = [n for n in waiting if not self._is_wanted(waiting[n])]
        newest = max((m.step for m in waiting.values()), default=NEW)
        kept = [n for n in waiting if n not in leaving]
        if newest != NEW and all(waiting[n].step < newest for n in kept):
            # It alone has the state: it leaves once others have it, too.
            source = next((n for n in leaving if waiting[n].step == newest), None)
            leaving = [n for n in leaving if n != source]
        survivors = [n for n in survivors if n not in leaving]
        newcomers = [n for n in sorted(waiting) if n not in (*survivors, *leaving)]
        newcomers = newcomers[: max(0, self.rules.max_ranks - len(survivors))]
        if len(survivors) + len(newcomers) >= max(1, self.rules.min_ranks):
            self._begin(survivors, newcomers, leaving, now_s)
        elif is_late:
            self._stop_short(len(survivors) + len(newcomers), now_s)

    def _begin(
        self,
        survivors: list[int],
        newcomers: list[int],
        leaving: list[int],
        now_s: float,
    ) -> None:
        ranked = [(n, r) for r, n in enumerate(self.ranks) if n in survivors]
        order = order_ranks(ranked, newcomers) if ranked else newcomers
        steps = {n: self._members[n].step for n in order}
        newest = max(steps.values())
        if self._is_failure and newest <= self._best_step:
            self._num_idle += 1
        elif newest > self._best_step:
            self._num_idle = 0
        self._best_step, self._is_failure = max(newest, self._best_step), False
        self.view += 1
        limit = self.rules.reset_limit
        if limit is not None and self.view > limit:
            self._stop(
                "Reset limit reached: the job began again more often than "
                f"--reset-limit {limit} allows, the last time as {self._reason}."
            )
            return
        if self._num_idle >= _MAX_IDLE_VIEWS:
            self._stop(
                f"{_MAX_IDLE_VIEWS} times in a row a rank failed at step {newest + 1}, "
                f"the last time as {self._reason}."
            )
            return
        for number in leaving:
            self._orders.append(Dismiss(number, self._reason))
            del self._members[number]
        self._orders.append(
            BeginView(
                view=self.view,
                members=tuple(self._members[n].place for n in order),
                gone=tuple(n for n in self.ranks if n not in order),
                new=tuple(self._members[n].place for n in newcomers),
                source=next(n for n in order if steps[n] == newest),
                step=newest,
                is_equal=newest != NEW and set(steps.values()) == {newest},
                reason=self._reason,
            )
        )
        for number in order:
            member = self._members[number]
            member.state, member.since_s = _State.ACTIVE, now_s
        self.ranks, self.phase = tuple(order), Phase.RUNNING

    def _plan_change(self, now_s: float) -> None:
        in_view = [self._members[n] for n in self._present]
        if self._is_closing or any(m.state is _State.DONE for m in in_view):
            return
        others = [m for n, m in self._members.items() if n not in self.ranks]
        waiting = [m for m in others if m.state is _State.WAITING]
        num_left = sum(self._is_wanted(m) for m in in_view)
        has_room = num_left < self.rules.max_ranks
        has_enough = num_left + len(waiting) >= max(1, self.rules.min_ranks)
        reason = self._reason if num_left < len(in_view) and has_enough else ""
        if has_room and waiting:
            first_s = min(m.since_s for m in waiting)
            is_gathering = any(m.state is _State.STARTING for m in others)
            if not is_gathering or now_s >= first_s + _GATHER_S:
                hosts = sorted({m.place.host for m in waiting})
                count = "a rank joins" if len(waiting) == 1 else "ranks join"
                reason = reason or f"{count} on {', '.join(hosts)}"
        if reason:
            self.phase, self._reason = Phase.PAUSING, reason
            self._orders.append(PauseView(self.ranks, reason))

    def _fill(self, now_s: float) -> None:
        """Start processes where there is room; connect to hosts that may have it."""
        living = self._members.values()
        wanted = self.rules.max_ranks + self.rules.spares
        num_lacking = wanted - sum(self._is_wanted(m) for m in living)
        # Survivors that will do settle first.
        can_form = len(self._present) >= max(1, self.rules.min_ranks)
        if self._is_closing or (self.phase is Phase.FORMING and can_form):
            return
        for name, slot in self._free_slots(now_s):
            if num_lacking <= 0:
                return
            place = Place(self._next_number, name, slot)
            self._next_number += 1
            self._members[place.number] = _Member(place, now_s)
            self._orders.append(Start(place))
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

    def _free_slots(self, now_s: float) -> Iterator[tuple[str, int]]:
        taken = {(m.place.host, m.place.slot) for m in self._members.values()}
        for name, host in self._hosts.items():
            if host.is_ready and host.is_usable(now_s):
                for slot in range(host.slots):
                    if (name, slot) not in taken:
                        yield name, slot

    def _release(self, now_s: float) -> None:
        for name, host in self._hosts.items():
            is_left = host.is_ready and (host.is_leaving or not host.is_known)
            if is_left and not self._members_on(name):
                if host.is_leaving:
                    self._bar(host, now_s)
                host.is_ready = host.is_leaving = False
                self._orders.append(Release(name))

    def _times(self, now_s: float) -> Iterator[float]:
        yield from (self._due_of(member) for member in self._members.values())
        if self.phase is Phase.FORMING and self._forming_since_s is not None:
            yield self._forming_since_s + self.rules.formation_s
        if self.phase is Phase.RUNNING:
            others = (m for n, m in self._members.items() if n not in self.ranks)
            waits = (m.since_s + _GATHER_S for m in others if m.state is _State.WAITING)
            yield from (at_s for at_s in waits if at_s > now_s)
        hosts = self._hosts.values()
        yield from (h.barred_until_s for h in hosts if h.barred_until_s > now_s)

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

    def _stop(self, reason: str, *, is_too_few: bool = False) -> None:
        self.phase = Phase.STOPPED
        self._orders.append(Stop(reason, is_too_few))
