"""The job's store behaves like torch's stores, alone and under ``PrefixStore``."""

import socket
import threading
from contextlib import contextmanager
from datetime import timedelta
from random import Random

import pytest
from tests.limits import HANG_S
from tests.ranks import job_store
from torch.distributed import HashStore, PrefixStore, TCPStore

from ronde.collectives import RendezvousStore, remote_store, store_at
from ronde.errors import StoreError
from ronde.store import (
    MAX_FRAME_BYTES,
    Limits,
    Op,
    SharedKey,
    Splitter,
    StoreState,
    decode,
    dial,
    encode,
    serve_network,
)

HERE, KEY = "127.0.0.1", b"k" * 32
SOON = timedelta(seconds=0.1)


@contextmanager
def stores(kind):
    """Yield two clients of one empty store."""
    limit = timedelta(seconds=HANG_S)
    if kind == "tcp":
        first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield (
            first,
            TCPStore("127.0.0.1", first.port, wait_for_workers=False, timeout=limit),
        )
    elif kind == "network":
        with network_store() as port:
            yield tuple(
                remote_store(HERE, port, SharedKey(KEY), HANG_S) for _ in range(2)
            )
    else:
        with job_store() as path:
            yield store_at(path, HANG_S), store_at(path, HANG_S)


@contextmanager
def network_store(**limits):
    """Serve clients with the key on a port of the loopback; yield the port."""
    listener = socket.create_server((HERE, 0))
    server = serve_network(listener, SharedKey(KEY), 64, **limits)
    try:
        yield listener.getsockname()[1]
    finally:
        server.close()


@pytest.fixture(params=["job", "network", "tcp"])
def bare(request):
    with stores(request.param) as pair:
        yield pair


@pytest.fixture(params=["bare", "prefix"])
def pair(request, bare):
    if request.param == "bare":
        return bare
    return tuple(PrefixStore("a", PrefixStore("b", store)) for store in bare)


def test_values_are_shared(pair):
    one, other = pair
    one.set("key", "text")
    assert other.get("key") == b"text"
    other.set("key", b"\x00\xff" * 1000)
    assert other.check(["key"])  # as TCPStore's set() does not wait
    assert one.get("key") == b"\x00\xff" * 1000
    assert one.check(["key"])
    assert not one.check(["key", "another"])


def test_numbers_are_added(pair):
    one, other = pair
    assert [one.add("n", 1), other.add("n", 5), one.add("n", -2)] == [1, 6, 4]
    assert other.get("n") == b"4"


def test_compare_set_sets_only_expected_values(pair):
    one, other = pair
    assert one.compare_set("key", "", "first") == b"first"
    assert other.compare_set("key", "no", "second") == b"first"
    assert other.compare_set("key", "first", "second") == b"second"
    assert one.compare_set("absent", "thing", "new") == b"thing"
    assert not one.check(["absent"])


def test_a_key_is_deleted_once(pair):
    one, other = pair
    one.set("key", "")
    assert one.check(["key"])  # as above
    assert other.delete_key("key")
    assert not one.delete_key("key")
    assert not other.check(["key"])


def test_several_at_once(bare):
    one, other = bare
    one, other = PrefixStore("p", one), PrefixStore("p", other)
    before = one.num_keys()
    one.multi_set(["a", "b"], ["1", b"2"])
    assert other.multi_get(["b", "a"]) == [b"2", b"1"]
    other.append("a", "23")
    other.append("c", b"x")
    assert one.multi_get(["a", "c"]) == [b"123", b"x"]
    assert one.num_keys() - before == 3
    assert one.has_extended_api()


def test_wait_returns_when_all_keys_exist(pair):
    one, other = pair
    done = threading.Event()

    def wait():
        other.wait(["a", "b"], timedelta(seconds=HANG_S))
        done.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    one.set("a", "")
    assert not done.wait(0.1)
    one.set("b", "")
    waiting.join(HANG_S)
    assert done.is_set()


def test_waiting_times_out(pair):
    one, _ = pair
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        one.wait(["never"], SOON)
    one.set("after", "")  # and the store goes on
    assert one.get("after") == b""


def test_a_wait_blocks_no_other_thread():
    """Not even with the very same object; torch's own needs a clone for that."""
    with job_store() as path:
        store = store_at(path, HANG_S)
        threads = [
            threading.Thread(target=store.wait, args=(["go"],)) for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        store.clone().set("go", "")
        for thread in threads:
            thread.join(HANG_S)
        assert not any(thread.is_alive() for thread in threads)


def ask(state, client, kind, *fields):
    replies = state.handle(client, encode(kind, fields)[4:])
    return [(each, decode(reply[4:])) for each, reply in replies]


def test_addresses_of_a_group_are_fetched_together():
    class Counting(HashStore):
        num_asked = 0

        def multi_get(self, keys):
            self.num_asked += 1
            return super().multi_get(keys)

    counting = Counting()
    store = RendezvousStore(counting, 300)
    for number in range(300):
        store.set(f"0/{number}", f"at {number}")
    for number in range(300):
        store.wait([f"0/{number}"])
        assert store.get(f"0/{number}") == f"at {number}".encode()
    assert counting.num_asked == 3


def test_the_content_is_bounded():
    state = StoreState(Limits(key_bytes=10, value_bytes=100, total_bytes=1000))
    for fields in ((b"k" * 11, b""), (b"k", b"v" * 101)):
        ((_, reply),) = ask(state, 1, Op.SET, *fields)
        assert (reply.kind, b"must be at most" in reply.fields[0]) == (1, True)
    kinds = [ask(state, 1, Op.SET, b"%d" % n, b"v" * 90)[0][1].kind for n in range(9)]
    assert kinds == [0] * 3 + [1] * 6
    assert ask(state, 1, Op.DELETE, b"0")[0][1].fields == (b"1",)
    assert ask(state, 1, Op.APPEND, b"1", b"v" * 11)[0][1].kind == 1
    assert ask(state, 1, Op.SET, b"new", b"v" * 90)[0][1].kind == 0
    assert ask(state, 1, Op.ADD, b"new", b"1")[0][1].kind == 1  # it is no number


def test_a_disconnected_client_gets_no_reply():
    state = StoreState()
    assert ask(state, "gone", Op.WAIT, b"a", b"b") == []
    assert ask(state, "here", Op.WAIT, b"a") == []
    state.forget("gone")
    assert [c for c, _ in ask(state, "setter", Op.SET, b"a", b"1")] == [
        "setter",
        "here",
    ]
    assert [c for c, _ in ask(state, "setter", Op.SET, b"b", b"1")] == ["setter"]


def test_clear_refuses_waiting_clients():
    state = StoreState(Limits(total_bytes=1000))
    ask(state, "setter", Op.SET, b"a", b"v" * 700)
    assert ask(state, "waits", Op.GET, b"a", b"b") == []
    assert ask(state, "waits too", Op.WAIT, b"b", b"c") == []
    refused = [(client, decode(reply[4:])) for client, reply in state.clear()]
    assert [client for client, _ in refused] == ["waits", "waits too"]
    assert all(r.kind == 1 and b"cleared" in r.fields[0] for _, r in refused)
    assert state.clear() == []
    assert ask(state, "waits", Op.COUNT)[0][1].fields == (b"0",)
    # No client waits now, and there is room as at first.
    for name in (b"a", b"b", b"c"):
        assert len(ask(state, "setter", Op.SET, name, b"")) == 1
    assert ask(state, "setter", Op.SET, b"a", b"v" * 190)[0][1].kind == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x63",
        b"\x01",
        b"\x01\x00\x00\x00\x09ab",
        b"\x01\x00\x00\x00\x01a",
        b"\x05\x00\x00\x00\x01a",
        b"\x02",
        b"\x02\xff\xff\xff\xffa",
    ],
)
def test_bad_requests_are_refused(body):
    with pytest.raises(StoreError):
        StoreState().handle(1, body)


def test_frames_are_split_at_any_boundary():
    drawing = Random(7)
    bodies = [drawing.randbytes(drawing.randrange(1, 300)) for _ in range(200)]
    stream = b"".join(len(b).to_bytes(4, "big") + b for b in bodies)
    splitter, found, at = Splitter(), [], 0
    while at < len(stream):
        step = drawing.randrange(1, 700)
        found += splitter.feed(stream[at : at + step])
        at += step
    assert found == bodies


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, (1 << 32) - 1])
def test_an_impossible_length_is_refused_at_once(length):
    with pytest.raises(StoreError, match="frame length must be"):
        Splitter().feed(length.to_bytes(4, "big"))


def test_bad_data_ends_only_its_connection():
    with job_store() as path:
        store = store_at(path, HANG_S)
        store.set("key", "value")
        for said in (b"\xff" * 64, b"\0\0\0\1\x63", b"GET / HTTP/1.0\r\n\r\n"):
            with dial(path, HANG_S) as sock:
                sock.sendall(said)
                assert sock.recv(100) == b""
        assert store.get("key") == b"value"


def test_a_missing_socket_is_explained(tmp_path):
    """As one in a container that does not share ``/tmp`` with its launcher."""
    store = store_at(str(tmp_path / "store"), HANG_S)
    with pytest.raises(StoreError, match=r"share /tmp with its launcher") as caught:
        store.set("key", "")
    assert str(tmp_path / "store") in str(caught.value)
