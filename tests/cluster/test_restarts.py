"""``--max-restarts`` on three hosts: all ranks restart, and generations never mix."""

import os
import select
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.limits import HANG_S
from tests.timed import impatient_ronde

pytestmark = pytest.mark.waits

# The ranks of the first generations wait to be ended.
RANK = """
import os, signal, sys
epoch, rank = os.environ["RONDE_EPOCH"], os.environ["RANK"]
os.write(1, f"{epoch} {rank} {os.environ['MASTER_PORT']}\\n".encode())
while int(epoch) < int(sys.argv[1]):
    signal.pause()
"""


@contextmanager
def job(cluster, *options, last_epoch=1, return_s=30.0):
    """Start a rank on each host, and wait until all of them run."""
    words = [*impatient_ronde(return_s=return_s), "run"]
    words += ["-H", "node1:1,node2:1,node3:1"]
    words += ["--ssh-args", f"-F {cluster.ssh_config}", "--grace", "2s"]
    rank = [sys.executable, "-I", "-S", "-c", RANK, str(last_epoch)]
    with cluster.start(
        cluster.hosts[0],
        [*words, "--no-prefix", *options, "--", *rank],
        env={"PATH": os.defpath, "HOME": str(Path.home())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert_generation(0, [process.stdout.readline() for _ in range(3)])
            yield process
        finally:
            process.kill()


def assert_generation(epoch, lines):
    """See that each rank of a generation is there once; return where they meet."""
    told = sorted(tuple(map(int, line.split())) for line in lines)
    assert [one[:2] for one in told] == [(epoch, rank) for rank in range(3)], lines
    [port] = {one[2] for one in told}
    return port


def rank_of(cluster, host, epoch):
    """Return the process of a generation's rank on a host."""
    mark = f"RONDE_EPOCH={epoch}".encode()
    found = [p for p in cluster.processes(host) if mark in p.environment.split(b"\0")]
    return min(found, key=lambda process: process.pid)


@contextmanager
def held_up(cluster, host):
    """Have a host find something left of the first generation meanwhile."""
    marks = rank_of(cluster, host, 0).environment.split(b"\0")
    [job_marker] = [mark for mark in marks if mark.startswith(b"RONDE_COOKIE=")]
    with cluster.start(
        host,
        ["sh", "-c", "echo; read -r _"],
        env={
            "PATH": os.defpath,
            "RONDE_COOKIE": job_marker.partition(b"=")[2].decode(),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as leftover:
        leftover.stdout.readline()
        yield


def break_connection(cluster, near, far):
    """Kill what serves ssh on the far host; return when ssh on the near one is gone."""
    [ssh] = [p for p in cluster.processes(near) if far.name in p.words[1:]]
    ssh_fd = os.pidfd_open(ssh.pid)
    for process in cluster.processes(far):
        if process.name.startswith("sshd") and "[listener]" not in process.words[0]:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    assert select.select([ssh_fd], [], [], HANG_S)[0]
    os.close(ssh_fd)


def await_line(process, text):
    """Read the launcher's words up to a line that holds a text; return them."""
    said = ""
    while text not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return said


def end_of(process):
    out, errors = process.communicate(timeout=HANG_S)
    return process.returncode, out.splitlines(), errors


def assert_nothing_left(cluster):
    marked = [
        process
        for host in cluster.hosts
        for process in cluster.processes(host)
        if b"RONDE_COOKIE=" in process.environment
    ]
    assert marked == []


def test_every_generation_has_all_ranks_and_a_port_of_its_own(cluster):
    with job(cluster, "--max-restarts", "3", last_epoch=2) as process:
        os.kill(rank_of(cluster, cluster.hosts[1], 0).pid, signal.SIGKILL)
        said = await_line(process, "restart 1 of 3: rank 1 failed on node2")
        first = assert_generation(1, [process.stdout.readline() for _ in range(3)])
        os.kill(rank_of(cluster, cluster.hosts[0], 1).pid, signal.SIGKILL)
        code, out, errors = end_of(process)
    assert code == 0
    assert assert_generation(2, out) != first
    assert "restart 2 of 3: rank 0 failed on node1" in errors
    assert "killed by SIGKILL" in said
    assert_nothing_left(cluster)


@pytest.mark.parametrize(
    ("lose", "regain"), [("cut", "restore"), ("kill_sshd", "start_sshd")]
)
def test_a_host_that_is_lost_and_comes_back_takes_part_again(cluster, lose, regain):
    lost = cluster.hosts[1]
    with job(cluster, "--max-restarts", "1") as process:
        getattr(cluster, lose)(lost)
        await_line(process, "restart 1 of 1: node2 was lost")
        getattr(cluster, regain)(lost)
        code, out, errors = end_of(process)
    assert code == 0, errors
    assert_generation(1, out)
    assert_nothing_left(cluster)


@pytest.mark.parametrize("limit", [2, 1])
def test_a_host_that_is_lost_before_ranks_run_again_is_a_restart(cluster, limit):
    first, second, _ = cluster.hosts
    with job(cluster, "--max-restarts", str(limit), last_epoch=2) as process:
        with held_up(cluster, first):
            os.kill(rank_of(cluster, first, 0).pid, signal.SIGKILL)
            await_line(process, f"restart 1 of {limit}: rank 0 failed")
            break_connection(cluster, first, second)
        code, out, errors = end_of(process)
    if limit == 1:
        assert (code, out) == (69, []), errors
        assert "ronde: 1 host was lost before the ranks started." in errors
    else:
        assert code == 0, errors
        assert_generation(2, out)
        assert "restart 2 of 2: node2 was lost" in errors
    assert_nothing_left(cluster)


def test_an_agent_that_is_killed_before_ranks_run_again_is_replaced(cluster):
    first = cluster.hosts[0]
    with job(cluster, "--max-restarts", "2", last_epoch=2) as process:
        agent = rank_of(cluster, first, 0).parent
        with held_up(cluster, first):
            os.kill(rank_of(cluster, first, 0).pid, signal.SIGKILL)
            await_line(process, "restart 1 of 2: rank 0 failed")
            os.kill(agent, signal.SIGKILL)
            await_line(process, "restart 2 of 2: node1 was lost")
        code, out, errors = end_of(process)
    assert code == 0, errors
    assert_generation(2, out)
    assert_nothing_left(cluster)


def test_a_host_that_stays_away_ends_the_job(cluster):
    with job(cluster, "--max-restarts", "5", return_s=1) as process:
        cluster.kill_sshd(cluster.hosts[1])
        code, out, errors = end_of(process)
    assert (code, out) == (69, [])
    assert errors.count("restart 1 of 5: node2 was lost") == 1
    assert "restart 2" not in errors
    *_, header, row = errors.splitlines()
    assert " ".join(header.split()) == "ronde: host what is wrong what to do"
    assert row.startswith("ronde:   node2  nothing answers on its ssh port")
    assert_nothing_left(cluster)
