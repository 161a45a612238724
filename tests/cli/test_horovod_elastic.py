"""Horovod's ``ElasticDriver`` and what belongs to it, with workers that are threads."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Queue
from threading import Event, Lock

import pytest
from tests.limits import HANG_S

from ronde.errors import UsageError
from ronde.horovod import elastic
from ronde.horovod.discovery import FixedHosts, HostDiscoveryScript, HostManager
from ronde.horovod.elastic import (
    RESET_LIMIT_EXCEEDED_MESSAGE,
    ElasticDriver,
    HostUpdateResult,
    RendezvousServer,
    SlotInfo,
    WorkerNotificationManager,
    create_rendezvous_handler,
)


class Workers:
    """Runs workers under a driver; ``first`` is what one does in its first view."""

    def __init__(self, driver: ElasticDriver, first: Callable[[SlotInfo], int]) -> None:
        self.seen: list[SlotInfo] = []  # places, in the order they were given
        self._driver = driver
        self._first = first
        self._lock = Lock()

    def run(self, slot_info: SlotInfo, events: Sequence[Event]) -> tuple[int, float]:
        """Begin, do ``first``; begin anew where it returns -1."""
        code = -1
        while code == -1 and not any(event.is_set() for event in events):
            self._driver.record_ready(slot_info.hostname, slot_info.local_rank)
            place = self._driver.get_slot_info(slot_info.hostname, slot_info.local_rank)
            with self._lock:
                self.seen.append(place)
            code = self._first(place)
        return max(code, 0), time.time()


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "DISCOVER_HOSTS_FREQUENCY_SECS", 0.01)


def make_driver(
    hosts: dict[str, int], least: int, reset_limit: int | None = None
) -> ElasticDriver:
    discovery = FixedHosts(hosts)
    return ElasticDriver(
        RendezvousServer(), discovery, least, None, HANG_S, reset_limit=reset_limit
    )


def test_a_script_names_hosts(tmp_path: Path) -> None:
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\necho b:3\necho a\necho '[fd00::2]:2'\necho\n")
    script.chmod(0o700)
    discovery = HostDiscoveryScript(str(script), 4)
    found = discovery.find_available_hosts_and_slots()
    assert list(found.items()) == [("b", 3), ("a", 4), ("fd00::2", 2)]
    script.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(RuntimeError, match="Exit code: 3"):
        discovery.find_available_hosts_and_slots()
    script.write_text("#!/bin/sh\necho '$(reboot):2'\n")
    with pytest.raises(UsageError):
        discovery.find_available_hosts_and_slots()


def test_what_has_changed() -> None:
    discovery = FixedHosts({"a": 2, "b": 2})
    manager = HostManager(discovery)
    assert manager.update_available_hosts() == HostUpdateResult.added
    assert manager.update_available_hosts() == HostUpdateResult.no_update
    discovery.set({"c": 1, "b": 2})
    assert manager.update_available_hosts() == HostUpdateResult.mixed
    assert manager.current_hosts.host_assignment_order == ["b", "c"]
    manager.blacklist("b")
    assert manager.is_blacklisted("b")
    assert manager.update_available_hosts() == HostUpdateResult.no_update
    assert manager.current_hosts.available_hosts == {"c"}
    assert manager.current_hosts.count_available_slots() == 1


@pytest.mark.parametrize("bounds", [(0, 5), (5, 4), (1, 3601)])
def test_a_cooldown_has_bounds(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="cooldown_range must be"):
        HostManager(FixedHosts({}), bounds)


def test_those_left_go_on_when_one_fails() -> None:
    driver = make_driver({"a": 2, "b": 2}, 2)

    def first(place: SlotInfo) -> int:
        if place.size == 4:
            return 7 if place.rank == 3 else -1
        return 0

    workers = Workers(driver, first)
    driver.start(2, workers.run)
    results = driver.get_results()
    driver.stop()
    # Its host goes with it.
    assert sorted(p.rank for p in workers.seen if p.size == 2) == [0, 1]
    assert {p.hostname for p in workers.seen if p.size == 2} == {"a"}
    assert results.error_message is None
    codes = {name: code for name, (code, _) in results.worker_results.items()}
    assert codes == {"a[0]": 0, "a[1]": 0}


def test_the_job_ends_at_the_reset_limit() -> None:
    driver = make_driver({"a": 1, "b": 1, "c": 1}, 1, reset_limit=1)
    workers = Workers(driver, lambda place: 5 if place.rank == place.size - 1 else -1)
    driver.start(3, workers.run)
    results = driver.get_results()
    driver.stop()
    assert results.error_message == RESET_LIMIT_EXCEEDED_MESSAGE.format(1)


def test_a_host_is_added_and_all_begin_anew() -> None:
    discovery = FixedHosts({"a": 2})
    driver = ElasticDriver(RendezvousServer(), discovery, 2, 3, timeout=HANG_S)

    def first(place: SlotInfo) -> int:
        if place.size == 3:
            return 0
        discovery.set({"b": 2, "a": 2})
        driver.wait_for_available_slots(4)
        return -1

    workers = Workers(driver, first)
    driver.start(2, workers.run)
    results = driver.get_results()
    driver.stop()
    new = sorted(place for place in workers.seen if place.size == 3)
    assert [(p.hostname, p.rank) for p in new] == [("a", 0), ("a", 1), ("b", 2)]
    assert new[2].to_response_string() == "2,3,0,1,1,2"
    assert sorted(results.worker_results) == ["a[0]", "a[1]", "b[0]"]


def test_a_worker_hears_of_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    discovery = FixedHosts({"a": 1})
    server = RendezvousServer()
    driver = ElasticDriver(server, discovery, 1, None, timeout=HANG_S)
    port = server.start(create_rendezvous_handler(driver))
    heard: Queue[tuple[float, HostUpdateResult]] = Queue()

    class Listener:
        def on_hosts_updated(self, timestamp: float, result: HostUpdateResult) -> None:
            heard.put((timestamp, result))

    def worker(place: SlotInfo, events: Sequence[Event]) -> tuple[int, float]:
        manager = WorkerNotificationManager()
        manager.register_listener(Listener())  # pyright: ignore[reportArgumentType]
        manager.init("127.0.0.1", port, None, place.hostname, place.local_rank)
        driver.record_ready(place.hostname, place.local_rank)
        if place.hostname != "a":
            events[0].wait(HANG_S)
            return 0, time.time()
        for hosts in ({"a": 1, "b": 1}, {"a": 1, "c": 1}):
            discovery.set(hosts)
            results.append(heard.get(timeout=HANG_S)[1])
        return 0, time.time()

    results: list[HostUpdateResult] = []
    driver.start(1, worker)
    driver.get_results()
    driver.stop()
    assert results == [HostUpdateResult.added, HostUpdateResult.mixed]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_first_failure_of_discovery_ends_the_job() -> None:
    class Broken(FixedHosts):
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            raise KeyError("mine")

    driver = ElasticDriver(RendezvousServer(), Broken({}), 1, None, timeout=HANG_S)
    with pytest.raises(RuntimeError, match="the job has ended"):
        driver.wait_for_available_slots(1)
    assert driver.finished()
    driver.stop()
