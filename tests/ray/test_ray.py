"""``ronde run --launcher ray`` and Ray Train on two nodes of a real Ray."""

import json
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.cluster.machines import ROOT, why_not
from tests.limits import HANG_S, until
from tests.ray.cluster import end_of, ray_cluster

import ronde

EXAMPLES = ROOT / "examples"
SHOW = 'echo "rank $RANK on $RONDE_HOST sees $CUDA_VISIBLE_DEVICES"; exit $RANK'
STAY = 'touch "$0/ready.$RANK"; exec sleep 1000'
ELASTIC = str(ROOT / "tests" / "ray" / "elastic_rank.py")


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: scripts/test_ray installs it")
    if reason := why_not():
        pytest.skip(reason)
    with ray_cluster(shared=[tmp_path_factory.getbasetemp()]) as ray:
        yield ray


def losses_of(record: Path) -> list[float]:
    (line,) = record.read_text().splitlines()
    values = json.loads(line)["values"]
    return [values["loss"], values["test_accuracy"]]


def test_losses_are_the_same_by_the_launcher_in_ray_train_and_on_one_host(
    ray, tmp_path
):
    here, launched, trained = (tmp_path / name for name in ("1", "2", "3"))
    digits = [str(EXAMPLES / "digits.py"), "--epochs", "2", "--json"]
    by_gloo = ["--engine", "gloo", "-n", "2", "-x", "OMP_NUM_THREADS=1"]
    inside = str(ROOT / "tests" / "ray" / "train_in_ray.py")
    words = [sys.executable, inside, str(EXAMPLES), str(trained), str(tmp_path / "all")]
    jobs = [ray.launch(*by_gloo, *digits, str(launched)), ray.start(words)]
    alone = [sys.executable, "-m", "ronde", "run", *by_gloo, *digits, str(here)]
    subprocess.run(alone, check=True, capture_output=True, timeout=HANG_S)
    for job in jobs:
        code, out, errors = end_of(job)
        assert code == 0, out + errors
    assert losses_of(here) == losses_of(launched) == losses_of(trained)
    ray.await_nothing_left()


@pytest.mark.soak
def test_a_job_has_rays_gpus_and_ends_with_its_ranks_code(ray):
    code, out, errors = end_of(ray.launch("--", "sh", "-c", SHOW))
    assert code == 1, errors
    assert {line.partition(" ")[2] for line in out.splitlines()} == {
        f"rank {rank} on node{rank + 1} sees 0" for rank in (0, 1)
    }
    ray.await_nothing_left()


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_stays_without_the_launcher(ray, tmp_path, number):
    job = ray.launch("--", "sh", "-c", STAY, str(tmp_path))
    for rank in (0, 1):
        until((tmp_path / f"ready.{rank}").exists)
    # It has all GPUs: another job waits for them.
    code, _, errors = end_of(ray.launch("--join-timeout", "4s", "true"))
    assert code == 69, errors
    assert "Ray: its nodes must be free within 3.6 s. Wait longer: --join" in errors
    job.send_signal(number)
    code, _, errors = end_of(job)
    assert code == (130 if number == signal.SIGINT else -number), errors
    ray.await_nothing_left()


def test_bad_input_is_one_sentence(ray, tmp_path):
    cases = [
        (["--nodes", "3"], 64, "Ray must have 3 GPUs, 1 or more on each of at least 3"),
        (["-n", "3"], 64, "got nodes with: 1, 1. See: ray status"),
        (["-H", "node2"], 64, "-H cannot be combined with --launcher ray"),
        (["--token-file", "x"], 64, "--token-file has no effect without --listen"),
    ]
    jobs = [ray.launch(*words, "true") for words, _, _ in cases]
    # A launcher of another version than the nodes.
    shutil.copytree(ROOT / "src" / "ronde", tmp_path / "ronde")
    with (tmp_path / "ronde" / "__init__.py").open("a") as file:
        file.write('\n__version__ = "9.9"\n')
    jobs.append(ray.launch("true", PYTHONPATH=str(tmp_path)))
    cases.append(([], 69, f"its ronde is {ronde.__version__}, here it is 9.9."))
    for job, (_, wanted, text) in zip(jobs, cases, strict=True):
        code, out, errors = end_of(job)
        assert (code, out) == (wanted, ""), errors
        (line,) = errors.splitlines()
        assert text in line
    ray.await_nothing_left()


@pytest.mark.soak
def test_the_page_shows_what_works(ray, tmp_path):
    page = (ROOT / "docs" / "how-to" / "ray.md").read_text()
    program = tmp_path / "train_in_ray.py"
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    program.write_text(block)
    (tmp_path / "train.py").write_text('import os; print("rank", os.environ["RANK"])')
    (line,) = re.findall(r"^ronde run .*", page, flags=re.MULTILINE)
    words = line.removeprefix("ronde run --launcher ray ").split()
    launched = ray.launch("--chdir", str(tmp_path), *words)
    trained = ray.start([sys.executable, str(program)])
    outputs = []
    for job in (launched, trained):
        code, out, errors = end_of(job)
        assert code == 0, out + errors
        outputs.append(out + errors)
    for rank in (0, 1):
        assert f"rank {rank}\n" in outputs[0]
        assert f"rank {rank} of 2: 2" in outputs[1]


def test_ronde_does_not_import_ray():
    imports = "import sys, ronde.torch, ronde.cli.run, ronde.launch.hosts.ray_nodes"
    words = [sys.executable, "-c", f"{imports}; sys.exit('ray' in sys.modules)"]
    assert subprocess.run(words, check=False).returncode == 0


# Last: afterwards Ray has one node.
def test_an_elastic_job_goes_on_without_a_lost_node(ray, tmp_path):
    job = ray.launch("--min-ranks", "1", ELASTIC, str(tmp_path))
    for rank in (0, 1):
        until((tmp_path / f"begun.{rank}.2").exists)
    ray.cluster.crash(ray.cluster.hosts[1])
    code, _, errors = end_of(job)
    assert code == 0, errors
    assert (tmp_path / "done.0.1").exists()
    assert "node2" in errors
    # Ray itself misses the node half a minute later.
    until(lambda: not ray.leftovers(), ray.leftovers)
