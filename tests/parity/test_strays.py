"""Variables that a shell or an image left over do not stop ``init()``."""

import subprocess
import sys

import pytest
from tests.launchers import launcher_environment, launcher_words

import ronde.torch as hvd

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
            check=False,
        )

    return run


@pytest.mark.parametrize(
    ("launcher", "size"),
    [
        ("python", 1),
        pytest.param("mpirun", 2, marks=pytest.mark.long),
        ("mpirun", 3),
        ("ronde", 2),
    ],
)
def test_what_is_left_over_is_named_and_ignored(train, launcher, size):
    done = train(launcher, size, LOCAL_RANK="0", WORLD_SIZE="1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} of {size} counts {size}" for rank in range(size)
    ]
    warning = "Ignored WORLD_SIZE=1, LOCAL_RANK=0: no launcher sets so little. This is"
    # ronde run sets both anew.
    expected = 0 if launcher == "ronde" else 1
    assert done.stderr.count(f"{warning} rank 0 of {size}.") == expected


def test_a_launcher_that_forgets_a_variable_is_refused(train):
    done = train("python", 1, RANK="1", LOCAL_RANK="1")
    assert "variables of the world must be complete" in done.stderr
    assert (done.returncode, done.stdout) == (1, "")
    done = train("python", 1, LOCAL_RANK="1")
    assert "got LOCAL_RANK=1 and no RANK and WORLD_SIZE" in done.stderr
    assert done.returncode == 1


def test_mpi_is_there_only_where_its_library_loads(tmp_path):
    script = (
        "import sys; import ronde.torch as hvd; "
        "print(hvd.mpi_built(), hvd.mpi_built(), 'mpi4py.MPI' in sys.modules)"
    )
    for variables, expected in (
        ({}, f"{hvd.mpi_built()} {hvd.mpi_built()} False\n"),
        ({"MPI4PY_LIBMPI": "/no/such/libmpi.so"}, "False False False\n"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=launcher_environment(tmp_path, **variables),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == expected
