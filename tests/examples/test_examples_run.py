"""Each example as its reader starts it: one file, every launcher."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.limits import HANG_S

from ronde.records import Record, read_records

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

RANKS_AND_STARTS = {
    "python": (1, []),
    "ronde": (2, ["ronde", "run", "-n", "2", "--"]),
    "torchrun": (2, ["torchrun", "--standalone", "--nproc-per-node=2", "--no-python"]),
    "mpirun": (2, ["mpirun", "--oversubscribe", "-n", "2"]),
}


def launched(name: str) -> tuple[int, list[str]]:
    """Return the ranks and the command line's start, or skip where it is not there."""
    size, start = RANKS_AND_STARTS[name]
    if not start:
        return size, [sys.executable]
    program = SCRIPTS / start[0]
    if not program.exists():
        pytest.skip(f"{program.name} is not beside this Python")
    is_refusing_root = name == "mpirun" and os.geteuid() == 0
    root = ["--allow-run-as-root"] if is_refusing_root else []
    return size, [str(program), *start[1:], *root, sys.executable]


def run(command: list[str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; when its time is up it is stopped with all its own."""
    # One thread a rank, and nobody else's ranks.
    environment = {"PATH": os.defpath, "HOME": str(Path.home()), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.communicate(timeout=HANG_S)
            raise
        finally:
            # Where the launcher itself hangs; else there is nobody left to be killed.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def only_record(path: Path) -> Record:
    [record] = read_records(path, kind="training")
    return record


@pytest.mark.parametrize(
    "name",
    [
        "ronde",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("python", "torchrun", "mpirun")
        ),
    ],
)
def test_digits_under_every_launcher(name: str, tmp_path: Path) -> None:
    size, start = launched(name)
    path = tmp_path / "records.jsonl"
    done = run([*start, "examples/digits.py", "--epochs", "10", "--json", str(path)])
    assert done.returncode == 0, done.stderr
    values = only_record(path).values
    assert (values["example"], values["size"]) == ("digits", size)
    # Every test image counts, and counts once.
    assert values["num_tested"] == 360
    # Other seeds reach 96 to 99 %.
    assert values["test_accuracy"] >= 0.95
    assert values["images_per_s"] > 0
    # Rank 0 alone reports, and shows the bar on standard error.
    assert done.stdout.count("test accuracy") == 1
    assert "images/s" in done.stderr
    assert "epoch 10/10" in done.stderr


@pytest.mark.soak
def test_digits_alone_tests_its_own_models(tmp_path: Path) -> None:
    _, start = launched("ronde")
    path = tmp_path / "records.jsonl"
    options = ["--epochs", "2", "--no-communication", "--json", str(path)]
    done = run([*start, "examples/digits.py", *options])
    assert done.returncode == 0, done.stderr
    values = only_record(path).values
    assert (values["size"], values["is_communicating"]) == (2, False)
    assert values["num_tested"] == 360


def write_stripes(directory: Path) -> None:
    """Write images of which each has a bright stripe where its label says."""
    random = np.random.default_rng(0)
    for name, count in (("train", 2000), ("t10k", 400)):
        labels = random.integers(0, 10, count, dtype=np.uint8)
        images = random.integers(0, 100, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 4 : 2 * label + 6] = 255
        header = np.array([0x803, count, 28, 28], ">i4").tobytes()
        (directory / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = np.array([0x801, count], ">i4").tobytes()
        (directory / f"{name}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def fashion_mnist(data: Path, record: Path, *options: str) -> tuple[int, float]:
    """Train on two ranks; return how many images were tested, and the accuracy."""
    _, start = launched("ronde")
    words = ["--data", str(data), "--json", str(record), *options]
    done = run([*start, "examples/fashion_mnist.py", *words])
    assert done.returncode == 0, done.stderr
    values = only_record(record).values
    assert values["size"] == 2
    return values["num_tested"], values["test_accuracy"]


@pytest.mark.soak
def test_fashion_mnist_learns_where_stripes_are(tmp_path: Path) -> None:
    write_stripes(tmp_path)
    options = ("--epochs", "2", "--batch-size", "20")
    num_tested, accuracy = fashion_mnist(tmp_path, tmp_path / "record", *options)
    assert num_tested == 400
    assert accuracy >= 0.95


@pytest.mark.soak
@pytest.mark.skipif(
    not FASHION_MNIST.is_dir(),
    reason="needs the Debian package dataset-fashion-mnist",
)
def test_fashion_mnist_reaches_its_accuracy_on_two_ranks(tmp_path: Path) -> None:
    num_tested, accuracy = fashion_mnist(
        FASHION_MNIST, tmp_path / "record", "--epochs", "1"
    )
    assert num_tested == 10_000
    assert accuracy >= 0.87


REFUSED = {
    "RANK=1 digits.py": "got RANK=1 and no WORLD_SIZE",  # first: others call init()
    "digits.py --epochs 0": "argument --epochs: must be at least 1, got 0",
    "digits.py --lr x": "argument --lr: must be a number above 0, got x",
    "digits.py --batch-size 1438": "--batch-size times ranks must be at most",
    "digits.py --checkpoint-every 0": "argument --checkpoint-every: must be at least",
    "digits.py --checkpoint file --no-communication": "of ranks that have one model",
    "digits.py --what": "unrecognized arguments: --what",
    "fashion_mnist.py --data short": "must hold 16 + 4 * 2 * 2 = 32 bytes, got 31.",
}


REFUSE = """
import contextlib, io, json, os, runpy, sys
sys.path.insert(0, sys.argv[1])
ends = {}
for words in sys.argv[2:]:
    *variables, script = words.split(" -")[0].split()
    os.environ.update(variable.split("=") for variable in variables)
    sys.argv = [f"{sys.path[0]}/{script}", *words.split()[len(variables) + 1 :]]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            ends[words] = (end.code, out.getvalue(), err.getvalue())
    for variable in variables:
        del os.environ[variable.split("=")[0]]
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: Any) -> dict[str, tuple[int, str, str]]:
    """Return how each ended: in one process, as importing torch takes the longest."""
    folder = tmp_path_factory.mktemp("refusals")
    short = folder / "short"
    short.mkdir()
    # Four images of 2 x 2, of which the last lacks a pixel.
    images = bytes([0, 0, 8, 3, 0, 0, 0, 4, 0, 0, 0, 2, 0, 0, 0, 2]) + bytes(15)
    labels = bytes([0, 0, 8, 1, 0, 0, 0, 4]) + bytes(4)
    (short / "train-images-idx3-ubyte").write_bytes(images)
    (short / "train-labels-idx1-ubyte").write_bytes(labels)
    examples = str(ROOT / "examples")
    done = run([sys.executable, "-c", REFUSE, examples, *REFUSED], cwd=folder)
    return json.loads(done.stdout)


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_fit_is_one_sentence_and_64(
    refusals: dict[str, tuple[int, str, str]], words: str
) -> None:
    code, out, err = refusals[words]
    assert code == 64
    if "RANK" not in words:  # which is the library's sentence
        assert err.startswith(f"{words.split(maxsplit=1)[0]}: ")
    assert REFUSED[words] in err
    assert err.count("\n") == 1
    assert out == ""
