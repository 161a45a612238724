"""Nodes that join a job while it runs: the head listens until the job ends."""

import signal
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


def test_a_node_that_is_killed_comes_back_while_the_others_train(party):
    folder = party.folder
    head = party.head(*TRAIN, str(folder), nodes="2:3")
    nodes = [party.node(2), party.node(3)]
    hosts = ("node1", "node2", "node3")
    until(lambda: all(newest(folder, host)[1] >= 5 for host in hosts), "all train")
    nodes[1].kill()
    until(lambda: newest(folder, "node1")[0] >= 1, "the others train on")
    nodes += [party.node(3), party.node(3)]
    until(lambda: newest(folder, "node3")[0] >= 2, "it trains again")
    await_line(head, "waits as a spare")
    (folder / "finish").touch()
    ends = [end_of(each) for each in (head, *nodes)]
    assert [code for code, _, _ in ends] == [0, 0, -signal.SIGKILL, 0, 0], ends
    entries = ledger.read(folder.glob("ledger-*"))
    assert ledger.problems_of(entries, NUM_SAMPLES, 0, batch_size=BATCH) == []
    party.require_nothing_left()


def test_all_ranks_start_again_with_nodes_that_come_back(party):
    head, _, node = party.run("--max-restarts", "3")
    for epoch in (1, 2, 3):
        node.kill()
        node = party.node(3)
        party.await_ready(epoch)
    assert places(party) == [[(party.cluster.hosts[0].address, PORT)], [], []]
    head.send_signal(signal.SIGTERM)
    assert [end_of(each)[0] for each in party.started] == [143, 143, -9, -9, -9, 143]
    party.require_nothing_left()
