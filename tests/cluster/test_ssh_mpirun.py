"""Agents by the ``mpirun`` of two MPIs, neither of which passes bytes as they are."""

import hashlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cluster.digits import assert_nothing_left

from ronde.launch.hosts.host import Host
from ronde.launch.spawners.mpi import MpiSpawner

pytestmark = pytest.mark.timeout(120)
LIMIT_S = 60.0
PREFIXES = {"open_mpi": Path(sys.prefix), "mpich": Path(sys.prefix, "mpich")}
DATA = random.Random(5).randbytes(1 << 20)


@pytest.fixture(params=PREFIXES)
def mpirun(request):
    """Return the path of an ``mpirun``."""
    path = PREFIXES[request.param] / "bin" / "mpirun"
    if not path.exists():
        pytest.skip(f"{request.param} is not installed in {PREFIXES[request.param]}")
    return path


def carried(cluster, mpirun, words, data):
    """Run a program on node2 through ``mpirun``; return code, output and complaints."""
    ssh_args = ["-F", str(cluster.ssh_config)]
    spawner = MpiSpawner(str(mpirun), sys.executable, ssh_args)
    with cluster.start(
        cluster.hosts[0],
        spawner.command(Host("node2"), words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(data, timeout=LIMIT_S)
        finally:
            process.kill()
    return process.returncode, out, errors.decode()


@pytest.mark.parametrize("size", [0, 1, 70_000, 1 << 20])
def test_bytes_pass_as_they_are_both_ways_and_the_end_does(cluster, mpirun, size):
    code, out, errors = carried(cluster, mpirun, ["cat"], DATA[:size])
    assert (code, len(out), out == DATA[:size]) == (0, size, True), errors
    assert_nothing_left(cluster)


def test_much_output_that_ends_at_once_is_whole(cluster, mpirun):
    script = "head -c 20000000 /dev/zero | tr '\\0' 'x'; exit 42"
    code, out, errors = carried(cluster, mpirun, ["sh", "-c", script], b"unread")
    assert code == 42, errors
    assert hashlib.sha256(out).digest() == hashlib.sha256(b"x" * 20_000_000).digest()


def test_words_are_given_as_they_are(cluster, mpirun):
    words = ["a b", "$HOME", "'", '"', "\\", "é\n", "", "-n"]
    code, out, errors = carried(cluster, mpirun, ["printf", "%s|", *words], b"")
    assert (code, out.decode()) == (0, "".join(f"{word}|" for word in words)), errors


def test_a_program_that_is_not_there_is_told(cluster, mpirun):
    code, out, errors = carried(cluster, mpirun, ["/no/program"], b"")
    assert (code, out) == (127, b"")
    assert "/no/program: No such file or directory" in errors


def run(cluster, mpirun, *words):
    program = [sys.executable, "-m", "ronde", "run", "--launcher", "mpi"]
    ssh_args = ["--ssh-args", f"-F {cluster.ssh_config}"]
    path = f"{mpirun.parent}:{os.defpath}"
    return cluster.run(
        cluster.hosts[0],
        ["env", f"PATH={path}", *program, *ssh_args, *words],
        timeout_s=LIMIT_S,
    )


def test_a_job_whose_agents_mpirun_starts(cluster, mpirun):
    script = "echo $RANK of $WORLD_SIZE, $OMPI_COMM_WORLD_RANK$PMI_RANK"
    words = ["-H", "node1:1,node2:1,node3:1", "sh", "-c", script]
    done = run(cluster, mpirun, *words)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[node1:0] 0 of 3,",
        "[node2:1] 1 of 3,",
        "[node3:2] 2 of 3,",
    ]
    assert_nothing_left(cluster)


def test_a_host_that_mpirun_cannot_use_is_told(cluster, mpirun):
    done = run(cluster, mpirun, "-H", "node1:1,node2:1", "--python", "/no/py", "true")
    assert done.returncode == 69
    rows = [line for line in done.stderr.splitlines() if line.startswith("ronde:   n")]
    assert len(rows) == 1
    told = " ".join(rows[0].split())
    cure = "name the one there with --python"
    assert told == f"ronde: node2 its Python is not there: /no/py {cure}"
    assert_nothing_left(cluster)


def test_a_controller_that_is_killed_leaves_nothing(cluster, mpirun):
    """Neither ranks nor what they put into a session of its own."""
    program = [sys.executable, "-m", "ronde", "run", "--launcher", "mpi"]
    ssh_args = ["--ssh-args", f"-F {cluster.ssh_config}", "-H", "node1:1,node2:2"]
    script = "setsid sleep 1000 & echo up; wait"
    with cluster.start(
        cluster.hosts[0],
        [*program, *ssh_args, "sh", "-c", script],
        env={"PATH": f"{mpirun.parent}:{os.defpath}:/usr/sbin", "HOME": "/root"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as job:
        said = [job.stdout.readline() for _ in range(3)]
        assert all(line.endswith(b"up\n") for line in said), said
        job.kill()
    deadline = time.monotonic() + LIMIT_S
    while any(len(cluster.processes(host)) > 2 for host in cluster.hosts):
        assert time.monotonic() < deadline, cluster.processes(cluster.hosts[1])
        time.sleep(0.05)
    assert_nothing_left(cluster)
