"""The table of ``cases.py`` over every front end, plain and compiled."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

PROGRAM = Path(__file__).with_name("conformance.py")


@pytest.mark.parametrize(
    "size", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 3))]
)
def test_every_front_end_passes_the_table(size):
    words = ["-m", "ronde", "run", "-n", str(size), "-x", "TF_CPP_MIN_LOG_LEVEL=3"]
    words += ["-x", "HOROVOD_DYNAMIC_PROCESS_SETS=1", sys.executable, str(PROGRAM)]
    done = subprocess.run(
        [sys.executable, *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
