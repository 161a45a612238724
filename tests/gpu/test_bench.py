"""``ronde bench`` over NCCL: at size 1, and with ranks that share one GPU."""

import subprocess
import sys

import pytest
from tests.cli.conftest import clean_environment
from tests.gpu.devices import NEEDS_CUDA, NUM_DEVICES

pytestmark = NEEDS_CUDA


LIMIT_S = 60.0


def bench(*words):
    """Run a benchmark; return its rows' cells."""
    ended = subprocess.run(
        [sys.executable, "-m", "ronde", "bench", *words],
        env=clean_environment("CUDA_VISIBLE_DEVICES"),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "[0000:00:00]" not in ended.stdout
    return [
        line.split()
        for line in ended.stdout.splitlines()
        if line.strip() and not line.startswith("#")
    ]


SWEEP = ("-b", "8", "-e", "1M", "-f", "8", "-n", "5", "--device", "cuda", "--no-limit")


def check_rows(rows, num_rows):
    assert len(rows) == num_rows
    assert {row[8] for row in rows} == {"0"}


def test_one_rank():
    check_rows(bench("alltoall", *SWEEP), 6)


def test_single_iterations_are_timed_by_events():
    (row,) = bench("all_reduce", *SWEEP[:2], "-e", "8", *SWEEP[6:], "-I", "1")
    shortest, longest = float(row[9]), float(row[10])
    assert 0 < shortest <= longest


TWO = ("-g", "2", "--engine", "nccl", *(() if NUM_DEVICES > 1 else ("--share-gpu",)))


@pytest.mark.parametrize("test", ["all_reduce", "reduce_scatter", "sendrecv", "gather"])
def test_two_ranks(two_ranks, test):
    check_rows(bench(test, *TWO, *SWEEP), 6)


def test_all_types_are_verified(two_ranks):
    words = ("-d", "all", "-o", "all", "-b", "4K", "-e", "4K", "-n", "2")
    check_rows(bench("all_reduce", *TWO, *words, *SWEEP[-3:]), 60)
