"""``ronde.keras`` on its three backends; ``ronde.tensorflow.keras`` with tf-keras."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

HERE = Path(__file__).parent
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


def run(size, program, *arguments, **environment):
    words = [f"{name}={value}" for name, value in (QUIET | environment).items()]
    command = [
        "env",
        *words,
        sys.executable,
        "-m",
        "ronde",
        "run",
        "-n",
        str(size),
        sys.executable,
    ]
    done = subprocess.run(
        [*command, str(HERE / program), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        *(("tensorflow", 2), ("jax", 2)),
        *(pytest.param("torch", n, marks=pytest.mark.long) for n in (2, 3)),
    ],
)
def test_keras_3_trains_equally_on_all_ranks(backend, size):
    level = "all" if size == 2 else "training"
    said = run(size, "keras_program.py", backend, level, KERAS_BACKEND=backend)
    if level == "all":
        line = "Epoch 2: finished gradual learning rate warmup to 0.1."
        assert said.count(line) == 1


@pytest.mark.long
def test_tf_keras_trains_equally_on_all_ranks():
    run(2, "tf_keras_program.py", TF_USE_LEGACY_KERAS="1")
