"""Shares of samples against times that the program measures itself."""

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from tests.cli.conftest import Ronde
from tests.cli.test_profile import count_sleeps
from tests.limits import until

from ronde.monitor import Sampler, SampleWindow, StackFrame, WindowStore

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


DEEP = """
def call(depth):
    while not depth:
        pass
    call(depth - 1)
call(900)
"""


def test_many_frames_are_sent_in_several_windows():
    sent = []
    sampler = Sampler(sent.append)
    with subprocess.Popen([sys.executable, "-c", DEEP]) as process:
        try:

            def has_many_samples():
                sampler.ask({7: process.pid}, 100)
                return count_sleeps(process.pid) > 250

            until(has_many_samples)
            sampler.ask({}, 0)
        finally:
            process.kill()
    *windows, end = (each.window for each in sent)
    assert end is None
    assert {(each.worker, each.pid, each.problem) for each in windows} == {
        (7, process.pid, "")
    }
    assert len(windows) > 1
    for window, following in pairwise(windows):
        assert window.begun_at < window.ended_at == following.begun_at
        frames = [window.frames[number] for number in window.stacks[0]]
        assert [frames[0].function, frames[-1].function] == ["call", "<module>"]
        assert 900 <= len(frames) <= 902


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
