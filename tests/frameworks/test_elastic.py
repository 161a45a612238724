"""Elastic training with frameworks besides torch: a rank is killed in a step."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

from ronde.launch import own_environment

PROGRAM = Path(__file__).with_name("elastic_keras.py")
OPTIONS = ("-np", "2", "--min-ranks", "1", "--spares", "1", "-H", "localhost:3")
EPOCHS, BATCHES, FATAL_CALL = 3, 4, 6


KINDS = ["tf_keras", "keras jax"]
MORE = [
    pytest.param(kind, marks=pytest.mark.long)
    for kind in ("keras torch", "keras tensorflow")
]


@pytest.mark.parametrize("kind", KINDS + MORE)
def test_training_goes_on_from_the_last_commit(kind: str) -> None:
    name, _, backend = kind.partition(" ")
    words = (sys.executable, "-m", "ronde", "run", *OPTIONS, "--no-prefix", "--")
    environment = own_environment() | {
        "KERAS_BACKEND": backend or "tensorflow",
        "TF_USE_LEGACY_KERAS": str(int(name == "tf_keras")),
    }
    result = subprocess.run(
        (*words, sys.executable, PROGRAM, name),
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = re.findall(r"done (\w+) (\d+) (\d+) (\d+) (\d+)", result.stdout)
    assert len(found) == 2, result.stdout
    [digest] = {each[0] for each in found}
    assert digest
    positions = sorted(tuple(map(int, each[1:])) for each in found)
    # The epoch of the failure is done anew: by the survivor, and by the spare.
    left = 2 * BATCHES
    survivor = (EPOCHS, 0, FATAL_CALL + left, 1)
    assert positions == [(EPOCHS, 0, left, 0), survivor]
