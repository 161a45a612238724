"""Nodes that join a job while it runs: the head listens until the job ends."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests import ledger
from tests.cluster.elastic_training_rank import BATCH, NUM_SAMPLES
from tests.cluster.machines import why_not
from tests.cluster.party import PORT, await_line, end_of
from tests.limits import until

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]
OTHER_TOKEN = "0123456789abcdef" * 2
SILENT = """
import socket, sys
place = sys.argv[1], int(sys.argv[2])
held = [socket.create_connection(place) for _ in range(64)]
print("there", flush=True)
sys.stdin.read()
"""
TRAIN = [sys.executable, str(Path(__file__).with_name("elastic_training_rank.py"))]


def newest(folder, host):
    """Return the view and step that a host's ranks have applied last."""
    lines = [
        tuple(map(int, line.split()[1:]))
        for path in folder.glob(f"applied-{host}-*")
        for line in path.read_text().split("\n")[:-1]
    ]
    return max(lines, default=(-1, -1))


def places(party):
    """Return what listens on each host besides sshd."""
    return [
        [(s.address, s.port) for s in party.cluster.listening(host) if s.port != 22]
        for host in party.cluster.hosts
    ]


def test_pods_come_and_go_while_the_others_train(party):
    """One is replaced while it is cut off, one comes back, strangers stay outside."""
    folder, train = party.folder, [*TRAIN, str(party.folder)]
    head, first, second = (party.pod(n, n + 1, *train) for n in range(3))
    hosts = ("node1", "node2", "node3")
    until(lambda: all(newest(folder, host)[1] >= 5 for host in hosts), "all train")
    other = folder / "other"
    other.write_text(OTHER_TOKEN)
    other.chmod(0o600)
    silent = [sys.executable, "-c", SILENT, party.cluster.hosts[0].address, str(PORT)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with party.cluster.start(party.cluster.hosts[1], silent, **pipes) as stranger:
        assert stranger.stdout.readline() == b"there\n"
        liar = party.node(2, "--token-file", str(other))
        await_line(liar, "its token differs")
        liar.kill()
        again = party.pod(2, 2, *train)
        await_line(again, "node3 is connected as number 2")
        party.cluster.cut(party.cluster.hosts[2])
        await_line(again, "has joined")
        stranger.communicate()
    await_line(head, "a rank joins on node2-2")
    first.kill()
    await_line(head, "node2 was lost")
    back = party.pod(1, 2, *train)
    await_line(head, "a rank joins on node2;")
    spare = party.pod(3, 2, *train)
    await_line(head, "node2-3 waits as a spare")
    spare.send_signal(signal.SIGTERM)
    await_line(head, "node2-3 left before the job used it")
    (folder / "finish").touch()
    ends = {each: end_of(each) for each in (head, again, back, spare, second)}
    assert [code for code, _, _ in ends.values()] == [0, 0, 0, 143, 69], ends
    entries = ledger.read(folder.glob("ledger-*"))
    assert ledger.problems_of(entries, NUM_SAMPLES, 0, batch_size=BATCH) == []
    party.require_nothing_left()


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_all_ranks_start_again_with_a_node_that_comes_back_or_not(party, times):
    head, other, node = party.run("--max-restarts", "30", "--join-timeout", "8s")
    for epoch in range(1, times + 1):
        node.kill()
        node = party.node(3)
        party.await_ready(epoch)
    assert places(party) == [[(party.cluster.hosts[0].address, PORT)], [], []]
    node.kill()
    code, _, errors = end_of(head)
    assert code == 69, errors
    assert "node3 was lost, and no other node joined within 8 s." in errors
    assert end_of(other)[0] == 69
    party.require_nothing_left()


def test_a_signal_ends_the_wait_for_a_node_everywhere(party):
    head, other, node = party.run("--max-restarts", "1")
    node.kill()
    await_line(head, "waiting for node3 or other nodes to join")
    head.send_signal(signal.SIGTERM)
    assert [end_of(each)[0] for each in (head, other)] == [143, 143]
    party.require_nothing_left()
