"""Each example as its reader starts it: one file, every launcher."""

import os
import signal
import subprocess
import sys
from pathlib import Path

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
