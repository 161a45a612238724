"""``ronde.tensorflow``: the checks are in a program, since TensorFlow starts slowly."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

PROGRAM = Path(__file__).with_name("tensorflow_rank.py")


def run(num_ranks: int, *words: str, settings: tuple[str, ...] = ()) -> tuple[int, str]:
    launch = [sys.executable, "-m", "ronde", "run", "-n", str(num_ranks)]
    done = subprocess.run(
        ["/usr/bin/env", *settings, *launch, sys.executable, str(PROGRAM), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=HANG_S,
        check=False,
        text=True,
    )
    return done.returncode, done.stdout


def test_three_ranks():
    settings = ("HOROVOD_DYNAMIC_PROCESS_SETS=1", "TF_CPP_MIN_LOG_LEVEL=3")
    code, text = run(3, settings=settings)
    assert code == 0, text


def test_a_killed_peer_is_named():
    code, text = run(2, "killed")
    assert code == 137, text
    assert "raised" in text
    assert "HorovodAllreduce: " in text
    assert "Rank 1 is gone" in text


@pytest.mark.long
def test_another_order_of_tracing_is_named():
    limits = (
        "HOROVOD_STALL_CHECK_TIME_SECONDS=1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=2",
    )
    code, text = run(2, "stalled", settings=limits)
    assert code == 1, text
    assert "1: [allreduce.lasting]" in text
    assert "0: [allreduce.other]" in text
    assert "HorovodAllreduce: " in text
