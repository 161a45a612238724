"""Hosts and workers that do what a ``Membership`` orders, and check every order.

Workers train as data-parallel ranks do: never more than one step apart, and not at
all while one of them is gone or stalled.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from ronde.membership import (
    NEW,
    NO_VIEW,
    AskStep,
    AtStep,
    Blacklisted,
    Connect,
    Done,
    Entered,
    Event,
    Failed,
    Finish,
    FromRank,
    HostGone,
    HostLeaves,
    HostReady,
    HostsFound,
    Kill,
    Leave,
    Membership,
    Order,
    Release,
    Rules,
    Send,
    Settled,
    StartWorker,
    Stop,
    StopAfter,
    TimerExpired,
    ToRank,
    View,
    ViewBegins,
    ViewEnded,
    ViewPhase,
    Worker,
    WorkerLost,
    WorkerReport,
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
    """One worker, from its start until it is reaped."""

    worker: Worker
    doing: Doing = Doing.STARTING
    step: int = NEW
    is_stalled: bool = False
    is_asked: bool = False  # for its step, and has not answered
    limit: float = inf  # steps that it may apply until it hears when to stop
    stop_after: float = inf


@dataclass
class Host:
    """One host: ``is_found`` as discovery has it, the others as its agent has it."""

    slots: int
    is_found: bool = False
    is_ready: bool = False
    is_connecting: bool = False
    is_leaving: bool = False
    joins_itself: bool = False  # after it was left


@dataclass
class Environment:
    """All hosts and processes, and a clock."""

    membership: Membership
    hosts: dict[str, Host] = field(default_factory=dict[str, Host])
    processes: dict[int, Process] = field(default_factory=dict[int, Process])
    view: View = View(NO_VIEW, ())  # noqa: RUF009 - immutable
    before: View = View(NO_VIEW, ())  # noqa: RUF009 - immutable
    now_s: float = 0.0
    orders: list[Order] = field(default_factory=list[Order])
    num_started: int = 0

    @classmethod
    def of(cls, rules: Rules, **slots: int) -> "Environment":
        """Return one whose hosts are found."""
        self = cls(Membership(rules, lambda: "key"))
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
        found = (self.processes.get(worker.id) for worker in self.view.members)
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
            self.tell(TimerExpired())

    def fail_host(self, name: str, *, joins_itself: bool = False) -> None:
        host = self.hosts[name]
        host.is_found = host.is_found and not joins_itself
        host.is_ready = host.is_connecting = host.is_leaving = False
        for number, process in list(self.processes.items()):
            if process.worker.host == name:
                del self.processes[number]
        self.tell(HostGone(name, f"{name} was lost", joins_itself))

    def leave_host(self, name: str, *, joins_itself: bool = False) -> None:
        self.hosts[name].is_leaving = True
        self.hosts[name].joins_itself = joins_itself
        self.tell(HostLeaves(name, f"{name} is to be left", joins_itself))

    def end(self, number: int, exit_code: int) -> None:
        del self.processes[number]
        self.tell(WorkerLost(number, exit_code, "has ended"))

    def fail(self, number: int) -> None:
        """Report that a process ends, which may be known already."""
        process = self.processes[number]
        if process.doing not in ENDING:
            process.doing = Doing.FAILING
        self.report(number, Failed(self.view.view, process.step, "an error"))

    def settle(self, number: int, reason: str = "") -> None:
        process = self.processes[number]
        process.doing = Doing.WAITING
        step = process.step
        self.report(number, Settled(self.view.view, step, step, reason))

    def report(self, number: int, message: FromRank) -> None:
        self.tell(WorkerReport(number, message))

    def _get_ready(self, name: str) -> None:
        host = self.hosts[name]
        host.is_ready, host.is_connecting = True, False
        self.tell(HostReady(name, host.slots))

    def _connect(self) -> None:
        newest = max(process.step for process in self.members)
        for process in self.members:
            process.doing, process.step = Doing.TRAINING, max(newest, 0)
            self.report(process.worker.id, Entered(self.view.view, process.step))

    def _answer(self, number: int) -> None:
        process = self.processes[number]
        process.is_asked, process.limit = False, process.step + 1
        self.report(number, AtStep(self.view.view, process.step))

    def _train(self, number: int) -> None:
        process = self.processes[number]
        process.step = min(process.step + 1, LAST_STEP)
        if process.step >= process.stop_after:
            self.settle(number)
        elif process.step == LAST_STEP:
            self.finish(number)

    def finish(self, number: int) -> None:
        """Have a process apply the last step, and say so."""
        process = self.processes[number]
        process.step = LAST_STEP
        if process.doing is Doing.TRAINING:
            process.doing = Doing.DONE
        self.report(number, Done(self.view.view, LAST_STEP))

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
            elif process.is_asked and not process.is_stalled:
                can.append(lambda n=number: self._answer(n))
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
                return [lambda n=p.worker.id: self.end(n, -9)]
        if len(self.members) < len(self.view.members):
            # A peer has ended with 0: it is missed, unless all was done.
            return [
                lambda n=p.worker.id: self.settle(n, "lost a peer")
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
            lambda n=p.worker.id: self._train(n)
            for p in self.members
            if p.doing is Doing.TRAINING and p.step == lowest < p.limit
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
        kept = [p for p in living if self._is_used(p.worker)]
        if not self.is_over:
            assert len(kept) <= rules.max_ranks + rules.spares
            assert self.membership.living == [p.worker for p in living]
        for left_s in self.membership.blacklisted(self.now_s).values():
            assert 0 < left_s <= rules.cooldown_s[1]

    def _is_used(self, worker: Worker) -> bool:
        host = self.hosts[worker.host]
        return host.is_found and not host.is_leaving and worker.slot < host.slots

    def _obey(self, order: Order) -> None:
        match order:
            case Connect() | Release():
                self._obey_for_host(order)
            case Send():
                self._hear(order.workers, order.message)
            case Blacklisted():
                assert order.host in self._blacklisted()
            case Stop():
                assert order.reason.endswith(".")
            case StartWorker():
                self._start(order.worker)
            case Kill():
                process = self.processes[order.worker]
                assert order.reason
                assert process.doing is not Doing.KILLED
                process.doing = Doing.KILLED

    def _obey_for_host(self, order: Connect | Release) -> None:
        host = self.hosts[order.host]
        if isinstance(order, Connect):
            assert not host.is_ready
            assert not host.is_connecting
            assert host.is_found
            assert not host.is_leaving
            assert order.host not in self._blacklisted()
            host.is_connecting = True
            return
        assert host.is_ready
        assert host.is_leaving or not host.is_found
        assert order.host not in [p.worker.host for p in self.processes.values()]
        is_gone = host.is_leaving and host.joins_itself
        host.is_found = host.is_found and not is_gone
        host.is_ready = host.is_leaving = False

    def _hear(self, numbers: tuple[int, ...], message: ToRank) -> None:
        processes = [self.processes[number] for number in numbers]
        in_view = [p for p in self.members if p.doing in IN_VIEW]
        match message:
            case ViewEnded():
                assert processes == in_view
                for process in processes:
                    process.doing = Doing.ASKED
            case AskStep():
                assert processes == in_view == self.members
                assert not any(p.doing is Doing.DONE for p in self.members)
                for process in processes:
                    process.is_asked = True
            case StopAfter():
                assert processes == self.members
                assert message.step > max(p.step for p in processes) - 1
                for process in processes:
                    process.limit, process.stop_after = inf, message.step
            case ViewBegins():
                self._begin_view(numbers, message)
            case Leave():
                assert [p.doing for p in processes] == [Doing.WAITING]
                processes[0].doing = Doing.LEAVING
            case Finish():
                assert processes == self.members
                assert all(p.step == LAST_STEP for p in processes)
            case _:
                raise AssertionError(message)

    def _blacklisted(self) -> dict[str, float]:
        return self.membership.blacklisted(self.now_s)

    def _start(self, worker: Worker) -> None:
        assert worker.id == self.num_started
        self.num_started += 1
        assert self.hosts[worker.host].is_ready
        assert self._is_used(worker)
        assert worker.host not in self._blacklisted()
        taken = [process.worker[1:] for process in self.processes.values()]
        assert worker[1:] not in taken
        self.processes[worker.id] = Process(worker)

    def _begin_view(self, hearing: tuple[int, ...], begins: ViewBegins) -> None:
        """Check a view that begins; survivors hear of it first, then newcomers."""
        view, old = self.membership.view, self.view
        numbers, former = [w.id for w in view.members], [w.id for w in old.members]
        if old.view != view.view:
            self._check_view(begins, numbers, former)
            self.view = view
            for number in numbers:
                process = self.processes[number]
                assert process.doing is Doing.WAITING
                process.doing = Doing.CONNECTING
                process.limit = process.stop_after = inf
                process.is_asked = False
            self.before = old
        known = [w.id for w in self.before.members]
        is_change = begins.base != NO_VIEW
        assert list(hearing) == [n for n in numbers if (n in known) == is_change]
        assert self.before.next(begins) == view
        assert begins.key == "key"

    def _check_view(
        self, begins: ViewBegins, numbers: list[int], former: list[int]
    ) -> None:
        rules = self.membership.rules
        assert begins.view == self.view.view + 1
        # Never two views at a time.
        assert not any(p.doing in IN_VIEW | {Doing.ASKED} for p in self.members)
        assert len(set(numbers)) == len(numbers)
        assert max(1, rules.min_ranks) <= len(numbers) <= rules.max_ranks
        kept = [number for number in former if number in numbers]
        assert [number for number in numbers if number in former] == kept
        assert not kept or numbers[0] == kept[0]
        for worker in self.membership.view.members:
            if worker.id not in former:
                assert self._is_used(worker)
                assert worker.host not in self._blacklisted()
        steps = {number: self.processes[number].step for number in numbers}
        living = [p.step for p in self.members]
        assert begins.step == steps[begins.source] == max([*living, *steps.values()])
        assert begins.is_equal == (set(steps.values()) == {begins.step} != {NEW})
