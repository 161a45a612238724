"""``ronde bench train`` of TensorFlow, Keras and JAX, with their own strategies."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Ronde, clean_environment
from tests.limits import HANG_S

pytestmark = pytest.mark.long

PROGRAM = Path(__file__).with_name("bench_train_program.py")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


# A process has one backend of Keras, and can make one strategy.
@pytest.mark.parametrize(
    ("backend", "measured"),
    [
        ("tensorflow", ("tensorflow+peer", "keras")),
        ("jax", ("jax+peer",)),
        ("torch", ("keras+peer",)),
    ],
)
def test_a_tiny_training_in_each_framework(backend, measured):
    command = [sys.executable, "-m", "ronde", "run", "-n", "2", sys.executable]
    ended = subprocess.run(
        [*command, str(PROGRAM), *measured],
        capture_output=True,
        text=True,
        env=clean_environment() | QUIET | {"KERAS_BACKEND": backend},
        timeout=HANG_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-5000:]


def test_another_backend_is_refused():
    words = ("bench", "train", "--model", "mlp", "--framework", "jax", "-n", "1")
    command = ("run", "-n", "1", "--no-prefix", "--", sys.executable, "-m", "ronde")
    ended = Ronde()(*command, *words, env=QUIET | {"KERAS_BACKEND": "torch"})
    said = "KERAS_BACKEND must be jax for --framework jax, got torch. Type: export"
    assert said in ended.stderr.decode()
    assert ended.returncode == 6
