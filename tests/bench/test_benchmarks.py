"""Benchmarks that no other test starts: each runs, in short, and prints every row.

One is run for every change, the others by ``scripts/soak``.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.machines import why_not
from tests.limits import HANG_S

FOLDER = Path(__file__).parents[2] / "benchmarks"
RUN = ("-m", "ronde", "run", "-n", "2", "--no-prefix", "--", sys.executable)

SOAK = pytest.mark.soak
TUNE = "autotune.py --models mnist_cnn --rounds 2 --max-samples 2 --steps-per-sample 2"


def lines_of(first: tuple[str, ...], words: str) -> str:
    script, *options = words.split()
    done = subprocess.run(
        [sys.executable, *first, str(FOLDER / script), *options],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_rows(rows: list[str], printed: str) -> None:
    for row in rows:  # its name, then its first figure
        assert re.search(rf"^ *{row}[ :]+\d", printed, re.MULTILINE), row


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        pytest.param(TUNE, ["mnist_cnn"], marks=SOAK),
        (
            "named_tensors.py --rounds 1",
            ["4 B", "160 x 16 KiB", "160 copied", "64 MiB"],
        ),
        pytest.param(
            "process_group.py --rounds 2 --only calls",
            ["all_reduce 4 B", "new_group"],
            marks=SOAK,
        ),
        pytest.param(
            "drift_cost.py --blocks 20 --models mnist_cnn",
            ["mnist_cnn hvd  off", "mnist_cnn ddp  off"],
            marks=SOAK,
        ),
        pytest.param(
            "timeline_cost.py --models named --rounds 2 --round-s 0.1",
            ["named"],
            marks=SOAK,
        ),
    ],
)
def test_of_two_ranks(words: str, rows: list[str]) -> None:
    assert_rows(rows, lines_of(RUN, words))


@SOAK
def test_all_reduce_beside_other_libraries() -> None:
    peers = "shared_memory,torch_gloo"
    short = "--rounds 1 --seconds 0.01 --max-size 64 --copy-mib 8"
    printed = lines_of((), f"collectives.py --peers {peers} {short}")
    assert_rows(["4B", "64B"], printed)


@SOAK
def test_statuses_of_a_thousand_ranks() -> None:
    assert_rows(['{"subject": "table", "ranks"'], lines_of((), "status_cost.py table"))


@SOAK
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
def test_a_check_of_two_hosts() -> None:
    printed = lines_of((), "check_cluster.py --rounds 1 --hosts 2")
    assert_rows(["ronde check", "ronde check --bandwidth gloo"], printed)
