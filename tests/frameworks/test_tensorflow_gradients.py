"""Tapes, legacy optimizers, aggregation and SyncBatchNormalization on several ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

PROGRAM = Path(__file__).with_name("tensorflow_gradients.py")


@pytest.mark.parametrize(
    ("size", "is_legacy_keras"), [(2, 0), pytest.param(3, 1, marks=pytest.mark.long)]
)
def test_gradients_are_reduced(size, is_legacy_keras):
    settings = [
        "HOROVOD_DYNAMIC_PROCESS_SETS=1",
        "TF_CPP_MIN_LOG_LEVEL=3",
        f"TF_USE_LEGACY_KERAS={is_legacy_keras}",
    ]
    launch = [sys.executable, "-m", "ronde", "run", "-n", str(size)]
    done = subprocess.run(
        ["/usr/bin/env", *settings, *launch, sys.executable, str(PROGRAM)],
        check=False,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
