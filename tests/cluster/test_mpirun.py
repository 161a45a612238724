"""Real MPIs start ranks on several hosts, and a training finds its world there."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cluster.digits import (
    LIMIT_S,
    Digits,
    assert_done,
    assert_nothing_left,
    tolerance,
)

# The loss on one host comes first, and is a training as well.
pytestmark = pytest.mark.timeout(2 * LIMIT_S)
PREFIX = Path(sys.prefix)
HOSTS = "node1:2,node2:1"


@dataclass(frozen=True, slots=True)
class Mpi:
    """One MPI, and the environment of a login that has it."""

    prefix: Path
    environment: dict[str, str]
    options: Callable[[Path], list[str]]


def open_mpi_options(ssh):
    remote = ["--prtemca", "plm_ssh_agent", str(ssh)]
    return [*remote, "--allow-run-as-root", "--bind-to", "none", "--host", HOSTS]


def mpich_options(ssh):
    return ["-launcher", "ssh", "-launcher-exec", str(ssh), "-hosts", HOSTS]


@pytest.fixture(params=["open_mpi", "mpich"])
def mpi(request):
    if request.param == "open_mpi":
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


def test_a_training_under_mpirun(mpi, cluster, tmp_path, local_loss):
    """Nobody says where to meet: the ranks ask MPI."""
    ssh = tmp_path / "ssh"
    found = shutil.which("ssh")
    ssh.write_text(f'#!/bin/sh\nexec {found} -F {cluster.ssh_config} "$@"\n')
    ssh.chmod(0o755)
    digits = Digits(tmp_path / "record")
    mpirun = [str(mpi.prefix / "bin" / "mpirun"), "-n", "3", *mpi.options(ssh)]
    threads = ["env", "OMP_NUM_THREADS=1"]  # neither launcher sets it
    done = cluster.run(
        cluster.hosts[0],
        [*mpirun, *threads, *digits.words],
        env=mpi.environment,
        timeout_s=LIMIT_S,
    )
    assert_done(done)
    expected = local_loss(3)
    assert abs(digits.loss(3) - expected) <= tolerance(3, expected)
    assert_nothing_left(cluster)
