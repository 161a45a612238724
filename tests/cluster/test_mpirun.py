"""Real MPIs start ranks on several hosts, and a training finds its world there."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cluster.training import Training, assert_done, assert_nothing_left, tolerance
from tests.limits import HANG_S

pytestmark = pytest.mark.waits

PREFIX = Path(sys.prefix)


@dataclass(frozen=True, slots=True)
class Mpi:
    """One MPI, and the environment of a login that has it."""

    prefix: Path
    environment: dict[str, str]
    options: Callable[[Path, str], list[str]]

    def command(self, ssh: Path, size: int, hosts: str) -> list[str]:
        mpirun = str(self.prefix / "bin" / "mpirun")
        return [mpirun, "-n", str(size), *self.options(ssh, hosts)]


def open_mpi_options(ssh, hosts):
    remote = ["--prtemca", "plm_ssh_agent", str(ssh)]
    return [*remote, "--allow-run-as-root", "--bind-to", "none", "--host", hosts]


def mpich_options(ssh, hosts):
    return ["-launcher", "ssh", "-launcher-exec", str(ssh), "-hosts", hosts]


OPEN_MPI, MPICH = "open_mpi", "mpich"


def both(first, other):
    """Give a test both MPIs, one of them in CI."""
    params = [first, pytest.param(other, marks=pytest.mark.soak)]
    return pytest.mark.parametrize("mpi", params, indirect=True)


@pytest.fixture
def mpi(request):
    if request.param == OPEN_MPI:
        prefix, options, more = PREFIX, open_mpi_options, {}
    else:
        prefix, options = PREFIX / "mpich", mpich_options
        library = str(prefix / "lib")
        # One mpi4py serves both: it is told which to load.
        more = {"LD_LIBRARY_PATH": library, "MPI4PY_MPIABI": "mpich"}
    if not (prefix / "bin" / "mpiexec").exists():
        pytest.skip(f"there is no MPI in {prefix}: scripts/test installs it")
    path = f"{prefix / 'bin'}:/usr/bin:/bin:/usr/sbin:/sbin"
    home = str(Path.home())
    return Mpi(prefix, {"PATH": path, "HOME": home, **more}, options)


@pytest.fixture
def ssh(cluster, tmp_path):
    """Return a program that reaches the hosts as ssh does."""
    path = tmp_path / "ssh"
    found = shutil.which("ssh")
    path.write_text(f'#!/bin/sh\nexec {found} -F {cluster.ssh_config} "$@"\n')
    path.chmod(0o755)
    return path


@both(OPEN_MPI, MPICH)
def test_a_training_under_mpirun(mpi, ssh, cluster, tmp_path, local_loss):
    """Nobody says where to meet: the ranks ask MPI."""
    training = Training(tmp_path / "record")
    threads = ["env", "OMP_NUM_THREADS=1"]  # neither launcher sets it
    done = cluster.run(
        cluster.hosts[0],
        [*mpi.command(ssh, 3, "node1:2,node2:1"), *threads, *training.words],
        env=mpi.environment,
        timeout_s=HANG_S,
    )
    assert_done(done)
    expected = local_loss(3)
    assert abs(training.loss(3) - expected) <= tolerance(3, expected)
    assert_nothing_left(cluster)


@both(MPICH, OPEN_MPI)
def test_mpirun_starts_agents_that_join(mpi, ssh, cluster, tmp_path):
    """The way to hosts that only mpirun reaches."""
    token = tmp_path / "token"
    token.write_text("5" * 40)
    token.chmod(0o600)
    ronde = [sys.executable, "-m", "ronde", "run", "--token-file", str(token)]
    head = cluster.start(
        cluster.hosts[0],
        [*ronde, "--nodes", "3", "--listen", "29400", "--", "hostname"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with head:
        done = cluster.run(
            cluster.hosts[0],
            [*mpi.command(ssh, 2, "node2,node3"), *ronde, "--agent", "node1:29400"],
            env=mpi.environment,
            timeout_s=HANG_S,
        )
        assert_done(done)
        output, _ = head.communicate(timeout=HANG_S)
    assert head.returncode == 0
    assert sorted(output.splitlines()) == [
        f"[node{number}:{number - 1}] node{number}" for number in (1, 2, 3)
    ]
    assert_nothing_left(cluster)
