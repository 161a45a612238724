"""Control channels whose neighbours die, stop or close."""

import itertools
import os
import signal
import subprocess
import sys

import pytest
from tests.conformance.control import (
    LAYOUTS,
    OVER,
    Mailbox,
    await_state,
    connect,
    neighbours,
)
from tests.limits import HANG_S
from tests.ranks import job_store

from ronde.collectives import open_store
from ronde.coordination import connect_channel
from ronde.errors import CollectiveError

pytestmark = pytest.mark.waits

DYING = [(hosts, dying) for hosts in ("aaa", "aab") for dying in (0, 2)]
DYING += [("ab", 1), ("abca", 0)]


def await_loss(channel, rank):
    """Return the loss of a rank, and the messages that arrived from it before."""
    received = []
    while True:
        received += [m for sender, m in channel.receive() if sender == rank]
        for loss in channel.find_losses():
            if loss.rank == rank:
                return loss, received
        channel.wait(0.1, is_eager=False)


def die(claim, hosts, dying):
    """A rank sends messages and is killed; all its neighbours report the loss."""
    tree, channel = connect(claim, hosts)
    others = neighbours(tree)
    if claim.rank == dying:
        for other, index in itertools.product(others, range(100)):
            channel.send(other, b"%d" % index)
        # Gloo's threads send what was handed to them; the others say that they have it.
        Mailbox(channel).gather(dict.fromkeys(others, 1))
        for other in others:
            channel.send(other, b"farewell" * 10)
        os.kill(os.getpid(), signal.SIGKILL)
    if dying not in others:
        channel.close()
        return None
    box = Mailbox(channel)
    box.gather({dying: 100})
    channel.send(dying, OVER)
    loss, received = await_loss(channel, dying)
    channel.send(dying, b"nobody reads this")
    assert channel.receive() == []
    assert loss not in channel.find_losses()  # it was reported
    channel.close()
    assert (loss.rank, loss.is_orderly) == (dying, False)
    assert loss.reason.startswith(f"rank {dying}")
    is_local = hosts[claim.rank] == hosts[dying]
    assert not is_local or received == [b"farewell" * 10]
    return "told"


@pytest.mark.parametrize(("hosts", "dying"), DYING)
def test_a_killed_neighbour_is_found(run_ranks_bare, hosts, dying):
    assert "told" in run_ranks_bare(len(hosts), die, hosts, dying, dying={dying})


def leave_in_turn(claim, hosts):
    """The first rank closes its channel, then the last rank another channel."""
    return [leave(claim, hosts, leaving) for leaving in (0, len(hosts) - 1)]


def leave(claim, hosts, leaving):
    """A rank sends and closes at once."""
    tree, channel = connect(claim, hosts)
    others = neighbours(tree)
    if claim.rank == leaving:
        for index, other in itertools.product(range(100), others):
            channel.send(other, bytes(9) + b"%d" % index)
        channel.close()
        return None
    if leaving not in others:
        channel.close()
        return None
    loss, received = await_loss(channel, leaving)
    channel.close()
    assert (loss.rank, loss.is_orderly) == (leaving, True)
    # Shared memory holds what a ring takes, Gloo all.
    assert received[:60] == [bytes(9) + b"%d" % i for i in range(60)]
    return "told"


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_what_was_sent_before_closing_arrives(run_ranks_bare, hosts):
    told = run_ranks_bare(len(hosts), leave_in_turn, hosts)
    for of_one in zip(*told, strict=True):
        assert "told" in of_one


def outlive_a_stopped_neighbour(claim, hosts):
    """A stopped neighbour is not lost: it answers after it continues."""
    _, channel = connect(claim, hosts)
    box = Mailbox(channel)
    if claim.rank == 1:
        channel.send(0, b"%d" % os.getpid())
        box.gather({0: 1})
        os.kill(os.getpid(), signal.SIGSTOP)
        channel.send(0, OVER)
        losses = []
    else:
        box.gather({1: 1})
        pid = int(box.received[1][0])
        channel.send(1, OVER)
        await_state(pid, "T")
        losses = [loss for _ in range(10) for loss in channel.find_losses()]
        for _ in range(20_000):
            channel.send(1, b"more than a ring takes")
        os.kill(pid, signal.SIGCONT)
        box.gather({1: 2})
    channel.close()
    return losses


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_stopped_neighbour_is_no_loss(run_ranks_bare, hosts):
    assert run_ranks_bare(2, outlive_a_stopped_neighbour, hosts) == [[], []]


LEAVING = """
import sys
from ronde.collectives import store_at
from ronde.coordination import connect_channel

rank, path, hosts = int(sys.argv[1]), sys.argv[2], sys.argv[3]
channel = connect_channel(store_at(path, 60.0), rank, hosts, timeout_s=60.0)
"""


def test_a_program_may_end_without_closing():
    """A thread inside Gloo at exit would abort the process."""
    with job_store() as path:
        programs = [
            subprocess.Popen([sys.executable, "-c", LEAVING, str(rank), path, "ab"])
            for rank in range(2)
        ]
        assert [program.wait(HANG_S) for program in programs] == [0, 0]


def be_absent(claim, hosts):
    """The last rank never connects; the others raise."""
    store = open_store(claim, HANG_S)
    texts = ""
    if claim.rank < claim.size - 1:
        with pytest.raises(CollectiveError) as caught:
            connect_channel(store, claim.rank, hosts, timeout_s=1.0)
        texts = str(caught.value)
    # Rank 0 hosts the store: it leaves last, and nobody else asks anything of it.
    store.set(f"over{claim.rank}", "")
    if claim.rank == 0:
        store.wait([f"over{rank}" for rank in range(claim.size)])
    return texts


@pytest.mark.parametrize("hosts", ["aab", "ab"])
def test_an_absent_rank_is_not_waited_for_for_ever(run_ranks_bare, hosts):
    texts = run_ranks_bare(len(hosts), be_absent, hosts)
    for rank, text in enumerate(texts[:-1]):
        assert text.startswith(f"connecting on rank {rank} of {len(hosts)}")


STUCK = """
import os, signal, sys
from ronde.collectives import Groups, store_at
from ronde.coordination import Doorbell, GlooTransport
from tests.conformance.control import await_state

rank, store = int(sys.argv[1]), store_at(sys.argv[2], 60.0)
groups = Groups(store, rank, 2, 60.0, is_one_host=True)
neighbours = {1 - rank: (1 - rank, "b")}
transport = GlooTransport(groups, neighbours, Doorbell.private(), close_s=0.5)
if rank == 1:
    store.set("pid", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
# Its listening thread answers a goodbye until then.
await_state(int(store.get("pid")), "T")
groups.close()  # Gloo's own shutdown ends no connection, and so not the thread on it
"""


def test_a_thread_that_gloo_does_not_end_is_left_behind():
    """The neighbour is stopped, so it does not answer the close handshake.

    If torch connects lazily, a group's sockets are unknown.
    """
    command = [sys.executable, "-c", STUCK]
    env = dict(os.environ, TORCH_GLOO_LAZY_INIT="1")  # noqa: TID251
    with job_store() as path:
        stopped = subprocess.Popen([*command, "1", path], env=env)
        try:
            done = subprocess.run(
                [*command, "0", path],
                stderr=subprocess.PIPE,
                env=env,
                text=True,
                timeout=HANG_S,
                check=False,
            )
        finally:
            stopped.kill()
            stopped.wait()
    assert done.returncode == 0, done.stderr
    assert "the connection to rank 1, on b, could not be closed" in done.stderr
