"""``ronde profile``: of a program, of a running job, and of those that end early."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.cli.conftest import clean_environment, read_lines
from tests.cli.test_ps import running
from tests.limits import HANG_S, until

from ronde.launch import HostAnswer, JobConnection, list_jobs, watch

pytestmark = pytest.mark.waits

PROGRAM = Path(__file__).with_name("sampled_rank.py")
SOURCE = str(PROGRAM.parents[2] / "src")


def read(path):
    """Return a profile's samples by worker and pid, as functions and lines."""
    profile, found = json.loads(path.read_text()), {}
    for window in profile["windows"]:
        assert window["problem"] == ""
        assert profile["begun_at"] < window["begun_at"] < window["ended_at"]
        assert window["rss_bytes"] > 1 << 20
        places = found.setdefault((window["worker"], window["pid"]), {})
        for stack, count in window["runs"]:
            frame = window["frames"][window["stacks"][stack][0]]
            place = frame["function"], frame["line"]
            places[place] = places.get(place, 0) + count
    return found


def spinning(places):
    """Return the samples in the line that spins, as a share."""
    lines = PROGRAM.read_text().splitlines()
    [line] = [n for n, text in enumerate(lines, 1) if text.endswith("# spins")]
    return places["spin", line] / sum(places.values())


def samplers_of(pid):
    """Return the directories in /proc of each py-spy that samples a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if f"--pid\0{pid}\0" in path.read_text(errors="replace"):
                found.append(path.parent)
    return found


def is_sampled(pid):
    """Return True once py-spy has slept a few times, each time after a sample."""
    found = [
        int(count)
        for directory in samplers_of(pid)
        for path in directory.glob("task/*/status")
        for count in re.findall(r"\nvoluntary_ctxt_switches:\s+(\d+)", path.read_text())
    ]
    return max(found, default=0) > 20


def pids_of(socket):
    return [row.pid for row in next(watch(socket)).workers]


@contextmanager
def profiling(ronde, *words):
    """Start ``ronde profile``; yield its process, which must end in the block."""
    with ronde.start("profile", *words) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_profile_has_all_starts_of_a_job_and_their_ends(ronde, tmp_path):
    path = tmp_path / "profile.json"
    words = ("-n", "2", "--max-restarts", "1", "--grace", "60s")
    done = ronde("profile", "-o", str(path), *words, str(PROGRAM), "0:1:kill")
    assert done.returncode == 0, done.stderr
    found = read(path)
    assert sorted(worker for worker, _ in found) == [0, 0, 1, 1]
    assert min(spinning(places) for places in found.values()) > 0.5
    status = json.loads(path.read_text())["status"]
    assert status["job"]["restarts"] == 1
    assert [row["state"] for row in status["workers"]].count("running") > 0


def test_ctrl_c_ends_the_job_and_leaves_a_profile(ronde, tmp_path):
    path = tmp_path / "profile.json"
    words = ("-o", str(path), "-n", "2", "--", str(PROGRAM), "stay")
    with profiling(ronde, *words) as process:
        read_lines(process, b"sampled", 2)
        [job] = [job for job in list_jobs() if job.job.head_pid == process.pid]
        with JobConnection(job.socket) as other:
            other.send({"ask": "usage"})  # its answer is not wanted at the end
            next(news for news in other if isinstance(news, HostAnswer))
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANG_S)
        assert process.returncode == 130
    assert [worker for worker, _ in sorted(read(path))] == [0, 1]


def test_a_running_job_is_sampled_while_someone_attends(ronde, tmp_path):
    path, words = tmp_path / "profile.json", ("-n", "2", "--", str(PROGRAM), "stay")
    job = ("--attach", tmp_path.name)
    with running(ronde, *words, tmp_path.name) as (process, socket):
        pids = pids_of(socket)
        with JobConnection(socket) as connection:
            assert not connection.is_of_this_process
        with profiling(ronde, *job, "-d", "1h", "-o", str(path)) as profiler:
            until(lambda: all(map(is_sampled, pids)))
            profiler.send_signal(signal.SIGINT)
            profiler.communicate(timeout=HANG_S)
            assert profiler.returncode == 0
        assert sorted(read(path)) == [(0, pids[0]), (1, pids[1])]
        assert not any(map(samplers_of, pids))

        with profiling(ronde, *job, "-d", "1h") as profiler:
            until(lambda: all(map(is_sampled, pids)))
            profiler.kill()
        until(lambda: not any(map(samplers_of, pids)))
        process.terminate()
        assert process.wait(HANG_S) == 143


def test_a_program_without_python_is_named(ronde, ronde_here):
    with running(ronde, "-n", "2", "/bin/sleep", "1003"):
        done = ronde_here("profile", "--attach", "sleep 1003", "-d", "1s")
    assert done.returncode == 0
    text = b"no samples of workers 0-1: the main thread runs no Python.\n"
    assert done.stderr == b"ronde: " + text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-r", "0", "x"), "--rate must be a whole number from 1 to 1000, got '0'."),
        (("-r", "1001", "x"), "from 1 to 1000, got '1001'. Type: --rate 100"),
        (("-o", "/nowhere/a.html", "x"), "cannot write the file of --output: /nowhere"),
        (("-o", "/proc", "x"), "--output must end in one of .html, .speed"),
        ((), "a program is required. Type: ronde profile -n 4 train.py"),
        (("-d", "3s", "x"), "--duration has no effect without --attach."),
        (("--attach", "no-such-job-here"), "ronde: "),
        (("--attach", "a", "x"), "x has no effect with --attach."),
        (("-n", "2", "--attach", "a"), "-n has no effect with --attach."),
        (("--agent", "a:1", "x"), "--agent cannot be profiled."),
        (("-n", "0", "x"), "-n must be a whole number of at least 1, got '0'"),
    ],
)
def test_bad_command_lines_start_nothing(ronde_here, words, message):
    done = ronde_here("profile", *words)
    assert done.returncode == 64
    assert message in done.stderr.decode()


def test_obstacles_are_named_before_the_job_starts(tmp_path):
    """First py-spy is missing, then it may not read a process of this user."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True
    )
    command = [str(tmp_path / "bin/python"), "-m", "ronde", "profile", "-n", "1"]
    env = clean_environment() | {"PYTHONPATH": SOURCE}

    def refusal():
        done = subprocess.run(
            [*command, "touch", str(tmp_path / "ran")],
            check=False,
            env=env,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert done.returncode == 64, done.stderr
        return done.stderr

    assert "py-spy is not installed there: pip install 'ronde[monitor]'." in refusal()
    if os.geteuid() == 0:
        own = Path(sys.executable).with_name("py-spy")
        other = tmp_path / "bin/py-spy"
        other.write_text(
            f'#!/bin/sh\nexec setpriv --reuid=65534 --clear-groups {own} "$@"\n'
        )
        other.chmod(0o755)
        assert "root, or in a container --cap-add SYS_PTRACE, would help" in refusal()
    assert not (tmp_path / "ran").exists()
