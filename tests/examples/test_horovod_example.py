"""A script that knows only Horovod runs as it is."""

import re
from pathlib import Path

import pytest
from tests.examples.test_examples_run import (
    launched,
    run,
    write_stripes,
)


def accuracy_of(data: Path, *options: str) -> float:
    size, start = launched("ronde")
    script = "examples/horovod_mnist.py"
    done = run([*start, script, "--data", str(data), *options])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test loss") == done.stdout.count(" batch 0/")
    *_, accuracy = re.findall(rf"accuracy ([0-9.]+)% on {size} ranks", done.stdout)
    return float(accuracy)


@pytest.mark.soak
@pytest.mark.parametrize("option", ["", "--fp16-allreduce"])
def test_it_learns_where_stripes_are(tmp_path: Path, option: str) -> None:
    write_stripes(tmp_path)
    options = f"--epochs 4 --lr 0.05 --batch-size 20 {option}".split()
    assert accuracy_of(tmp_path, *options) >= 95
