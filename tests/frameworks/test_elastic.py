"""Elastic training with frameworks besides torch: a rank is killed in a step."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

from ronde.launch import own_environment

PROGRAM = Path(__file__).with_name("elastic_keras.py")
OPTIONS = ("-np", "3", "--min-ranks", "1", "-H", "localhost:3")
EPOCHS, BATCHES, FATAL_CALL = 3, 4, 6


pytestmark = pytest.mark.long
KINDS = ["tf_keras", "keras jax", "keras torch", "keras tensorflow"]


@pytest.mark.parametrize("kind", KINDS)
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
    assert len({digest for digest, *_ in found}) == 1, result.stdout
    # A new rank may have come in time, or not.
    survivors = [each for each in found if int(each[-1])]
    assert len(survivors) == 2, result.stdout
    assert {each[1:3] for each in found} == {(str(EPOCHS), "0")}
    # The epoch of the failure was done anew. A survivor may have known of the failure
    # before it began the fatal step.
    least = FATAL_CALL - 1 + 2 * BATCHES
    assert all(int(each[3]) >= least for each in survivors), result.stdout
