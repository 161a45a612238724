"""Jobs whose nodes join by themselves, on hosts that no ssh goes between."""

import hashlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.cluster.machines import why_not
from tests.limits import HANG_S, until
from tests.timed import impatient_ronde, ronde

from ronde.launch import own_environment

SECRET = "5ec2e7" + hashlib.sha256(b"of this test alone").hexdigest()
PORT = 29400
STAY = 'touch "$0/ready.$RANK.$RONDE_EPOCH"; exec sleep 1000'

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]


class Party:
    """A head on the first host and nodes on the others."""

    def __init__(self, cluster, folder):
        self.cluster = cluster
        self.folder = folder
        self.token = folder / "token"
        self.token.write_text(SECRET + "\n")
        self.token.chmod(0o600)
        self.command = [sys.executable, "-m", "ronde"]
        self.started = []

    def start(self, host, *words, **popen):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = self.cluster.start(
            host,
            [*self.command, "run", *words],
            **{"stdin": subprocess.DEVNULL, **pipes, **popen},
        )
        self.started.append(process)
        return process

    def head(self, *words, **popen):
        """Start the head: a run of ``words`` that waits for two nodes."""
        own = ("--nodes", "3", "--listen", str(PORT), "--token-file", str(self.token))
        return self.start(self.cluster.hosts[0], *own, *words, **popen)

    def node(self, number, *words, **popen):
        """Start ``ronde run --agent`` on a host."""
        own = ("--agent", f"node1:{PORT}", "--token-file", str(self.token))
        return self.start(self.cluster.hosts[number - 1], *own, *words, **popen)

    def run(self, *words):
        """Start all three; wait until each rank of ``STAY`` is there."""
        processes = [self.head(*words, "--", "sh", "-c", STAY, str(self.folder))]
        processes += [self.node(2), self.node(3)]
        self.await_ready(epoch=0)
        return processes

    def await_ready(self, epoch):
        for rank in range(3):
            path = self.folder / f"ready.{rank}.{epoch}"
            until(path.exists, f"rank {rank}")

    def leftovers(self, number):
        """Return what of ronde or of its ranks is on a host."""
        return [
            process
            for process in self.cluster.processes(self.cluster.hosts[number - 1])
            if process.state != "Z"
            and (b"RONDE_COOKIE" in process.environment or _is_ours(process.words))
        ]

    def require_nothing_left(self):
        for number in (1, 2, 3):
            found = self.leftovers(number)
            assert not found, f"left on node{number}: {found}"


def _is_ours(words):
    return any(w in ("ronde", "tests.timed") or "ronde.launch" in w for w in words)


def await_line(process, text):
    """Read what a process complains of up to a line that has this in it."""
    said = iter(process.stderr.readline, "")
    assert any(text in line for line in said), f"ended without a word of: {text}"


def end_of(process):
    """Wait for a process; return its exit code, output and errors."""
    out, errors = process.communicate(timeout=HANG_S)
    return process.returncode, out, errors


@pytest.fixture
def party(cluster, tmp_path):
    party = Party(cluster, tmp_path)
    yield party
    for process in party.started:
        process.kill()
        process.communicate()
    # Of a test that failed something may be left, which the next must not find.
    for number in (1, 2, 3):
        for process in party.leftovers(number):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


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
        return [s for s in party.cluster.listening(host) if _is_ours(s.words)]

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
