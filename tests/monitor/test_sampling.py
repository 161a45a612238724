"""Shares of samples against times that the program measures itself."""

import json
from collections import Counter
from pathlib import Path

import pytest
from tests.cli.conftest import Ronde

PROGRAM = Path(__file__).with_name("timed_rank.py")
PARTS = ("loop", "sleep", "product", "text")
RATE_HZ = 500


def count_samples(windows):
    """Return the samples by the part in whose line they are; "" for other lines."""
    parts = [text.rpartition("# ")[2] for text in PROGRAM.read_text().splitlines()]
    counts = Counter()
    for window in windows:
        frames = window["frames"]
        for stack, count in window["runs"]:
            own = [
                frames[number]["line"]
                for number in window["stacks"][stack]
                if frames[number]["file"] == str(PROGRAM)
            ]
            part = parts[own[0] - 1] if own else ""
            counts[part if part in PARTS else ""] += count
    return counts


def measure_times(windows, parts):
    """Return the seconds of each part within the windows."""
    times = Counter()
    for window in windows:
        for part, begun, ended in parts:
            inside = min(ended, window["ended_at"]) - max(begun, window["begun_at"])
            times[part] += max(0.0, inside)
    return times


def shares_of(counts):
    return {part: counts[part] / counts.total() for part in PARTS}


@pytest.mark.waits
@pytest.mark.parametrize(
    # Where the cores are busy, py-spy is late, and a short run is some points off.
    ("run_s", "points"),
    [(6, 8), pytest.param(60, 3, marks=pytest.mark.long)],
)
def test_shares_of_samples_are_those_of_the_time(tmp_path, run_s, points):
    """Of two ranks, in the lines that take the time."""
    path = tmp_path / "profile.json"
    words = ("-n", "2", "--", str(PROGRAM), str(run_s), str(tmp_path))
    done = Ronde()("profile", "-r", str(RATE_HZ), "-o", str(path), *words)
    assert done.returncode == 0, done.stderr
    windows = json.loads(path.read_text())["windows"]
    counted, timed = Counter(), Counter()
    for worker in (0, 1):
        own = [window for window in windows if window["worker"] == worker]
        assert own
        counted += count_samples(own)
        timed += measure_times(own, json.loads((tmp_path / str(worker)).read_text()))
    found, true = shares_of(counted), shares_of(timed)
    assert found == pytest.approx(true, abs=points / 100), (counted, timed)
