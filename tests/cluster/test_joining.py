"""Jobs whose nodes join by themselves, on hosts that no ssh goes between."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.cluster.machines import why_not
from tests.cluster.party import PORT, SECRET, STAY, await_line, end_of, is_ours
from tests.limits import HANG_S, until
from tests.timed import impatient_ronde, ronde

from ronde.launch import own_environment

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]


def test_nodes_that_were_started_first_follow_the_head_and_end_with_it(party):
    script = (
        'echo out of $RANK on $RONDE_HOST; touch "$0/ready.$RANK.0"; '
        "test $RANK = 2 || exit 0; "
        'until test -e "$0/ready.0.0" && test -e "$0/ready.1.0"; do sleep 0.01; done; '
        "exit 7"
    )
    with party.token.open() as told:
        first = party.node(2, "--token-file", "-", stdin=told)
    variable = {"RONDE_TOKEN_FILE": str(party.token)}
    second = party.start(
        party.cluster.hosts[2],
        "--agent",
        f"10.77.0.1:{PORT}",
        env=own_environment() | variable,
    )
    head = party.head("--", "sh", "-c", script, str(party.folder))
    code, out, errors = end_of(head)
    assert code == 7, errors
    for rank in range(3):
        assert f"out of {rank} on node{rank + 1}\n" in out
    for process in (first, second):
        code, out, errors = end_of(process)
        assert code == 7, errors
        assert out == ""
        assert "out of" not in errors
        assert "has joined" in errors
    party.require_nothing_left()


def test_while_the_head_waits_it_listens_at_one_address_and_then_nowhere(party):
    host = party.cluster.hosts[0]

    def ours():
        return [s for s in party.cluster.listening(host) if is_ours(s.words)]

    head = party.head("--", "sh", "-c", STAY, str(party.folder))
    until(ours, "the head listens")
    assert [(s.protocol, s.address, s.port) for s in ours()] == [
        ("tcp", host.address, PORT)
    ]
    party.node(2)
    party.node(3)
    party.await_ready(epoch=0)
    for each in party.cluster.hosts:
        found = party.cluster.listening(each)
        # What rank 0 was given for the ranks to meet at is bound, and does not listen.
        assert [s for s in found if s.port != 22] == []
    head.send_signal(signal.SIGINT)
    assert end_of(head)[0] == 130


def files_of(pid):
    """Return what a process has open; it may close files or end meanwhile."""
    found = []
    with suppress(OSError):
        for entry in Path("/proc", str(pid), "fd").iterdir():
            with suppress(OSError):
                found.append(str(entry.readlink()))
    return found


def test_no_process_of_a_job_shows_the_token(party):
    head, *nodes = party.run()
    seen = [
        process
        for host in party.cluster.hosts
        for process in party.cluster.processes(host)
    ]
    assert len([p for p in seen if b"RONDE_COOKIE" in p.environment]) >= 3
    for process in seen:
        assert SECRET not in " ".join(process.words)
        assert SECRET.encode() not in process.environment
        assert str(party.token) not in files_of(process.pid)
    head.send_signal(signal.SIGINT)
    assert [end_of(each)[0] for each in (head, *nodes)] == [130, 130, 130]
    party.require_nothing_left()


def test_a_head_that_is_interrupted_while_it_waits_lets_the_nodes_go(party):
    head = party.head("--", "true")
    await_line(head, "waiting for 2 nodes")
    node = party.node(2)
    await_line(head, "node2 has joined (1 of 2)")
    await_line(node, "node2 has joined")
    head.send_signal(signal.SIGINT)
    assert end_of(head)[0] == 130
    code, _, errors = end_of(node)
    assert code == 69, errors
    assert "lost the head node" in errors
    party.require_nothing_left()


def test_a_node_that_is_told_to_stop_ends_the_whole_job_politely(party):
    party.command = ronde(lease_s=5 * HANG_S)  # it is not missed before it says so
    head, first, second = party.run("--grace", "1s")
    first.send_signal(signal.SIGTERM)
    code, _, errors = end_of(head)
    assert code == 143, errors
    assert "node2: SIGTERM: the job ends" in errors
    assert [end_of(each)[0] for each in (first, second)] == [143, 143]
    party.require_nothing_left()


def test_a_node_whose_ranks_have_ended_may_be_told_to_stop_too(party):
    script = f'touch "$0/begun.$RANK"; test $RANK = 1 || {{ {STAY}; }}'
    head = party.head("--", "sh", "-c", script, str(party.folder))
    first, second = party.node(2), party.node(3)
    until((party.folder / "begun.1").exists, "rank 1")
    until(lambda: not any(b"RANK=1" in p.environment for p in party.leftovers(2)))
    first.send_signal(signal.SIGTERM)
    ends = [end_of(each) for each in (head, first, second)]
    assert [code for code, _, _ in ends] == [143, 143, 143], ends
    party.require_nothing_left()


def test_without_its_head_a_node_ends_its_ranks(party):
    head, *nodes = party.run()
    head.kill()
    for number, node in enumerate(nodes, start=2):
        code, _, errors = end_of(node)
        assert code == 69
        assert "all ranks on this node were ended" in errors
        assert party.leftovers(number) == []
    end_of(head)
    until(lambda: not party.leftovers(1), "the head's own agent ends its rank")


@pytest.mark.parametrize("who", ["ronde", "agent"])
def test_a_node_that_is_killed_leaves_nothing(party, who):
    head, first, second = party.run("--grace", "1s")
    if who == "ronde":
        first.kill()
    else:
        agents = [p for p in party.leftovers(2) if "--agent" in p.words]
        os.kill(max(agents, key=lambda p: p.pid).pid, signal.SIGKILL)
    code, _, errors = end_of(head)
    assert code == 69, errors
    assert "node2" in errors
    end_of(first)
    assert end_of(second)[0] == code
    until(lambda: not party.leftovers(2), "all of node2 ends")
    party.require_nothing_left()


def test_a_node_whose_link_is_cut_is_lost_and_ends_by_itself(party):
    party.command = impatient_ronde()
    head, first, second = party.run("--grace", "1s")
    party.cluster.cut(party.cluster.hosts[1])
    code, _, errors = end_of(head)
    assert code == 69, errors
    assert end_of(second)[0] == 69
    code, _, errors = end_of(first)
    assert code == 69, errors
    party.require_nothing_left()


def test_all_ranks_start_again_on_the_nodes_that_are_there(party):
    script = (
        'touch "$0/ready.$RANK.$RONDE_EPOCH"; '
        'test "$RANK.$RONDE_EPOCH" = 1.0 && exit 5; '
        'test "$RONDE_EPOCH" = 1 && exit 0; exec sleep 1000'
    )
    head = party.head(
        "--max-restarts", "1", "--", "sh", "-c", script, str(party.folder)
    )
    nodes = [party.node(2), party.node(3)]
    codes = [end_of(each) for each in (head, *nodes)]
    assert [code for code, _, _ in codes] == [0, 0, 0], codes
    party.await_ready(epoch=1)
    party.require_nothing_left()


def test_much_output_of_a_node_arrives_whole(party):
    lines, size = 100_000, 100
    script = (
        "import os, sys\n"
        f"if os.environ['RANK'] == '1':\n for i in range({lines}):"
        f" sys.stdout.write(f'{{i:0{size}d}}\\n')"
    )
    path = party.folder / "out"
    with path.open("w") as out:
        head = party.head("--", sys.executable, "-c", script, stdout=out)
        nodes = [party.node(2), party.node(3)]
        head.wait(HANG_S)
    assert [end_of(each)[0] for each in (head, *nodes)] == [0, 0, 0]
    got = [line.rpartition(" ")[2] for line in path.read_text().splitlines()]
    assert got == [f"{i:0{size}d}" for i in range(lines)]
