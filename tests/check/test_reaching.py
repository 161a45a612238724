"""Programs on one machine reach each other through real sockets."""

import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given, strategies as st
from tests.check.programs import panel_of

from ronde.check import (
    FRAME,
    LARGE_BYTES,
    NodeContext,
    choose_addresses,
    listen,
    measure_mtu,
    own_mtu_towards,
    reach,
    receive_exactly,
)
from ronde.check.network import reach as reaching

TOKEN = "0123456789abcdef"  # noqa: S105
LOOPBACK_MTU = 65536


@pytest.fixture
def site():
    with ExitStack() as closing:
        yield NodeContext({}, closing)


def doors(site):
    return listen(site, {})


def reach_one(site, ports, udp_port, token=None):
    target = {
        "name": "b",
        "address": "127.0.0.1",
        "ports": ports,
        "udp_port": udp_port,
        "token": token or doors(site)["token"],
    }
    return reach(site, {"name": "a", "targets": [target]})["reached"]["b"]


@contextmanager
def served(serve):
    """Run a server of a test's own for one connection; yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(receive_exactly(connection, len(TOKEN)))
                serve(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def test_what_works_is_told_with_its_figures(site, monkeypatch):
    # Nothing is lost here, so nothing waits for so long.
    monkeypatch.setattr(reaching, "_WAIT_S", 10.0)
    opened = doors(site)
    told = reach_one(site, opened["ports"], opened["udp_port"])
    assert not told["error"]
    assert not told["lost_bytes"]
    assert told["own_mtu"] == LOOPBACK_MTU
    assert told["mtu"] == LOOPBACK_MTU
    assert set(listen(site, {})["heard"]) == {"a"}


def test_a_second_question_opens_no_more(site):
    assert doors(site) == doors(site)


def test_a_closed_port_is_refused(site):
    opened = doors(site)
    with socket.create_server(("127.0.0.1", 0)) as closing:
        closed = closing.getsockname()[1]
    told = reach_one(site, [*opened["ports"], closed], opened["udp_port"])
    assert told["error"] == f"port {closed}: connection refused"
    assert told["is_refused"]


def test_a_port_that_never_answers_costs_a_second(site):
    opened = doors(site)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        # One connection fills the queue of zero; the kernel drops what comes then.
        with socket.create_connection(address), ExitStack() as filling:
            for _ in range(2):
                more = filling.enter_context(socket.socket())
                more.setblocking(False)
                more.connect_ex(address)
            begun_s = time.monotonic()
            told = reach_one(site, [address[1]], opened["udp_port"])
            took_s = time.monotonic() - begun_s
    assert told["error"] == f"port {address[1]}: no answer"
    assert not told["is_refused"]
    assert took_s < 3


def test_large_messages_that_get_lost_are_no_closed_port(site):
    opened = doors(site)

    def serve(connection):
        while True:
            (size,) = FRAME.unpack(receive_exactly(connection, FRAME.size))
            receive_exactly(connection, size)
            if size > 1000:
                return connection.recv(1)
            connection.sendall(b"\1")

    with served(serve) as port:
        told = reach_one(site, [port], opened["udp_port"])
    assert not told["error"]
    assert told["lost_bytes"] == LARGE_BYTES


def test_a_connection_that_breaks_is_told(site):
    opened = doors(site)
    with served(lambda connection: None) as port:
        told = reach_one(site, [port], opened["udp_port"])
    assert told["error"].startswith("an open connection breaks")


def test_who_does_not_know_the_token_gets_nothing(site):
    opened = doors(site)
    told = reach_one(site, opened["ports"], opened["udp_port"], token="f" * 16)
    assert told["error"]
    assert told["mtu"] is None
    assert doors(site)["heard"] == {}


def test_a_frame_that_is_too_long_ends_the_connection(site):
    opened = doors(site)
    address = ("127.0.0.1", opened["ports"][0])
    token = opened["token"].encode()
    # Less than it waits for one that sends nothing.
    with socket.create_connection(address, 2.0) as connection:
        connection.sendall(token + FRAME.pack(0xFFFFFFFF))
        assert receive_exactly(connection, len(token)) == token
        assert connection.recv(1) == b""


def test_ports_are_closed_at_the_end():
    with ExitStack() as closing:
        port = doors(NodeContext({}, closing))["ports"][0]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1.0)


@pytest.mark.parametrize("limit", [600, 1371, 1500, 9000, 9001])
def test_the_path_mtu_is_found_to_the_byte(limit):
    """A receiver of the test's own, deaf to packets above a size."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.settimeout(5.0)

        def answer():
            while True:
                datagram, sender = deaf.recvfrom(65535)
                if not datagram:
                    return
                if len(datagram) + 28 <= limit:
                    size = struct.pack("!H", len(datagram))
                    deaf.sendto(TOKEN.encode() + size, sender)

        thread = threading.Thread(target=answer)
        thread.start()
        port = deaf.getsockname()[1]
        found = measure_mtu("127.0.0.1", port, TOKEN.encode(), "a", 9000)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ending:
            ending.sendto(b"", ("127.0.0.1", port))
        thread.join()
    assert found == min(limit, 9000)


def test_where_no_datagram_is_answered_the_mtu_is_unknown():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        assert measure_mtu("127.0.0.1", port, TOKEN.encode(), "a", 1500) is None


def test_no_route_no_interface():
    assert own_mtu_towards("") == 0
    assert own_mtu_towards("127.0.0.1") == LOOPBACK_MTU


def test_three_programs_reach_each_other():
    addresses = {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"}
    with panel_of(addresses) as panel:
        begun_s = time.monotonic()
        reaching.run(panel)
        took_s = time.monotonic() - begun_s
    assert took_s < 10
    for name, facts in panel.facts.items():
        assert not facts.unreadable
        told = facts.values[reaching.REACH]
        assert set(told) == set(addresses) - {name}
        assert all(not each["error"] for each in told.values())
        assert facts.values[reaching.MTU] == LOOPBACK_MTU
        # They answer by 127.0.0.1, whatever address they were asked at.
        assert {each["mtu"] for each in told.values()} == {LOOPBACK_MTU}
        assert facts.values[reaching.ADDRESS] == addresses[name]


def test_one_program_has_nobody_to_reach():
    with panel_of({"a": ""}) as panel:
        reaching.run(panel)
    assert panel.facts["a"].values == {}


def test_a_program_that_has_ended_is_left_out():
    addresses = {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"}
    with panel_of(addresses) as panel:
        panel._programs.programs["b"].kill()
        panel._programs.programs["b"].wait()
        reaching.run(panel)
    assert set(panel.facts["a"].values[reaching.REACH]) == {"c"}
    assert panel.facts["b"].unreadable == {reaching.REACH: "its program has ended"}


@given(st.integers(2, 80))
def test_who_reaches_one_is_reached_by_it(num):
    names = [f"n{i}" for i in range(num)]
    plan = reaching.plan_partners(names)
    pairs = {(name, other) for name, others in plan.items() for other in others}
    assert all((other, name) in pairs for name, other in pairs)
    assert all(name != other for name, other in pairs)
    numbers = {len(others) for others in plan.values()}
    assert numbers == ({num - 1} if num <= 32 else {10})
    # The nth partners of all hosts are all different: nobody is met by two at once.
    for nth in zip(*plan.values(), strict=True):
        assert len(set(nth)) == num


FINE = {
    "error": "", "is_refused": False, "lost_bytes": 0, "own_mtu": 1500, "mtu": 1500,
}  # fmt: skip


def test_an_address_that_others_have_too_leads_nowhere():
    """As of a bridge for containers: each has a route there, which is its own."""
    bridge = "172.17.0.1"
    own = {name: [bridge, f"10.0.0.{n}"] for n, name in enumerate("abc", 1)}
    routed = dict.fromkeys(own, frozenset(a for each in own.values() for a in each))
    assert choose_addresses(own, routed) == {n: each[1] for n, each in own.items()}
    # Hosts of one machine have nothing else, and a host may have nothing at all.
    own = {"a": ["10.0.0.1", "10.1.0.1"], "b": ["10.0.0.1"], "c": []}
    routed = dict.fromkeys(own, frozenset({"10.0.0.1", "10.1.0.1"}))
    assert choose_addresses(own, routed) == {"a": "10.1.0.1", "b": "10.0.0.1", "c": ""}


def test_one_success_of_two_is_believed():
    bad = {"error": "port 5: no answer", "is_refused": False, "lost_bytes": 0}
    assert reaching.better(bad, FINE) == FINE
    assert reaching.better(FINE, bad) == FINE
    assert reaching.better(bad, bad)["error"]


def test_of_two_sizes_the_larger_counts():
    assert reaching.better(FINE, FINE | {"mtu": None}) == FINE
    assert reaching.better(FINE | {"mtu": 1400}, FINE) == FINE
