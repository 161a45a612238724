"""Programs on one machine reach each other through real sockets."""

import socket
import struct
import threading
from contextlib import ExitStack, contextmanager, suppress

import pytest
from hypothesis import given, strategies as st
from tests.check.programs import run_step, start_hosts, start_without_b
from tests.limits import HANG_S

from ronde.check import (
    FRAME,
    LARGE_BYTES,
    NodeContext,
    better,
    choose_addresses,
    listen,
    measure_mtu,
    plan_partners,
    reach,
    receive_exactly,
)
from ronde.launch import measure_ssh_path

ADDRESS, MTU, REACH = "network.address", "network.peer_mtu", "network.reach"
TOKEN = "0123456789abcdef"  # noqa: S105
LOOPBACK_MTU = 65536


@pytest.fixture
def context():
    with ExitStack() as closing:
        yield NodeContext({}, closing)


def reach_one(context, ports, udp_port, token=None, **given):
    target = {
        "name": "b",
        "address": "127.0.0.1",
        "ports": ports,
        "udp_port": udp_port,
        "token": token or listen(context, {})["token"],
    }
    question = {"name": "a", "targets": [target]}
    return reach(context, question, **given)["reached"]["b"]


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


def test_a_working_connection_is_reported(context):
    opened = listen(context, {})
    # Nothing is lost here, so nothing waits for so long.
    reported = reach_one(context, opened["ports"], opened["udp_port"], wait_s=HANG_S)
    assert not reported["error"]
    assert not reported["lost_bytes"]
    assert reported["own_mtu"] == LOOPBACK_MTU
    assert reported["mtu"] == LOOPBACK_MTU
    assert set(listen(context, {})["heard"]) == {"a"}


def test_a_closed_port_is_refused(context):
    opened = listen(context, {})
    with socket.create_server(("127.0.0.1", 0)) as closing:
        closed = closing.getsockname()[1]
    reported = reach_one(context, [*opened["ports"], closed], opened["udp_port"])
    assert reported["error"] == f"port {closed}: connection refused"
    assert reported["is_refused"]


@pytest.mark.waits
def test_a_port_that_never_answers_is_reported(context):
    opened = listen(context, {})
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        # One connection fills the queue of zero; the kernel drops later ones.
        with socket.create_connection(address), ExitStack() as filling:
            for _ in range(2):
                more = filling.enter_context(socket.socket())
                more.setblocking(False)
                more.connect_ex(address)
            reported = reach_one(context, [address[1]], opened["udp_port"])
    assert reported["error"] == f"port {address[1]}: no answer"
    assert not reported["is_refused"]


@pytest.mark.waits
def test_lost_large_messages_are_no_closed_port(context):
    opened = listen(context, {})

    def serve(connection):
        while True:
            (size,) = FRAME.unpack(receive_exactly(connection, FRAME.size))
            receive_exactly(connection, size)
            if size > 1000:
                return connection.recv(1)
            connection.sendall(b"\1")

    with served(serve) as port:
        reported = reach_one(context, [port], opened["udp_port"])
    assert not reported["error"]
    assert reported["lost_bytes"] == LARGE_BYTES


def test_a_connection_that_breaks_is_reported(context):
    opened = listen(context, {})
    with served(lambda connection: None) as port:
        reported = reach_one(context, [port], opened["udp_port"])
    assert reported["error"].startswith("an open connection breaks")


def test_a_wrong_token_gets_nothing(context):
    opened = listen(context, {})
    reported = reach_one(context, opened["ports"], opened["udp_port"], token="f" * 16)
    assert reported["error"]
    assert reported["mtu"] is None
    assert listen(context, {})["heard"] == {}


def test_a_frame_that_is_too_long_ends_the_connection(context):
    opened = listen(context, {})
    address = ("127.0.0.1", opened["ports"][0])
    token = opened["token"].encode()
    with socket.create_connection(address, HANG_S) as connection:
        connection.sendall(token + FRAME.pack(0xFFFFFFFF))
        assert receive_exactly(connection, len(token)) == token
        assert connection.recv(1) == b""


def test_ports_are_closed_at_the_end():
    with ExitStack() as closing:
        port = listen(NodeContext({}, closing), {})["ports"][0]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1.0)


@pytest.mark.waits
@pytest.mark.parametrize("limit", [1371, 9001])
def test_the_path_mtu_is_found_to_the_byte(limit):
    """A receiver of the test's own, deaf to packets above a size."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.settimeout(HANG_S)

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
        found = measure_mtu("127.0.0.1", port, TOKEN.encode(), "a", 9000, wait_s=0.2)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ending:
            ending.sendto(b"", ("127.0.0.1", port))
        thread.join()
    assert found == min(limit, 9000)


@pytest.mark.parametrize(
    ("greeting", "lost"), [(b"SSH-2.0-any\r\n", 0), (b"220 mail\r\n", None)]
)
def test_an_ssh_server_and_another_server(greeting, lost):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            # A client that has read only a part of the greeting resets.
            with connection, suppress(ConnectionResetError):
                connection.sendall(greeting)
                while connection.recv(1 << 16):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        found = measure_ssh_path(*listener.getsockname())
        thread.join()
    assert (found and found.lost) == lost


def test_three_programs_reach_each_other():
    addresses = {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"}
    with start_hosts(addresses) as hosts:
        run_step("reaching", hosts)
    for name, facts in hosts.facts.items():
        assert not facts.unreadable
        reported = facts.values[REACH]
        assert set(reported) == set(addresses) - {name}
        assert all(not each["error"] for each in reported.values())
        assert facts.values[MTU] == LOOPBACK_MTU
        # They answer from 127.0.0.1, whichever address was used.
        assert {each["mtu"] for each in reported.values()} == {LOOPBACK_MTU}
        assert facts.values[ADDRESS] == addresses[name]


def test_a_program_that_has_ended_is_left_out():
    addresses = {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"}
    with start_hosts(addresses, start=start_without_b) as hosts:
        run_step("reaching", hosts)
    assert set(hosts.facts["a"].values[REACH]) == {"c"}
    assert hosts.facts["b"].unreadable == {REACH: "its program has ended"}


@given(st.integers(2, 80))
def test_targets_are_mutual(num):
    names = [f"n{i}" for i in range(num)]
    plan = plan_partners(names)
    pairs = {(name, other) for name, others in plan.items() for other in others}
    assert all((other, name) in pairs for name, other in pairs)
    assert all(name != other for name, other in pairs)
    numbers = {len(others) for others in plan.values()}
    assert numbers == ({num - 1} if num <= 32 else {10})
    # The nth targets of all hosts differ, so that no host gets two at once.
    for nth in zip(*plan.values(), strict=True):
        assert len(set(nth)) == num


FINE = {
    "error": "", "is_refused": False, "lost_bytes": 0, "own_mtu": 1500, "mtu": 1500,
}  # fmt: skip


def test_a_shared_address_is_not_chosen():
    """As of a bridge for containers: each has a route there, which is its own."""
    bridge = "172.17.0.1"
    own = {name: [bridge, f"10.0.0.{n}"] for n, name in enumerate("abc", 1)}
    routed = dict.fromkeys(own, frozenset(a for each in own.values() for a in each))
    assert choose_addresses(own, routed) == {n: each[1] for n, each in own.items()}
    # Hosts of one machine have nothing else, and a host may have nothing at all.
    own = {"a": ["10.0.0.1", "10.1.0.1"], "b": ["10.0.0.1"], "c": []}
    routed = dict.fromkeys(own, frozenset({"10.0.0.1", "10.1.0.1"}))
    assert choose_addresses(own, routed) == {"a": "10.1.0.1", "b": "10.0.0.1", "c": ""}


def test_one_success_of_two_attempts_counts():
    bad = {"error": "port 5: no answer", "is_refused": False, "lost_bytes": 0}
    assert better(bad, FINE) == FINE
    assert better(FINE, bad) == FINE
    assert better(bad, bad)["error"]
