"""A real Slurm: ranks by ``srun``, and the batch scripts of the documentation."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from tests.cluster.machines import ROOT
from tests.cluster.slurm import slurm, why_no_slurm
from tests.cluster.training import Training, assert_done, tolerance
from tests.limits import HANG_S, until
from tests.virtual_environments import make_environment

pytestmark = pytest.mark.waits

PAGE = ROOT / "docs" / "how-to" / "slurm.md"
DAEMONS = {"sleep", "sshd", "munged", "slurmctld", "slurmscriptd", "slurmd"}


@pytest.fixture(scope="module")
def batch(three_hosts):
    if reason := why_no_slurm():
        pytest.skip(reason)
    with slurm(three_hosts) as running:
        yield running


@pytest.fixture
def job(batch, cluster, tmp_path):
    """Return what runs a command on the head; see that nothing stays."""
    path = f"{Path(sys.executable).parent}:{batch.environment['PATH']}"
    env = {"PATH": path, "OMP_NUM_THREADS": "1"}

    def run(*words, **more):
        return batch.run(list(words), env=env, timeout_s=HANG_S, **more)

    yield run
    run("scancel", "--user=root")
    batch.wait_idle()
    for host in cluster.hosts:
        names = {process.name for process in cluster.processes(host)}
        assert names <= DAEMONS, (host.name, names)


def documented_scripts():
    return re.findall(r"```sh\n(#!/bin/bash\n.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(0, id="ronde-run"),
        pytest.param(1, id="srun", marks=pytest.mark.soak),
    ],
)
def test_the_documented_batch_scripts_train(job, batch, tmp_path, local_loss, index):
    """Smaller than they stand there: two ranks on one host, one on the other."""
    written = documented_scripts()[index]
    smaller = written.replace("--ntasks-per-node=4", "--ntasks=3")
    smaller = smaller.replace("--cpus-per-task=8", "--cpus-per-task=1")
    assert smaller.count("#SBATCH") == written.count("#SBATCH") >= 5
    script = tmp_path / "job.sh"
    script.write_text(smaller)
    training = Training(tmp_path / "record")
    (tmp_path / "train.py").write_text(
        f"import sys, runpy; sys.argv = {training.words[1:]!r}; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    told = job("sbatch", "--parsable", str(script), cwd=tmp_path)
    assert_done(told)
    state = batch.wait_over(told.stdout.strip(), HANG_S)
    (output,) = tmp_path.glob("train-*.out")
    assert state == "COMPLETED", output.read_text()
    expected = local_loss(3)
    assert abs(training.loss(3) - expected) <= tolerance(3, expected)
    assert "3 ranks have trained" in output.read_text()


RANK = """
import os, signal, sys
from pathlib import Path
me = Path(sys.argv[1]) / os.environ["RANK"]
def leave(*_):
    me.with_suffix(".told").touch()
    sys.exit(5)
signal.signal(signal.SIGTERM, leave)
me.touch()
while True:
    signal.pause()
"""


@pytest.mark.parametrize("is_polite", [False, True])
def test_a_cancelled_job_leaves_nothing(job, batch, tmp_path, is_polite):
    """Told itself, ronde tells the ranks; else Slurm ends all of its processes."""
    script = tmp_path / "job.sh"
    script.write_text(documented_scripts()[0])
    (tmp_path / "train.py").write_text(RANK.replace("sys.argv[1]", repr(str(tmp_path))))
    smaller = ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1"]
    told = job("sbatch", "--parsable", *smaller, str(script), cwd=tmp_path)
    assert_done(told)
    ranks = [tmp_path / str(rank) for rank in range(4)]
    until(lambda: all(rank.exists() for rank in ranks))
    how = ["--batch", "--signal=TERM"] if is_polite else []
    assert_done(job("scancel", *how, told.stdout.strip()))
    batch.wait_idle()
    if is_polite:
        assert all(rank.with_suffix(".told").exists() for rank in ranks)


def test_a_launcher_that_is_killed_leaves_nothing(job, batch, cluster, tmp_path):
    """Nobody tells the ranks: the end of what they hang on ends them."""
    rank = [sys.executable, "-c", RANK, str(tmp_path)]
    launcher = [sys.executable, "-m", "ronde", "run"]
    words = ["salloc", "--nodes=2", "--ntasks-per-node=1", *launcher, *rank]
    with batch.start(words) as allocation:
        until(lambda: all((tmp_path / rank).exists() for rank in "01"))
        os.kill(child_of(allocation.program_pid()), signal.SIGKILL)
        allocation.wait(HANG_S)
    batch.wait_idle()


def child_of(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children")
    (child,) = children.read_text().split()
    return int(child)


def test_srun_finds_an_installed_alias(job, tmp_path):
    environment = make_environment(tmp_path / "environment")
    assert environment.ronde("alias", "--install")[0] == 0
    script = tmp_path / "train.py"
    script.write_text("import horovod\nprint(horovod.__name__)\n")
    words = ("srun", "-N2", "-n3", str(environment.python), str(script))
    done = job(*words, cwd=tmp_path)
    assert_done(done)
    assert done.stdout.splitlines() == ["ronde.horovod"] * 3, done.stderr
