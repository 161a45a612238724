"""Shares of samples against times that the program measures itself."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from tests.cli.conftest import Ronde

from ronde.monitor import PySpyRun, SampleWindow, StackFrame, WindowStore, make_windows

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


def test_many_frames_make_several_windows():
    """Deep stacks at a high rate: a line to the controller has a limit."""
    frames = [StackFrame(f"f{n}", "a.py", n, True) for n in range(1001)]
    # The outermost first, and every fifth sample as the one before.
    samples = [[0, *range(1, 901 + n % 5)] for n in range(1000)]
    samples = [samples[n - (n % 5 == 4)] for n in range(1000)]
    run = PySpyRun(100.0, 110.0, 1 << 20, "")
    windows = [*make_windows(7, 9, run, samples, frames)]
    assert len(windows) == 5
    assert (windows[0].begun_at, windows[-1].ended_at) == (100.0, 110.0)
    for window, following in pairwise(windows):
        assert window.begun_at < window.ended_at == following.begun_at
    read = [
        [window.frames[number].line for number in reversed(window.stacks[stack])]
        for window in windows
        for stack, count in window.runs
        for _ in range(count)
    ]
    assert read == samples
    assert sum(len(window.runs) for window in windows) < 900
    assert [*make_windows(7, 9, run, [], frames)] == []


def test_a_long_profile_keeps_every_nth_window():
    store, frame = WindowStore(), StackFrame("f", "a.py", 1, True)
    for second in range(5000):
        for worker in (0, 1):
            # Parsed from JSON each, so equal and not the same.
            runs = tuple((0, count) for count in (3, 4))
            times = float(second), second + 1.0
            store.add(
                SampleWindow(worker, 9, *times, (frame,), ((0,),), runs, 1 << 20, "")
            )
        store.add(SampleWindow(2, 9, 0.0, 0.0, (), (), (), 0, "it is gone"))
    *kept, problem = store.all()
    assert (problem.worker, problem.problem) == (2, "it is gone")
    assert [each.begun_at for each in kept if each.worker == 1] == [*range(0, 5000, 4)]
    assert len(kept) == 2500
    assert kept[0].runs[0] is kept[-1].runs[0]
