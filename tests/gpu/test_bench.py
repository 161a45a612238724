"""``ronde bench`` over NCCL: at size 1, and with ranks that share one GPU."""

import subprocess
import sys

import pytest
import torch
from tests.cli.conftest import clean_environment

NEEDS_CUDA = "no CUDA device here: NCCL is not measured"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_CUDA),
    # The first NCCL communicator of a process takes seconds.
    pytest.mark.timeout(300),
]


def bench(*words):
    """Run a benchmark; return its rows' cells."""
    ended = subprocess.run(
        [sys.executable, "-m", "ronde", "bench", *words],
        env=clean_environment("CUDA_VISIBLE_DEVICES"),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "[0000:00:00]" not in ended.stdout
    return [
        line.split()
        for line in ended.stdout.splitlines()
        if line.strip() and not line.startswith("#")
    ]


SWEEP = ("-b", "8", "-e", "1M", "-f", "8", "-n", "5", "--device", "cuda", "--no-limit")


@pytest.mark.parametrize("test", ["all_reduce", "all_gather", "alltoall", "reduce"])
def test_one_rank(test):
    rows = bench(test, *SWEEP)
    assert len(rows) == 6
    assert {row[8] for row in rows} == {"0"}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("test", ["all_reduce", "reduce_scatter", "sendrecv"])
def test_ranks_that_share_a_gpu(test, size):
    rows = bench(test, "-g", str(size), "--share-gpu", "--engine", "nccl", *SWEEP)
    assert len(rows) == 6
    assert {row[8] for row in rows} == {"0"}


def test_all_types_are_verified():
    words = ("-d", "all", "-o", "all", "-b", "4K", "-e", "4K", "-n", "2")
    rows = bench("all_reduce", "-g", "2", "--share-gpu", *words, "--device", "cuda")
    assert len(rows) == 60
    assert {row[8] for row in rows} == {"0"}


def test_single_iterations_are_timed_by_events():
    (row,) = bench("all_reduce", *SWEEP[:2], "-e", "8", *SWEEP[6:], "-I", "1")
    shortest, longest = float(row[9]), float(row[10])
    assert 0 < shortest <= longest
