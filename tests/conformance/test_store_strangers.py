"""Processes without the job's secret get nothing from its store, and block no rank.

As one user: other users are in ``tests/faults/test_strangers.py``.
"""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from tests.conformance.test_store import HERE, KEY, network_store
from tests.limits import HANG_S

from ronde.collectives import remote_store
from ronde.errors import StoreError, UsageError
from ronde.store import (
    GREETING_BYTES,
    MAGIC,
    FrameMac,
    HandshakeData,
    Op,
    PendingLimits,
    SharedKey,
    dial_network,
    encode,
    read_secret,
    user_key,
)

NONCE_BYTES = 32


def drain(sock):
    """Return all data until the connection is closed."""
    said = b""
    sock.settimeout(HANG_S)
    try:
        while data := sock.recv(4096):
            said += data
    except ConnectionResetError:
        pass
    return said


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        encode(Op.SET, [b"key", b"mine"]),
        encode(0, [b"n" * NONCE_BYTES, b"", b"p" * 32]),
        encode(0, [b"n" * NONCE_BYTES, b"c" * 8000, b"p" * 32]),
        (1 << 31).to_bytes(4, "big"),
    ],
)
def test_a_stranger_gets_only_a_nonce(said):
    with network_store() as port:
        store = remote_store(HERE, port, SharedKey(KEY), HANG_S)
        store.set("key", "ours")
        with socket.create_connection((HERE, port)) as sock:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            answer = drain(sock)
        assert answer.startswith(MAGIC)
        assert len(answer) == len(MAGIC) + NONCE_BYTES
        assert store.get("key") == b"ours"


def test_another_key_is_refused():
    with network_store() as port:
        with pytest.raises((StoreError, OSError)):
            dial_network(HERE, port, SharedKey(b"x" * 32), HANG_S)
        dial_network(HERE, port, SharedKey(KEY), HANG_S).close()


@contextmanager
def posing(talk):
    """Answer a connection like a false store; yield the port."""
    with socket.create_server((HERE, 0)) as listener, ThreadPoolExecutor(1) as thread:

        def serve():
            with suppress_end(), listener.accept()[0] as sock:
                sock.settimeout(HANG_S)
                talk(sock)

        served = thread.submit(serve)
        yield listener.getsockname()[1]
        served.result(HANG_S)


def suppress_end():
    stack = ExitStack()
    stack.push(lambda kind, *_: kind is not None and issubclass(kind, OSError))
    return stack


def greets_and_agrees(sock):
    sock.sendall(MAGIC + b"n" * NONCE_BYTES)
    sock.recv(4096)
    sock.sendall(encode(0, [b"p" * 32]))


def reflects(sock):
    sock.sendall(MAGIC + b"n" * NONCE_BYTES)
    hello = sock.recv(4096)
    sock.sendall(encode(0, [hello[-32:]]))  # the rank's own proof


@pytest.mark.parametrize(
    "talk",
    [
        greets_and_agrees,
        reflects,
        lambda sock: sock.sendall(b"HTTP/1.0 400 Bad Request\r\n" + b" " * 100),
        lambda sock: None,
    ],
    ids=["agrees", "reflects", "another program", "ends"],
)
def test_a_false_store_is_detected(talk):
    with posing(talk) as port, pytest.raises((StoreError, OSError)):
        dial_network(HERE, port, SharedKey(KEY), HANG_S)


def test_a_silent_store_times_out():
    with socket.create_server((HERE, 0)) as mute, pytest.raises(TimeoutError):
        dial_network(HERE, mute.getsockname()[1], SharedKey(KEY), 0.2)


def receive(sock, num_bytes):
    told = b""
    while len(told) < num_bytes:
        told += sock.recv(num_bytes - len(told))
    return told


def prove(sock):
    """Authenticate to the store; return the MAC of all later frames."""
    sock.settimeout(HANG_S)
    greeting = receive(sock, GREETING_BYTES)
    handshake, hello, expected = SharedKey(KEY).answer(greeting)
    sock.sendall(hello)
    assert receive(sock, len(expected)) == expected
    return FrameMac(SharedKey(KEY), b"client", handshake)


@pytest.mark.parametrize("turned", [0, 5, -1])
def test_changed_frames_are_refused(turned):
    with network_store() as port:
        with socket.create_connection((HERE, port)) as sock:
            frame = bytearray(prove(sock).sign(encode(Op.SET, [b"key", b"value"])))
            frame[4 + turned if turned >= 0 else turned] ^= 1
            sock.sendall(frame)
            assert drain(sock) == b""
        assert not remote_store(HERE, port, SharedKey(KEY), HANG_S).check(["key"])


def test_replayed_frames_are_refused():
    with network_store() as port:
        store = remote_store(HERE, port, SharedKey(KEY), HANG_S)
        with socket.create_connection((HERE, port)) as sock:
            frame = prove(sock).sign(encode(Op.ADD, [b"n", b"1"]))
            sock.sendall(frame)
            assert sock.recv(4096) != b""
            sock.sendall(frame)
            assert drain(sock) == b""
        assert store.get("n") == b"1"
    key, handshake = SharedKey(KEY), HandshakeData(b"", b"")
    there, back = (FrameMac(key, role, handshake) for role in (b"client", b"server"))
    assert there.sign(frame) != back.sign(frame)


def test_many_strangers_block_no_rank():
    """More than may wait, and they stay; the ranks come in all the same."""
    # Until they are authenticated, the ranks are pending as well.
    limits = PendingLimits(most=64, each_s=5 * HANG_S)
    with network_store(limits=limits) as port, ExitStack() as closing:
        pending = [
            closing.enter_context(socket.create_connection((HERE, port)))
            for _ in range(limits.most + 50)
        ]
        stores = [remote_store(HERE, port, SharedKey(KEY), HANG_S) for _ in range(20)]
        with ThreadPoolExecutor(20) as threads:
            assert sorted(threads.map(lambda s: s.add("n", 1), stores)) == [
                *range(1, 21)
            ]
        # The first ones were dropped for later ones, with only a nonce.
        assert len(drain(pending[0])) == len(MAGIC) + NONCE_BYTES


def test_a_stranger_is_disconnected_after_a_time():
    with (
        network_store(limits=PendingLimits(each_s=0.1)) as port,
        socket.create_connection((HERE, port)) as sock,
    ):
        assert len(drain(sock)) == len(MAGIC) + NONCE_BYTES


def test_concurrent_processes_create_one_secret(tmp_path):
    path = tmp_path / "config" / "ronde" / "secret"
    with ThreadPoolExecutor(16) as threads:
        found = set(threads.map(read_secret, [path] * 64))
    assert len(found) == 1
    assert len(found.pop()) == 64
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (
        0o600,
        0o700,
    )
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def loosen(path):
    path.write_text("s" * 64)
    path.chmod(0o640)


def link(path):
    target = path.with_name("other")
    target.write_text("s" * 64)
    target.chmod(0o600)
    path.symlink_to(target)


def shorten(path):
    path.write_text("short")
    path.chmod(0o600)


def give_away(path):
    path.write_text("s" * 64)
    path.chmod(0o600)
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize("spoil", [loosen, link, shorten, give_away, os.mkdir])
def test_a_public_secret_is_refused(tmp_path, spoil):
    if spoil is give_away and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    spoil(tmp_path / "secret")
    with pytest.raises(UsageError, match=r"secret must|cannot create"):
        read_secret(tmp_path / "secret")


def test_a_user_has_one_key_per_job(tmp_path):
    handshake = HandshakeData(b"greeting", b"nonce")
    places = (("1.0", "home"), ("1.0", "home"), ("2.0", "home"), ("1.0", "another"))
    one, same, *others = (
        user_key(job, tmp_path / home).prove(b"client", handshake)
        for job, home in places
    )
    assert one == same
    assert one not in others


def test_concurrent_calls_do_not_mix_replies():
    """Threads of one client never read each other's replies."""
    with network_store() as port:
        store = remote_store(HERE, port, SharedKey(KEY), HANG_S)
        wrong = []

        def ask(number):
            for turn in range(50):
                store.set(f"{number}", f"{number} {turn}")
                if store.get(f"{number}") != f"{number} {turn}".encode():
                    wrong.append((number, turn))

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
        assert wrong == []
