"""Real MPIs start ranks on several hosts, and a training finds its world there."""

import shutil
import sys
from pathlib import Path

import pytest
from tests.cluster.digits import LIMIT_S, Digits, assert_done, assert_nothing_left

pytestmark = pytest.mark.timeout(LIMIT_S + 20)
PREFIX = Path(sys.prefix)
MPICH = PREFIX / "mpich"
PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
HOSTS = "node1:2,node2:1"


def environment(prefix, **more):
    """Return a login's environment with one MPI in it."""
    path = f"{prefix / 'bin'}:{PATH}"
    return {"PATH": path, "HOME": str(Path.home()), "OMP_NUM_THREADS": "1", **more}


def test_a_training_under_open_mpi(cluster, tmp_path, local_loss):
    if not (PREFIX / "bin" / "ompi_info").exists():
        pytest.skip("Open MPI is not installed beside this Python")
    digits = Digits(tmp_path / "record")
    options = ["--prefix", str(PREFIX), "--allow-run-as-root", "--bind-to", "none"]
    options += ["--prtemca", "plm_ssh_agent", f"ssh -F {cluster.ssh_config}"]
    options += ["-x", "OMP_NUM_THREADS", "-x", "RONDE_ENGINE"]
    words = [str(PREFIX / "bin" / "mpirun"), "-n", "3", "--host", HOSTS, *options]
    done = cluster.run(
        cluster.hosts[0],
        [*words, *digits.words],
        env=environment(PREFIX, RONDE_ENGINE="gloo"),
        timeout_s=LIMIT_S,
    )
    assert_done(done)
    assert digits.loss(3) == local_loss(3)
    assert_nothing_left(cluster)


def test_a_training_under_mpich(cluster, tmp_path, local_loss):
    if not (MPICH / "bin" / "mpiexec").exists():
        pytest.skip(f"MPICH is not installed in {MPICH}: scripts/test does that")
    digits = Digits(tmp_path / "record")
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh")} -F {cluster.ssh_config} "$@"\n'
    )
    ssh.chmod(0o755)
    options = ["-launcher", "ssh", "-launcher-exec", str(ssh), "-hosts", HOSTS]
    words = [str(MPICH / "bin" / "mpiexec"), "-n", "3", *options]
    done = cluster.run(
        cluster.hosts[0],
        [*words, *digits.words],
        env=environment(
            MPICH,
            RONDE_ENGINE="gloo",
            LD_LIBRARY_PATH=str(MPICH / "lib"),
            MPI4PY_MPIABI="mpich",
        ),
        timeout_s=LIMIT_S,
    )
    assert_done(done)
    assert digits.loss(3) == local_loss(3)
    assert_nothing_left(cluster)
