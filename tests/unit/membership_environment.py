"""Hosts and processes that do what a ``Membership`` orders, and check every order.

Processes train as data-parallel ranks do: never more than one step apart, and not at
all while one of them is gone or stalled.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from ronde.membership import (
    NEW,
    NO_VIEW,
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
    Membership,
    Order,
    PauseView,
    Place,
    Release,
    Rules,
    StartProcess,
    Stop,
    Tick,
    View,
    ViewBegins,
    ViewPhase,
)

LAST_STEP = 40


class Doing(Enum):
    """What a process does."""

    STARTING = auto()
    WAITING = auto()  # settled
    CONNECTING = auto()  # in a new view; it has not got the state of the newest yet
    TRAINING = auto()
    ASKED = auto()  # to settle
    DONE = auto()
    LEAVING = auto()  # dismissed
    FAILING = auto()  # it has said so, and is not gone yet
    KILLED = auto()


IN_VIEW = {Doing.CONNECTING, Doing.TRAINING, Doing.DONE}
ENDING = {Doing.LEAVING, Doing.FAILING, Doing.KILLED}


@dataclass
class Process:
    """One process, from its start until it is reaped."""

    place: Place
    doing: Doing = Doing.STARTING
    step: int = NEW
    is_stalled: bool = False


@dataclass
class Host:
    """One host: ``is_found`` as discovery has it, the others as its agent has it."""

    slots: int
    is_found: bool = False
    is_ready: bool = False
    is_connecting: bool = False
    is_leaving: bool = False


@dataclass
class Environment:
    """All hosts and processes, and a clock."""

    membership: Membership
    hosts: dict[str, Host] = field(default_factory=dict[str, Host])
    processes: dict[int, Process] = field(default_factory=dict[int, Process])
    view: View = View(NO_VIEW, ())  # noqa: RUF009 - immutable
    stop_after: int | None = None
    now_s: float = 0.0
    orders: list[Order] = field(default_factory=list[Order])
    num_started: int = 0

    @classmethod
    def of(cls, rules: Rules, **slots: int) -> "Environment":
        """Return one whose hosts are found."""
        self = cls(Membership(rules))
        self.find(slots)
        return self

    @property
    def phase(self) -> ViewPhase:
        return self.membership.phase

    @property
    def is_over(self) -> bool:
        return self.phase in (ViewPhase.FINISHED, ViewPhase.STOPPED)

    @property
    def members(self) -> list[Process]:
        """Return the processes of the view that live, by rank."""
        found = (self.processes.get(place.number) for place in self.view.members)
        return [each for each in found if each and each.doing not in ENDING]

    # What happens

    def find(self, slots: dict[str, int]) -> None:
        for name, host in self.hosts.items():
            host.is_found = name in slots
        for name, number in slots.items():
            host = self.hosts.setdefault(name, Host(number))
            host.slots, host.is_found = number, True
        self.tell(HostsFound(slots))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s >= self.membership.due_s:
            self.tell(Tick())

    def fail_host(self, name: str) -> None:
        host = self.hosts[name]
        host.is_ready = host.is_connecting = host.is_leaving = False
        for number, process in list(self.processes.items()):
            if process.place.host == name:
                del self.processes[number]
        self.tell(HostGone(name, f"{name} was lost"))

    def leave_host(self, name: str) -> None:
        self.hosts[name].is_leaving = True
        self.tell(HostLeaves(name, f"{name} is to be left"))

    def end(self, number: int, exit_code: int) -> None:
        del self.processes[number]
        self.tell(MemberLost(number, exit_code, f"{number} has ended"))

    def fail(self, number: int) -> None:
        """Report that a process ends, which may be known already."""
        process = self.processes[number]
        if process.doing not in ENDING:
            process.doing = Doing.FAILING
        reason = f"{number} failed"
        self.tell(MemberLost(number, 1, reason, has_ended=False))

    def settle(self, number: int, reason: str = "") -> None:
        process = self.processes[number]
        process.doing = Doing.WAITING
        self.tell(MemberSettled(number, process.step, reason))

    def _get_ready(self, name: str) -> None:
        host = self.hosts[name]
        host.is_ready, host.is_connecting = True, False
        self.tell(HostReady(name, host.slots))

    def _connect(self) -> None:
        newest = max(process.step for process in self.members)
        for process in self.members:
            process.doing, process.step = Doing.TRAINING, max(newest, 0)

    def _train(self, number: int) -> None:
        process = self.processes[number]
        process.step = min(process.step + 1, LAST_STEP)
        if self.stop_after is not None and process.step >= self.stop_after:
            self.settle(number)
        elif process.step == LAST_STEP:
            self.finish(number)

    def finish(self, number: int) -> None:
        """Have a process apply the last step, and say so."""
        process = self.processes[number]
        process.step = LAST_STEP
        if process.doing is Doing.TRAINING:
            process.doing = Doing.DONE
        self.tell(MemberDone(number, LAST_STEP))

    def answers(self) -> list[Callable[[], None]]:
        """Return what can happen next without any fault."""
        can: list[Callable[[], None]] = []
        for number, process in self.processes.items():
            if process.doing is Doing.KILLED:
                can.append(lambda n=number: self.end(n, -9))
            elif process.doing is Doing.FAILING and not process.is_stalled:
                can.append(lambda n=number: self.end(n, 1))
            elif process.doing is Doing.LEAVING and not process.is_stalled:
                can.append(lambda n=number: self.end(n, 0))
            elif process.doing is Doing.ASKED and not process.is_stalled:
                can.append(lambda n=number: self.settle(n))
        return can + self._connections() + self._starts() + self._steps()

    def _starts(self) -> list[Callable[[], None]]:
        return [
            lambda name=name: self._get_ready(name)
            for name, host in self.hosts.items()
            if host.is_connecting
        ] + [
            lambda n=number: self.settle(n)
            for number, process in self.processes.items()
            if process.doing is Doing.STARTING and not process.is_stalled
        ]

    def _connections(self) -> list[Callable[[], None]]:
        """Return the way of a view from its begin until all train, or do not."""
        if self.phase is ViewPhase.FORMING:
            return []
        for p in self.members:
            if p.is_stalled and p.doing in IN_VIEW:
                # Who sees that ends it.
                return [lambda n=p.place.number: self.end(n, -9)]
        if len(self.members) < len(self.view.members):
            # A peer has ended with 0: it is missed, unless all was done.
            return [
                lambda n=p.place.number: self.settle(n, "it lost a peer")
                for p in self.members
                if p.doing in (Doing.CONNECTING, Doing.TRAINING)
            ]
        is_begin = {p.doing for p in self.members} == {Doing.CONNECTING}
        return [self._connect] if is_begin else []

    def _steps(self) -> list[Callable[[], None]]:
        lowest = min((p.step for p in self.members), default=0)
        if any(p.doing is Doing.CONNECTING or p.is_stalled for p in self.members):
            return []
        return [
            lambda n=p.place.number: self._train(n)
            for p in self.members
            if p.doing is Doing.TRAINING and p.step == lowest
        ]

    def run(self, until: Callable[[], bool] | None = None, limit: int = 3000) -> None:
        """Let all that can happen without a fault happen, until the job is over."""
        for _ in range(limit):
            if self.is_over or (until is not None and until()):
                return
            if can := self.answers():
                can[0]()
            else:
                assert self.membership.due_s < float("inf"), "it hangs"
                self.wait(max(0.0, self.membership.due_s - self.now_s))
        raise AssertionError(f"it is {self.phase.name} after {limit} events")

    def begin(self) -> None:
        """Run until a view trains and all are connected."""
        self.run(
            lambda: (
                self.phase is ViewPhase.RUNNING
                and all(p.doing is Doing.TRAINING for p in self.members)
            )
        )

    # What is ordered

    def tell(self, event: Event) -> list[Order]:
        """Give an event to the membership, and carry out and check what it orders."""
        orders = self.membership.apply(event, self.now_s)
        self.orders += orders
        for order in orders:
            self._obey(order)
        self._check()
        return orders

    def _check(self) -> None:
        rules = self.membership.rules
        living = [p for p in self.processes.values() if p.doing not in ENDING]
        kept = [p for p in living if self._is_used(p.place)]
        if not self.is_over:
            assert len(kept) <= rules.max_ranks + rules.spares
            assert self.membership.num_living == len(living)
            for number, process in self.processes.items():
                place = None if process.doing in ENDING else process.place
                assert self.membership.place_of(number) == place
        for left_s in self.membership.barred(self.now_s).values():
            assert 0 < left_s <= rules.cooldown_s[1]

    def _is_used(self, place: Place) -> bool:
        host = self.hosts[place.host]
        return host.is_found and not host.is_leaving and place.slot < host.slots

    def _obey(self, order: Order) -> None:
        match order:
            case Connect() | Release():
                self._obey_for_host(order)
            case EndView() | PauseView():
                self._obey_for_view(order)
            case BeginView():
                self._begin_view(order)
            case FinishAll():
                assert all(p.step == LAST_STEP for p in self.members)
            case Barred():
                assert order.host in self._barred()
            case Stop():
                assert order.reason.endswith(".")
            case _:
                self._obey_for_process(order)

    def _obey_for_host(self, order: Connect | Release) -> None:
        host = self.hosts[order.host]
        if isinstance(order, Connect):
            assert not host.is_ready
            assert not host.is_connecting
            assert host.is_found
            assert not host.is_leaving
            assert order.host not in self._barred()
            host.is_connecting = True
            return
        assert host.is_ready
        assert host.is_leaving or not host.is_found
        assert order.host not in [p.place.host for p in self.processes.values()]
        host.is_ready = host.is_leaving = False

    def _obey_for_view(self, order: EndView | PauseView) -> None:
        told = [p.place.number for p in self.members if p.doing in IN_VIEW]
        assert list(order.numbers) == told
        if isinstance(order, EndView):
            for number in order.numbers:
                self.processes[number].doing = Doing.ASKED
            return
        assert len(told) == len(self.members)
        assert not any(p.doing is Doing.DONE for p in self.members)
        self.stop_after = max(p.step for p in self.members) + 2

    def _obey_for_process(self, order: StartProcess | Kill | Dismiss) -> None:
        if isinstance(order, StartProcess):
            self._start(order.place)
            return
        process = self.processes[order.number]
        assert order.reason
        if isinstance(order, Kill):
            assert process.doing is not Doing.KILLED
            process.doing = Doing.KILLED
        else:
            assert process.doing is Doing.WAITING
            process.doing = Doing.LEAVING

    def _barred(self) -> dict[str, float]:
        return self.membership.barred(self.now_s)

    def _start(self, place: Place) -> None:
        assert place.number == self.num_started
        self.num_started += 1
        host = self.hosts[place.host]
        assert host.is_ready
        assert self._is_used(place)
        assert place.host not in self._barred()
        taken = [process.place[1:] for process in self.processes.values()]
        assert place[1:] not in taken
        self.processes[place.number] = Process(place)

    def _begin_view(self, order: BeginView) -> None:
        rules, old = self.membership.rules, self.view
        assert order.view == old.view + 1
        # Never two views at a time.
        assert not any(p.doing in IN_VIEW | {Doing.ASKED} for p in self.members)
        numbers = [place.number for place in order.members]
        assert len(set(numbers)) == len(numbers)
        assert max(1, rules.min_ranks) <= len(numbers) <= rules.max_ranks
        former = [place.number for place in old.members]
        kept = [number for number in former if number in numbers]
        assert [number for number in numbers if number in former] == kept
        assert not kept or numbers[0] == kept[0]
        assert {place.number for place in order.new} == set(numbers) - set(former)
        assert list(order.gone) == [n for n in former if n not in numbers]
        for place in order.new:
            assert self._is_used(place)
            assert place.host not in self._barred()
        base = old.view if kept else NO_VIEW
        new = order.new if kept else order.members
        begins = ViewBegins(
            order.view, "key", base, order.gone, new, order.source, 0, True, ""
        )
        assert old.next(begins).members == order.members
        steps = {number: self.processes[number].step for number in numbers}
        living = [p.step for p in self.members]
        assert order.step == steps[order.source] == max([*living, *steps.values()])
        assert order.is_equal == (set(steps.values()) == {order.step} != {NEW})
        self.view = View(order.view, order.members)
        self.stop_after = None
        for number in numbers:
            assert self.processes[number].doing is Doing.WAITING
            self.processes[number].doing = Doing.CONNECTING
