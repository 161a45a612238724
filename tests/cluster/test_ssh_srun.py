"""A program by ``srun``, as agents are started: its bytes, its end, its environment."""

import random
import select
import subprocess

import pytest
from tests.cluster.slurm import slurm, why_no_slurm
from tests.limits import HANG_S

from ronde.launch import Host, SlurmSpawner

pytestmark = pytest.mark.waits

DATA = random.Random(5).randbytes(1 << 20)


@pytest.fixture(scope="module")
def batch(three_hosts):
    if reason := why_no_slurm():
        pytest.skip(reason)
    with slurm(three_hosts) as running:
        yield running


def start(batch, *words, env=None):
    """Start a program on node2, inside an allocation of node1 and node2."""
    carrier = SlurmSpawner().command(Host("node2"), words)
    return batch.start(
        [
            "salloc",
            "--quiet",
            "--nodelist=node1,node2",
            "--ntasks-per-node=2",
            *carrier,
        ],
        env=env or {},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(process, data=b""):
    try:
        out, errors = process.communicate(data, timeout=HANG_S)
    finally:
        process.kill()
    return process.returncode, out, errors.decode()


# What users set for their own srun.
OPTIONS = {
    "SLURM_LABELIO": "1",
    "SLURM_STDINMODE": "none",
    "SLURM_STDOUTMODE": "/dev/null",
    "SLURM_STDERRMODE": "/dev/null",
    "SLURM_OPEN_MODE": "append",
    "SLURM_EXCLUSIVE": "1",
    "SLURM_TIMELIMIT": "0:01",
    "SRUN_DEBUG": "3",
}


@pytest.mark.parametrize("env", [{}, OPTIONS], ids=["plain", "options"])
def test_bytes_pass_as_they_are_both_ways_and_the_end_does(batch, env):
    code, out, errors = finish(start(batch, "/bin/cat", env=env), DATA)
    assert (code, len(out), out == DATA) == (0, len(DATA), True), errors
    batch.wait_idle()


def test_bytes_pass_at_once(batch):
    with start(batch, "/bin/cat") as process:
        for number in range(20):
            process.stdin.write(b"%c" % number)
            process.stdin.flush()
            assert select.select([process.stdout], [], [], HANG_S)[0]
            assert process.stdout.read(1) == b"%c" % number
        code, out, errors = finish(process)
    assert (code, out) == (0, b""), errors
    batch.wait_idle()


def test_the_exit_code_comes_and_no_variable_but_those_of_a_login_goes(batch):
    script = "env; hostname; exit 42"
    env = {"SECRET": "1", "WANDB_API_KEY": "2", "LD_LIBRARY_PATH": "/lib"}
    code, out, errors = finish(start(batch, "/bin/sh", "-c", script, env=env))
    lines = out.decode().split("\n")
    assert (code, lines[-2]) == (42, "node2"), errors
    told = {line.partition("=")[0] for line in lines if "=" in line}
    assert {"HOME", "PATH", "LD_LIBRARY_PATH"} <= told
    assert not {"SECRET", "WANDB_API_KEY"} & told
    batch.wait_idle()


def test_a_host_outside_of_the_allocation_is_reported(batch):
    carrier = SlurmSpawner().command(Host("node3"), ["/bin/true"])
    done = batch.run(["salloc", "--quiet", "--nodelist=node1", *carrier])
    failure = SlurmSpawner().explain(Host("node3"), done.returncode, done.stderr)
    assert failure.reason.startswith("not in this allocation"), done.stderr
    batch.wait_idle()
