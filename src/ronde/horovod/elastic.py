"""What Horovod's ``runner.elastic`` modules have, for workers that others start.

``ElasticDriver`` is for platforms with a way of their own to start workers. Which of
them train together is decided as under ``ronde run``, by ``membership.policy``.
"""

import json
import logging
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from threading import Condition, Event, Thread, current_thread
from typing import NamedTuple

from ronde.addresses import read_interfaces
from ronde.errors import StoreError
from ronde.horovod.discovery import (
    DiscoveredHosts,
    HostDiscovery,
    HostManager,
    cooldown_of,
)
from ronde.membership import events
from ronde.membership.policy import RESET_LIMIT_EXCEEDED_MESSAGE, Membership, Rules
from ronde.membership.view import (
    NEW,
    NO_VIEW,
    Leave,
    Settled,
    View,
    ViewBegins,
    Worker,
    order_ranks,
)
from ronde.store.authentication import dial_network, user_key
from ronde.store.client import StoreClient
from ronde.store.protocol import Op
from ronde.store.server import StoreServer, serve_network
from ronde.torch.elastic import state
from ronde.torch.elastic.state import HostUpdateResult
from ronde.world.environment import read_config_directory

__all__ = [
    "RESET_LIMIT_EXCEEDED_MESSAGE",
    "ElasticDriver",
    "HostUpdateResult",
    "RendezvousServer",
    "SlotInfo",
    "WorkerNotificationClient",
    "WorkerNotificationManager",
    "create_rendezvous_handler",
    "get_driver_ip",
    "get_local_intfs",
]

DISCOVER_HOSTS_FREQUENCY_SECS = 1.0
ELASTIC_TIMEOUT_SECS = 600
_MAX_CONNECTIONS = 1 << 14
_ANSWER_S = 10.0
_FOREVER_S = 1e8
_logger = logging.getLogger("ronde")


class SlotInfo(NamedTuple):
    """A worker's place among all."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """Return the place as Horovod's workers read it."""
        numbers = (self.rank, self.size, self.local_rank, self.local_size)
        return ",".join(map(str, (*numbers, self.cross_rank, self.cross_size)))


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)
"""Of a worker that is not needed any more."""


class Results(NamedTuple):
    """How a job ended: why it could not go on, and what workers of the end returned."""

    error_message: str | None
    worker_results: dict[str, tuple[int, float]]  # exit code, time; by ``host[slot]``


@dataclass(eq=False)
class _Worker:
    place: Worker
    slot_info: SlotInfo
    killed: Event = field(default_factory=Event)
    is_new: bool = True  # it has given no word yet
    is_ready: bool = False  # it waits for the next view
    has_state: bool = False
    outcome: tuple[int, float] | None = None


class ElasticDriver:
    """Has workers started and says which of them train together, and as what rank.

    A worker calls ``record_ready`` when it has started and whenever it has to begin
    anew; that returns when all have, and then ``get_slot_info`` is its place. Workers
    that a notification manager has registered hear of changes of hosts. When one has
    ended with 0, none is started any more, and those that want to begin anew are ended.
    A failure bars the worker's host.
    """

    def __init__(
        self,
        rendezvous: "RendezvousServer",
        discovery: HostDiscovery,
        min_num_proc: int,
        max_num_proc: int | None,
        timeout: float | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        verbose: int = 0,
    ) -> None:
        del verbose
        timeout_s = float(timeout or ELASTIC_TIMEOUT_SECS)
        self._timeout_s = timeout_s
        self._rendezvous = rendezvous
        rules = Rules(
            min_ranks=min_num_proc,
            max_ranks=max_num_proc or sys.maxsize,
            is_host_domain=True,
            cooldown_s=cooldown_of(cooldown_range),
            formation_s=timeout_s,
            settle_s=2 * timeout_s,  # and so for as long as others start
            reset_limit=reset_limit,
        )
        self._membership = Membership(rules, str)  # no view has a key
        self._host_manager = HostManager(discovery, cooldown_range, self._membership)
        self._create_worker_fn: _CreateWorker | None = None
        self._changed = Condition()  # its lock is held while anything below is used
        self._view: View | None = None
        self._workers: dict[int, _Worker] = {}
        self._threads: list[Thread] = []
        self._held: list[_Said] = []
        self._has_finished = False  # a worker has ended with 0
        self._error_message: str | None = None
        self._store: StoreClient | None = None
        self._shutdown = Event()
        self._discovery_thread = Thread(target=self._discover_hosts, daemon=True)
        self._discovery_thread.start()

    def start(self, num_proc: int, create_worker_fn: "_CreateWorker") -> None:
        """Start workers on all slots, up to the most, once there are ``num_proc``.

        ``create_worker_fn`` is called in a thread of its own for each. It gets the
        worker's place and events that ask it to end, and returns exit code and time.
        """
        self.wait_for_available_slots(num_proc)
        with self._changed:
            self._create_worker_fn = create_worker_fn
            self._apply(self._hosts_found())

    def stop(self, error_message: str | None = None) -> None:
        """End all workers."""
        with self._changed:
            self._end(error_message)
        self._rendezvous.stop()
        if current_thread() is not self._discovery_thread:
            self._discovery_thread.join()
            self._store = None

    def finished(self) -> bool:
        """Return whether the job is over."""
        return self._shutdown.is_set()

    def get_results(self) -> Results:
        """Return how the job ended, once it has."""
        self._shutdown.wait()
        for thread in self._threads:
            thread.join()
        view = self._view
        last = self._workers if view is None else view.ranks
        ended = {n: w for n, w in self._workers.items() if n in last}
        return Results(
            self._error_message,
            {
                f"{worker.place.host}[{worker.place.slot}]": worker.outcome
                for worker in ended.values()
                if worker.outcome is not None
            },
        )

    def wait_for_available_slots(
        self, min_num_proc: int, min_hosts: int = 1
    ) -> DiscoveredHosts:
        """Return the hosts as soon as there are so many, with so many slots."""
        due_s = time.monotonic() + self._timeout_s
        with self._changed:
            while True:
                hosts = self._host_manager.current_hosts
                num_slots = hosts.count_available_slots()
                num_hosts = len(hosts.host_assignment_order)
                if num_slots >= min_num_proc and num_hosts >= min_hosts:
                    return hosts
                if self._shutdown.is_set():
                    raise RuntimeError(
                        f"there must be {min_num_proc} slots, got {num_slots}, and the "
                        "job has ended. See the error above."
                    )
                if not self._changed.wait(due_s - time.monotonic()):
                    raise TimeoutError(
                        f"there must be {min_num_proc} slots on {min_hosts} hosts, got "
                        f"{num_slots} on {num_hosts} for {self._timeout_s:g} s. Add "
                        "hosts, or start fewer processes."
                    )

    def record_ready(self, host: str, slot: int) -> None:
        """Say that a worker can begin; return once it may, or is not needed."""
        with self._changed:
            worker = self._worker_at(host, slot)
            if worker is None or self._shutdown.is_set():
                return
            worker.is_new, worker.is_ready = False, True
            # All that were in one view have the same state.
            view = self._membership.view.view
            step = view + 1 if worker.has_state else NEW
            settled = Settled(view, step, step, "")
            self._hold(events.WorkerReport(worker.place.id, settled))
            self._changed.wait_for(
                lambda: not worker.is_ready or self._shutdown.is_set()
            )

    def get_slot_info(self, host: str, slot: int) -> SlotInfo:
        """Return a worker's place, with rank -1 if it is not needed."""
        with self._changed:
            worker = self._worker_at(host, slot)
            return INVALID_SLOT_INFO if worker is None else worker.slot_info

    def get_coordinator_info(self) -> SlotInfo | None:
        """Return the place of rank 0."""
        with self._changed:
            infos = [w.slot_info for w in self._workers.values() if self._is_living(w)]
            return next((info for info in infos if info.rank == 0), None)

    def get_worker_client(
        self, slot_info: SlotInfo
    ) -> "WorkerNotificationClient | None":
        """Return what tells a worker of changes; None if it does not listen."""
        name = f"{slot_info.hostname}:{slot_info.local_rank}"
        if self._store is None:
            return None
        [is_there] = self._store.ask(Op.CHECK, [f"worker/{name}"], _ANSWER_S)
        return WorkerNotificationClient(self._store, name) if is_there == b"1" else None

    @property
    def host_assignments(self) -> dict[str, list[SlotInfo]]:
        """The places of all that train, by host."""
        with self._changed:
            if self._view is not None:
                return _by_host(_infos(self._view).values())
            infos = [worker.slot_info for worker in self._workers.values()]
            return _by_host(sorted(infos, key=lambda info: info.rank))

    def world_size(self) -> int:
        """Return the number of workers."""
        return sum(map(len, self.host_assignments.values()))

    def use_store(self, store: StoreClient) -> None:
        """Speak to workers through a store."""
        self._store = store

    # Below, but for the first two and threads' functions, the lock is held.

    def _discover_hosts(self) -> None:
        is_first = True
        while not self._shutdown.is_set():
            change = HostUpdateResult.no_update
            try:
                found = self._host_manager.find_hosts()
            except Exception as error:
                if is_first:
                    self._shutdown.set()
                    with self._changed:
                        self._changed.notify_all()
                    raise
                _logger.warning("Hosts stay as they are: %s", error)
            else:
                with self._changed:
                    change = self._host_manager.take(found)
                    self._look(change)
            if change:
                self._notify(change)
            is_first = False
            self._shutdown.wait(DISCOVER_HOSTS_FREQUENCY_SECS)

    def _notify(self, change: HostUpdateResult) -> None:
        """Tell rank 0 of a change, if it changes who has which place."""
        rules = self._membership.rules
        with self._changed:
            hosts = self._host_manager.current_hosts
        slots = [
            (host, slot)
            for host in hosts.host_assignment_order
            for slot in range(hosts.get_slots(host))
        ]
        numbered = enumerate(slots[: rules.max_ranks])
        view = View(0, tuple(Worker(number, *each) for number, each in numbered))
        is_enough = len(slots) >= rules.min_ranks
        wanted = _by_host(_infos(view).values()) if is_enough else {}
        if wanted == self.host_assignments:
            return
        first = self.get_coordinator_info()
        client = first and self.get_worker_client(first)
        if client:
            try:
                client.notify_hosts_updated(time.time(), change)
            except StoreError as error:
                _logger.warning("Rank 0 was not told of a change of hosts: %s", error)

    def _look(self, change: HostUpdateResult) -> None:
        if self._create_worker_fn is not None:
            if change:
                self._apply(self._hosts_found())
            if time.monotonic() >= self._membership.due_s:
                self._apply(events.TimerExpired())
            self._hold()
        self._changed.notify_all()

    def _hosts_found(self) -> events.HostsFound:
        return events.HostsFound(self._host_manager.current_hosts.host_slots)

    def _hold(self, *said: "_Said") -> None:
        """Pass on reports of workers, some of them once all have reported."""
        self._held += said
        passed = self._held
        if any(w.is_new for w in self._workers.values() if self._is_living(w)):
            # At first, a failure may be the last word where nobody is ready yet. Later,
            # those who train wait for those who come.
            is_first = self._view is None
            kind = events.WorkerReport if is_first else events.WorkerLost
            passed = [each for each in self._held if type(each) is kind]
        self._held = [each for each in self._held if each not in passed]
        self._apply(*sorted(passed, key=_turn))

    def _apply(self, *happened: events.Event) -> None:
        """Do what follows from events."""
        queue = deque(happened)
        started: list[Worker] = []
        while queue and not self._shutdown.is_set():
            for order in self._membership.apply(queue.popleft(), time.monotonic()):
                match order:
                    case events.Connect(host):
                        slots = self._host_manager.current_hosts.get_slots(host)
                        queue.append(events.HostReady(host, slots))
                    case events.StartWorker():
                        started.append(order.worker)
                    case _:
                        self._carry_out(order)
        if not self._shutdown.is_set():
            self._start_workers(started)
        if self._has_finished and not self._is_anybody_left():
            self._end()
        self._changed.notify_all()

    def _carry_out(self, order: events.Order) -> None:
        match order:
            case events.Kill():
                self._end_worker(order.worker)
            case events.Send(workers, Leave()):
                for number in workers:
                    self._end_worker(number)
            case events.Send(workers, ViewBegins()):
                if self._has_finished:
                    self._end()
                    return
                self._view = self._membership.view
                infos = _infos(self._view)
                for number in workers:
                    worker = self._workers[number]
                    worker.slot_info = infos[number]
                    worker.is_ready, worker.has_state = False, True
            case events.Stop(reason):
                limit = self._membership.rules.reset_limit
                message = RESET_LIMIT_EXCEEDED_MESSAGE.format(limit)
                is_limit = reason.startswith(message)
                reason = message if is_limit else reason
                _logger.error("The job ends: %s", reason)
                is_told = order.is_too_few or is_limit
                self._end(reason if is_told and not self._has_finished else None)
            case _:
                pass  # workers see by themselves that a view has ended

    def _end_worker(self, number: int) -> None:
        worker = self._workers[number]
        worker.is_ready = False
        worker.killed.set()

    def _start_workers(self, places: Sequence[Worker]) -> None:
        living = {n: w.place for n, w in self._workers.items() if self._is_living(w)}
        living |= {place.id: place for place in places}
        ranks = self._view.ranks if self._view else {}
        ranked = [(n, rank) for n, rank in ranks.items() if n in living]
        others = [n for n in living if n not in dict(ranked)]
        order = order_ranks(ranked, others) if ranked else others
        view = View(NO_VIEW, tuple(living[number] for number in order))
        infos = _infos(view)
        for place in places:
            worker = _Worker(place, infos[place.id])
            self._workers[place.id] = worker
            thread = Thread(target=self._run_worker, args=(worker,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run_worker(self, worker: _Worker) -> None:
        """Have a worker run; the function of a thread."""
        create, place = self._create_worker_fn, worker.place
        code, ended_s = 1, 0.0
        try:
            if create is not None:
                wanted = [self._shutdown, worker.killed]
                code, ended_s = create(worker.slot_info, wanted)
        except Exception:
            _logger.exception("The worker %s[%d] failed.", place.host, place.slot)
        with self._changed:
            is_end = code == 0 and self._is_living(worker)
            worker.outcome = (code, ended_s or time.time())
            worker.is_new = worker.is_ready = False
            if not self._shutdown.is_set():
                self._has_finished = self._has_finished or is_end
                how = f"ended with exit code {code}"
                self._hold(events.WorkerLost(place.id, code, how))

    def _worker_at(self, host: str, slot: int) -> _Worker | None:
        workers = (w for w in self._workers.values() if self._is_living(w))
        place = (host, slot)
        return next((w for w in workers if w.place[1:] == place), None)

    def _is_living(self, worker: _Worker) -> bool:
        return worker.outcome is None and not worker.killed.is_set()

    def _is_anybody_left(self) -> bool:
        """Whether one still trains that did so in the last view, or at all."""
        numbers = self._view.ranks if self._view else self._workers
        return any(self._is_living(self._workers[number]) for number in numbers)

    def _end(self, error_message: str | None = None) -> None:
        self._error_message = self._error_message or error_message
        self._shutdown.set()
        self._changed.notify_all()


_CreateWorker = Callable[[SlotInfo, Sequence[Event]], tuple[int, float]]
_Said = events.WorkerLost | events.WorkerReport


def _turn(event: _Said) -> float:
    # New ones first: they are there when the last of the others is.
    return inf if isinstance(event, events.WorkerLost) else event.message.step


def _infos(view: View) -> dict[int, SlotInfo]:
    return {
        place.id: SlotInfo(place.host, **view.world_of(place.id)._asdict())
        for place in view.members
    }


def _by_host(infos: Collection[SlotInfo]) -> dict[str, list[SlotInfo]]:
    by_host: dict[str, list[SlotInfo]] = {}
    for info in infos:
        by_host.setdefault(info.hostname, []).append(info)
    return by_host


# How workers hear of changes.


class RendezvousServer:
    """A store through which a driver speaks to workers of this user.

    ``address`` is that of the one interface by which all of them reach it.
    """

    def __init__(self, verbose: int = 0, address: str = "127.0.0.1") -> None:
        del verbose
        self._address = address
        self._server: StoreServer | None = None

    def start(self, handler: Callable[[StoreClient], None]) -> int:
        """Open it for what ``create_rendezvous_handler`` returned; return the port."""
        listener = socket.create_server((self._address, 0))
        port: int = listener.getsockname()[1]
        key = user_key(f"elastic {port}", read_config_directory())
        self._server = serve_network(listener, key, _MAX_CONNECTIONS)
        handler(_store_at(self._address, port))
        return port

    def stop(self) -> None:
        """Close it; may be called again."""
        if self._server is not None:
            self._server.close()


def create_rendezvous_handler(driver: ElasticDriver) -> Callable[[StoreClient], None]:
    """Return what lets a driver speak through a ``RendezvousServer``."""
    return driver.use_store


def _store_at(address: str, port: int) -> StoreClient:
    key = user_key(f"elastic {port}", read_config_directory())
    return StoreClient(partial(dial_network, address, port, key))


class WorkerNotificationClient:
    """Tells one worker of changes."""

    def __init__(self, store: StoreClient, name: str) -> None:
        self._store = store
        self._name = name

    def notify_hosts_updated(
        self, timestamp: float, update_res: HostUpdateResult
    ) -> None:
        """Tell it, and wait until it has heard.

        Raises:
            StoreError: It does not answer.
        """
        ask, key = self._store.ask, f"change/{self._name}"
        [number] = ask(Op.ADD, [f"count/{self._name}", "1"], _ANSWER_S)
        key = f"change/{self._name}/{int(number)}"
        content = json.dumps([timestamp, update_res])
        ask(Op.SET, [key, content], _ANSWER_S)
        ask(Op.WAIT, [f"{key}/heard"], _ANSWER_S)


class DriverListener(state.WorkerNotificationManager):
    """Passes changes of hosts on to all listeners."""

    def init(
        self,
        rendezvous_addr: str | None = None,
        rendezvous_port: int | None = None,
        nic: str | None = None,
        hostname: str | None = None,
        local_rank: int | None = None,
    ) -> None:
        """Listen to the driver behind a ``RendezvousServer``, as this worker of it.

        Nothing is to be done under ``ronde run``, which tells its ranks by itself.
        """
        del nic
        if rendezvous_addr is None or rendezvous_port is None:
            return
        name = f"{hostname}:{local_rank}"
        store = _store_at(rendezvous_addr, rendezvous_port)
        store.ask(Op.SET, [f"worker/{name}", ""], _ANSWER_S)
        Thread(target=self._listen, args=(store, name), daemon=True).start()

    def _listen(self, store: StoreClient, name: str) -> None:
        number = 0
        while True:
            number += 1
            key = f"change/{name}/{number}"
            try:
                [content] = store.ask(Op.GET, [key], _FOREVER_S)
                timestamp, change = json.loads(content)
                self.handle_hosts_updated(timestamp, HostUpdateResult(change))
                store.ask(Op.SET, [f"{key}/heard", ""], _ANSWER_S)
            except StoreError:
                return  # the driver has ended


WorkerNotificationManager = DriverListener


def get_local_intfs(nic: str | None = None) -> set[str]:
    """Return the interface that does not leave this host."""
    return {"lo"} if nic in (None, "lo") else set()


def get_driver_ip(nics: Collection[str]) -> str:
    """Return the IPv4 address of the first of some interfaces."""
    name = next(iter(nics))
    if name == "lo":
        return "127.0.0.1"
    addresses = [a for a in read_interfaces() if a.interface == name]
    found = next((a.address for a in addresses if ":" not in a.address), None)
    if found is None:
        raise RuntimeError(f"{name} must have an IPv4 address, got none. Name another.")
    return found
