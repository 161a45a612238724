"""A script that knows only Horovod runs as it is."""

import re
from pathlib import Path

import numpy as np
import pytest
from tests.examples.test_examples_run import FASHION_MNIST, TIMEOUT_S, launched, run

pytestmark = pytest.mark.timeout(TIMEOUT_S + 30)


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


def accuracy_of(data: Path, *options: str) -> float:
    size, start = launched("ronde")
    script = "examples/horovod_mnist.py"
    done = run([*start, script, "--data", str(data), *options])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test loss") == done.stdout.count(" batch 0/")
    *_, accuracy = re.findall(rf"accuracy ([0-9.]+)% on {size} ranks", done.stdout)
    return float(accuracy)


@pytest.mark.parametrize("option", ["", "--fp16-allreduce"])
def test_it_learns_where_stripes_are(tmp_path: Path, option: str) -> None:
    write_stripes(tmp_path)
    options = f"--epochs 4 --lr 0.05 --batch-size 20 {option}".split()
    assert accuracy_of(tmp_path, *options) >= 95


@pytest.mark.skipif(
    not FASHION_MNIST.is_dir(),
    reason="needs the Debian package dataset-fashion-mnist",
)
def test_it_learns_fashion_mnist() -> None:
    assert accuracy_of(FASHION_MNIST, "--lr", "0.05") >= 80
