"""Rank 0 calls the roll: who is let in, who is told apart, who is missed."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from ronde.collectives.roll_call import answer_roll, call_roll
from ronde.errors import CollectiveError
from ronde.world import Claim, Launcher

TOKEN = "ours"  # noqa: S105
SIZE = 3


@contextmanager
def calling(timeout_s=30.0):
    """Call a roll of three ranks; yield its port and what comes of it."""
    claim = Claim(Launcher.SLURM, 0, SIZE, 0, 1)
    with ThreadPoolExecutor(1) as thread, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        called = thread.submit(call_roll, listener, TOKEN, claim, timeout_s)
        yield port, called


def answer(port, rank, token=TOKEN):
    """Answer as soon as the roll is called."""
    for _ in range(1000):
        store = answer_roll("127.0.0.1", port, token, rank, 10.0)
        if store is not None:
            return store
    raise AssertionError("the roll must be called")


def answer_in_vain(port, said):
    """Say something else, and return what is answered; a reset is no answer."""
    with (
        suppress(OSError),
        socket.create_connection(("127.0.0.1", port), 10.0) as asking,
    ):
        asking.sendall(said)
        asking.shutdown(socket.SHUT_WR)
        return asking.recv(100)
    return b""


def test_all_who_show_the_token_come_to_one_store():
    with calling() as (port, called):
        others = [answer(port, rank) for rank in (1, 2)]
        store = called.result(10.0)
    store.set("word", "given")
    assert [other.get("word") for other in others] == [b"given"] * 2
    assert store.host == "127.0.0.1"


def test_who_does_not_show_the_token_is_told_nothing_and_not_counted():
    with calling() as (port, called):
        first = answer(port, 1)
        assert answer_roll("127.0.0.1", port, "theirs", 2, 10.0) is None
        for said in (b"theirs 2\n", b"\n", b"\xff\n", b"ours", b"x" * 1000, b""):
            assert answer_in_vain(port, said) == b""
        assert not called.done()
        second = answer(port, 2)
        called.result(10.0).set("word", "given")
        assert first.get("word") == second.get("word") == b"given"


def test_a_rank_that_does_not_hear_the_answer_may_ask_again():
    with calling() as (port, called):
        answer(port, 1)
        assert answer_in_vain(port, b"ours 2\n") != b""
        assert not called.done()
        answer(port, 2)
        called.result(10.0)


def test_who_says_nothing_holds_nobody_up_for_long():
    with calling() as (port, called):
        answer(port, 1)
        with socket.create_connection(("127.0.0.1", port), 10.0):
            answer(port, 2)
            called.result(10.0)


def test_absent_ranks_are_named():
    with calling(timeout_s=0.5) as (port, called):
        answer(port, 1)
        with pytest.raises(CollectiveError, match=r"no word from ranks \[2\] \(1 in"):
            called.result(10.0)
