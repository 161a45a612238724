"""Nodes join a head over real sockets: which may, and what the others learn."""

import os
import queue
import random
import re
import select
import signal
import socket
import ssl
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from tests.limits import HANG_S

from ronde.errors import HostError, LaunchError, StoreError, UsageError
from ronde.launch import (
    MAGIC,
    InterruptedStartError,
    JoinConfig,
    JoinRequest,
    NodeInfo,
    authenticate_head,
    join_head,
    make_head_tls,
    make_node_context,
    release,
    wait_for_nodes,
)
from ronde.store import GREETING_BYTES, SharedKey, decode, encode

TOKEN = SharedKey(b"0123456789abcdef" * 2)
OTHER = SharedKey(b"fedcba9876543210" * 2)
HERE = "127.0.0.1"


class Head:
    """``wait_for_nodes`` in a thread of its own."""

    def __init__(self, pool, signal_fd, num_nodes, timeout_s=HANG_S, **options):
        self.notices = []
        self._told = queue.Queue()
        config = JoinConfig(HERE, 0, TOKEN, "head", num_nodes, timeout_s, **options)
        self.done: Future = pool.submit(wait_for_nodes, config, signal_fd, self._notice)
        self.port = int(self.await_notice(r"--agent 127\.0\.0\.1:(\d+)")[1])

    def _notice(self, text):
        self.notices.append(text)
        self._told.put(text)

    def await_notice(self, pattern):
        ends_at = time.monotonic() + HANG_S
        while True:
            text = self._told.get(timeout=max(0.01, ends_at - time.monotonic()))
            if found := re.search(pattern, text):
                return found

    def nodes(self):
        server = self.done.result(HANG_S)
        return [(host, server.take(host.name)) for host in server.hosts]


@pytest.fixture
def signals():
    """A pipe that stands for the one of ``caught_signals``."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    yield read_fd, write_fd
    os.close(read_fd)
    os.close(write_fd)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as executor:
        yield executor


@pytest.fixture
def start_head(pool, signals):
    heads = []

    def start(num_nodes=1, **options):
        heads.append(Head(pool, signals[0], num_nodes, **options))
        return heads[-1]

    yield start
    os.write(signals[1], bytes([signal.SIGTERM]) * 8)
    for head in heads:
        if head.done.exception(HANG_S) is None:
            release(head.done.result().channels, 0)


def request(port, *, token=TOKEN, name="node1", timeout_s=HANG_S, slots=-1, number=-1):
    return JoinRequest(HERE, port, token, NodeInfo(name, slots, number), timeout_s)


@contextmanager
def joined(head, fd, **options):
    channel = join_head(request(head.port, **options), fd, lambda _text: None)
    try:
        yield channel
    finally:
        channel.kill()


@contextmanager
def tls_client(port):
    """A TLS connection as a node's, that blocks and has said nothing yet."""
    with (
        socket.create_connection((HERE, port), HANG_S) as raw,
        make_node_context().wrap_socket(raw) as sock,
    ):
        yield sock


def receive(sock, size):
    data = b""
    while len(data) < size and (more := sock.recv(size - len(data))):
        data += more
    return data


def receive_frame(sock):
    length = receive(sock, 4)
    return length + receive(sock, int.from_bytes(length, "big"))


def is_open(port):
    try:
        socket.create_connection((HERE, port), HANG_S).close()
    except ConnectionRefusedError:
        return False
    return True


def drive(steps, sock, *, timeout_s=HANG_S):
    for wanted in steps:
        poll = select.poll()
        poll.register(sock, wanted)
        assert poll.poll(timeout_s * 1000)


def test_a_node_with_the_token_joins_and_then_nothing_listens(start_head, signals):
    head = start_head()
    with joined(head, signals[0], slots=3):
        [(host, transport)] = head.nodes()
        assert (host.name, host.slots) == ("node1", 3)
        assert not is_open(head.port)
        transport.kill()


def test_no_data_stays_behind_where_no_poll_tells_of_it(start_head, signals):
    head = start_head()
    data = random.randbytes(1 << 20)
    with joined(head, signals[0]) as channel:
        [(_, transport)] = head.nodes()
        left = memoryview(data)
        writer = threading.Thread(target=_write_all, args=(channel, left))
        writer.start()
        got = b""
        while len(got) < len(data):
            poll = select.poll()
            poll.register(transport.read_fd, select.POLLIN)
            assert poll.poll(HANG_S * 1000), "data is held back"
            got += transport.read() or b""
        writer.join(HANG_S)
        assert got == data
        assert transport.read() is None
        transport.kill()


def _write_all(channel, left):
    poll = select.poll()
    poll.register(channel.read_fd, select.POLLOUT)
    while left and poll.poll(HANG_S * 1000):
        left = left[channel.write(left) :]


def test_the_end_and_the_last_word_of_each_side_arrive(start_head, signals):
    head = start_head()
    with joined(head, signals[0]) as channel:
        [(_, transport)] = head.nodes()
        assert transport.write(memoryview(b"last")) == 4
        transport.close()
        assert _read_one(channel) == b"last"
        assert (channel.is_ended, channel.result) == (True, None)
        assert transport.wait(0.05) is None
        channel.send_result(9)
        assert transport.wait(HANG_S) == 9
        assert transport.read() == b""
        dismissing = threading.Thread(target=release, args=([transport], 42))
        dismissing.start()
        assert channel.wait(HANG_S) == 42
        channel.kill()
        dismissing.join(HANG_S)
        assert not dismissing.is_alive()


def _read_one(channel):
    ends_at = time.monotonic() + HANG_S
    while (data := channel.read()) is None and time.monotonic() < ends_at:
        poll = select.poll()
        poll.register(channel.read_fd, select.POLLIN)
        poll.poll(100)
    return data


def test_a_wrong_token_is_reported_once_at_the_head_only(start_head, signals):
    head = start_head()
    for _ in range(3):
        with tls_client(head.port) as sock:
            sock.setblocking(False)
            with pytest.raises(EOFError):
                drive(authenticate_head(sock, OTHER, NodeInfo("node1", 1)), sock)
    head.await_notice("127.0.0.1 does not know the token; it was closed")
    with joined(head, signals[0]):
        [(_, transport)] = head.nodes()
        transport.kill()
    assert len([n for n in head.notices if "does not know the token" in n]) == 2
    assert head.notices[-1] == "3 connections in total: each does not know the token"


def test_before_its_proof_a_client_gets_nothing_that_depends_on_the_token(start_head):
    head = start_head()
    with tls_client(head.port) as sock:
        hello_reader = receive(sock, GREETING_BYTES)
        sock.sendall(encode(0, [bytes(32), b"", bytes(32)]))
        assert receive(sock, 1) == b""
    with tls_client(head.port) as sock:
        again = receive(sock, GREETING_BYTES)
    assert hello_reader[:-32] == again[:-32]
    assert hello_reader[-32:] != again[-32:]


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 4000, bytes(100), b""],
    ids=["http", "broken tls", "zeros", "nothing"],
)
def test_noise_is_closed_and_keeps_nobody_out(start_head, signals, noise):
    head = start_head()
    with socket.create_connection((HERE, head.port), HANG_S) as sock:
        with suppress(OSError):
            sock.sendall(noise)
            sock.shutdown(socket.SHUT_WR)
        _drain(sock)
    with joined(head, signals[0]):
        [(_, transport)] = head.nodes()
        transport.kill()
    assert any("did not prove that it knows" in n for n in head.notices)


def _drain(sock):
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        return


def record_answer(port, token=TOKEN):
    """Return what a node of ours says in answer to the head's greeting."""
    said = []

    class Spy(ssl.SSLSocket):
        def send(self, data, flags=0):
            said.append(bytes(data))
            return super().send(data, flags)

    context = make_node_context()
    context.sslsocket_class = Spy
    with socket.create_connection((HERE, port), HANG_S) as raw:
        raw.setblocking(False)
        with context.wrap_socket(raw, do_handshake_on_connect=False) as sock:
            drive(authenticate_head(sock, token, NodeInfo("node1", 1)), sock)
    return b"".join(said)


@pytest.mark.parametrize("num_nodes", [1, 2], ids=["another job", "the same job"])
def test_a_recorded_proof_opens_no_other_connection(start_head, num_nodes):
    first = start_head(num_nodes)
    answer = record_answer(first.port)
    head = first if num_nodes > 1 else start_head()
    with tls_client(head.port) as sock:
        receive(sock, GREETING_BYTES)
        sock.sendall(answer)
        assert receive(sock, 1) == b""
    head.await_notice("does not know the token")
    if head is not first:
        first.nodes()


@contextmanager
def fake_head(serve):
    """Listen where the head should, with another certificate."""
    tls = make_head_tls()

    def run(listener):
        raw, _ = listener.accept()
        raw.settimeout(HANG_S)
        with tls.context.wrap_socket(raw, server_side=True) as sock:
            serve(sock)

    with ThreadPoolExecutor(1) as executor, socket.create_server((HERE, 0)) as listener:
        listener.settimeout(HANG_S)
        serving = executor.submit(run, listener)
        yield listener.getsockname()[1]
        serving.result(HANG_S)


def join_once(port):
    with socket.create_connection((HERE, port), HANG_S) as raw:
        raw.setblocking(False)
        with make_node_context().wrap_socket(
            raw, do_handshake_on_connect=False
        ) as sock:
            drive(authenticate_head(sock, TOKEN, NodeInfo("node1", 1)), sock)


def test_a_node_does_not_take_its_own_proof_for_the_heads():
    def reflect(sock):
        sock.sendall(MAGIC + bytes(32))
        _, _, proof = decode(receive_frame(sock)[4:]).fields
        sock.sendall(encode(0, [proof]))

    with (
        fake_head(reflect) as port,
        pytest.raises(StoreError, match="is not the head node, or it intercepts"),
    ):
        join_once(port)


def test_a_proxy_gets_no_access(start_head):
    head = start_head()

    def pass_on(sock):
        with tls_client(head.port) as onward:
            sock.sendall(receive(onward, GREETING_BYTES))
            onward.sendall(receive_frame(sock))
            assert receive(onward, 1) == b""

    with fake_head(pass_on) as port, pytest.raises(EOFError):
        join_once(port)
    head.await_notice("does not know the token")
    assert not head.done.done()


def test_a_head_of_another_version_says_so():
    def be_newer(sock):
        sock.sendall(MAGIC[:-4] + b"\0\0\xff\xff" + bytes(32))

    with (
        fake_head(be_newer) as port,
        pytest.raises(LaunchError, match=r"protocol 65535, .* Run the same"),
    ):
        join_once(port)


def test_a_hundred_silent_connections_do_not_keep_a_node_out(start_head, signals):
    head = start_head(authenticate_s=2 * HANG_S)
    silent = [socket.create_connection((HERE, head.port)) for _ in range(100)]
    with joined(head, signals[0]):
        [(_, transport)] = head.nodes()
        transport.kill()
    for sock in silent:
        sock.settimeout(HANG_S)
        _drain(sock)
        sock.close()


def test_a_node_that_goes_again_is_waited_for_again(start_head, signals):
    head = start_head(2)
    with joined(head, signals[0], name="node1"):
        head.await_notice("node1 has joined")
    head.await_notice("node1 left before the job began")
    with joined(head, signals[0], name="node1"), joined(head, signals[0], name="node2"):
        nodes = head.nodes()
        assert [host.name for host, _ in nodes] == ["node1", "node2"]
        for _, transport in nodes:
            transport.kill()


def test_an_elastic_job_starts_when_nobody_else_has_come_for_a_while(
    start_head, signals
):
    ahead_s = 0.0
    head = start_head(1, most=2, num_each=4, stays_open=True, clock=lambda: ahead_s)
    with joined(head, signals[0], name="node7"):
        head.await_notice(r"node7 has joined \(1 of 2\)")
        assert not head.done.done()
        ahead_s = 5.0
        socket.create_connection((HERE, head.port), HANG_S).close()  # wakes it
        [(host, transport)] = head.nodes()
        assert (host.name, host.slots) == ("node7", 4)
        transport.kill()
        assert is_open(head.port)
        head.done.result().close()
        assert not is_open(head.port)


def test_a_number_that_is_connected_is_refused_with_a_reason(start_head, signals):
    head = start_head(2)
    with joined(head, signals[0], name="node1", number=1):
        for number, other in ((1, "node1"), (0, "head")):
            again = request(head.port, number=number, timeout_s=0.0)
            with pytest.raises(
                HostError, match=f"{other} is connected as number {number}."
            ):
                join_head(again, signals[0], lambda _: None)
            head.await_notice(f"is a second pod {number}, beside {other}")


def test_the_head_lists_the_nodes_that_joined_in_time(start_head, signals):
    ahead_s = 0.0
    head = start_head(3, timeout_s=5.0, clock=lambda: ahead_s)
    with joined(head, signals[0], name="node7") as channel:
        head.await_notice("node7 has joined")
        ahead_s = 5.0
        socket.create_connection((HERE, head.port), HANG_S).close()  # wakes it
        error = head.done.exception(HANG_S)
        assert isinstance(error, HostError)
        assert re.search(
            r"only 1 of 3 nodes joined within 5 s: node7\. Run on", str(error)
        )
        assert _read_one(channel) == b""
    assert not is_open(head.port)


def test_a_signal_ends_the_wait_of_the_head(start_head, signals):
    head = start_head()
    os.write(signals[1], bytes([signal.SIGCHLD, signal.SIGINT]))
    error = head.done.exception(HANG_S)
    assert isinstance(error, InterruptedStartError)
    assert error.number == signal.SIGINT
    assert not is_open(head.port)


@contextmanager
def silent_port():
    """Hold a port where nothing listens, for as long as it is needed."""
    with socket.socket() as sock:
        # A server may listen there meanwhile.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((HERE, 0))
        yield sock.getsockname()[1]


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("127.0.0.1", "nothing listens there"),
        ("no-such-host.invalid", "its name is not known"),
    ],
)
def test_a_node_that_finds_no_head_says_why(signals, host, reason):
    with silent_port() as port:
        looking = JoinRequest(host, port, TOKEN, NodeInfo("node1", 1), 0.3)
        with pytest.raises(HostError, match=f"within 0.3 s: {reason}"):
            join_head(looking, signals[0], lambda _: None)


def test_an_address_of_another_machine_or_a_taken_port_is_refused(signals):
    with socket.create_server((HERE, 0)) as taken:
        for address, port in (("192.0.2.1", 0), (HERE, taken.getsockname()[1])):
            config = JoinConfig(address, port, TOKEN, "head", 1, 1.0)
            with pytest.raises(UsageError, match="Give --listen another address"):
                wait_for_nodes(config, signals[0], lambda _: None)


def test_listening_everywhere_is_warned_of(signals):
    config = JoinConfig("0.0.0.0", 0, TOKEN, "head", 1, 0.1)  # noqa: S104
    notices = []
    with pytest.raises(HostError):
        wait_for_nodes(config, signals[0], notices.append)
    assert "listening on all networks" in notices[0]
    assert "--agent head:" in notices[1]
