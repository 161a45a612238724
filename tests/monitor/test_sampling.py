"""Shares of samples against times that the program measures itself."""

import json
from collections import Counter
from pathlib import Path

import pytest
from tests.cli.conftest import Ronde

from ronde.monitor import ProfileCollector, SampleWindow, StackFrame, add_samples

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


def test_of_deep_stacks_the_innermost_frames_are_kept():
    """A recursive program at a high rate: a line to the controller has a limit."""
    frames = [{"name": f"f{n}", "file": "a.py", "line": n} for n in range(1001)]
    # The outermost first. One sample has failed, and one thread is another.
    samples = [[0, *range(1, 901 + n)] for n in (0, 0, 1, 0)] + [[]]
    result = {
        "shared": {"frames": frames},
        "profiles": [
            {"name": "Thread 10 (9)", "samples": [[1]]},
            {"name": "Thread 9 (9)", "samples": samples},
        ],
    }
    empty = SampleWindow(7, 9, 100.0, 110.0, (), (), (), 1 << 20, "")
    window = add_samples(empty, result)
    assert window.runs == ((0, 2), (1, 1), (0, 1))
    first, second = (
        [window.frames[number].line for number in stack] for stack in window.stacks
    )
    assert first == [*range(900, 600, -1)]
    assert second == [*range(901, 601, -1)]
    none = add_samples(empty, {"shared": {"frames": []}, "profiles": []})
    assert none == empty._replace(problem="the main thread runs no Python")


def test_a_long_profile_keeps_windows_of_the_same_times():
    collector = ProfileCollector(100)
    frame = StackFrame("f", "a.py", 1, True)
    for second in range(0, 60000, 15):
        for worker in (0, 1):
            # Parsed from JSON each, so equal and not the same.
            runs = tuple((0, count) for count in (3, 4))
            times = float(second), second + 15.0
            collector.add(
                SampleWindow(worker, 9, *times, (frame,), ((0,),), runs, 1 << 20, "")
            )
        collector.add(SampleWindow(2, 9, 0.0, 0.0, (), (), (), 0, "it is gone"))
    *kept, problem = collector.windows()
    assert (problem.worker, problem.problem) == (2, "it is gone")
    begun = [[e.begun_at for e in kept if e.worker == worker] for worker in (0, 1)]
    assert begun[0] == begun[1] == [n for n in range(0, 60000, 15) if n // 20 % 2 == 0]
    assert kept[0].runs[0] is kept[-1].runs[0]
