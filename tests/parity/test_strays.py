"""Variables that a shell or an image left over do not stop ``init()``."""

import os
import subprocess
import sys

import pytest
from tests.launchers import launcher_environment, launcher_words
from tests.limits import HANG_S

import ronde.torch as hvd
from ronde.errors import UsageError

TRAIN = """
import torch
import ronde.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
print(f"{hvd.rank()} of {hvd.size()} counts {total.item():.0f}", flush=True)
"""


@pytest.fixture
def train(tmp_path):
    """Return a function that starts the program by a launcher."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)

    def run(launcher, size, **variables):
        return subprocess.run(
            [*launcher_words(launcher, size), str(script)],
            env=launcher_environment(tmp_path, **variables),
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    ("launcher", "size"),
    [
        ("python", 1),
        ("mpirun", 2),
        pytest.param("mpirun", 3, marks=pytest.mark.long),
        ("ronde", 2),
    ],
)
def test_what_is_left_over_is_named_and_ignored(train, launcher, size):
    done = train(launcher, size, LOCAL_RANK="0", WORLD_SIZE="1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} of {size} counts {size}" for rank in range(size)
    ]
    warning = "Ignored WORLD_SIZE=1, LOCAL_RANK=0: no launcher sets only that. This is"
    # ronde run sets both anew.
    expected = 0 if launcher == "ronde" else 1
    assert done.stderr.count(f"{warning} rank 0 of {size}.") == expected


def init_with(_: object, variables):
    """Return what ``init()`` says where only some of a launcher's variables are set."""
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        del os.environ[name]  # noqa: TID251  what a launcher forgets
    os.environ.update(variables, LOCAL_RANK="1")  # noqa: TID251
    with pytest.raises(UsageError) as caught:
        hvd.init()
    return str(caught.value)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, "rank and size are incomplete"),
        ({}, "LOCAL_RANK=1 without RANK and WORLD_SIZE"),
    ],
)
def test_a_launcher_that_forgets_a_variable_is_refused(
    run_ranks_bare, variables, message
):
    (told,) = run_ranks_bare(1, init_with, variables, launcher="plain")
    assert message in told


def ask_for_mpi(_: object):
    return hvd.mpi_built(), hvd.mpi_built(), "mpi4py.MPI" in sys.modules


@pytest.mark.parametrize("library", ["", "/no/such/libmpi.so"])
def test_mpi_is_there_only_where_its_library_loads(run_ranks_bare, tmp_path, library):
    env = {"TMPDIR": str(tmp_path), "OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    if library:
        env["MPI4PY_LIBMPI"] = library
    is_there = not library and hvd.mpi_built()
    (told,) = run_ranks_bare(1, ask_for_mpi, launcher="plain", environment=env)
    assert told == (is_there, is_there, False)
