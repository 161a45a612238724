"""``ronde why`` on planted faults: the ranks at fault, their lines and the reasons."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.conftest import clean_environment
from tests.cli.test_ps import running
from tests.limits import HANG_S, until

from ronde.launch import StackTaker, watch
from ronde.monitor import explain_hang, inspect_workers, read_by_signal
from ronde.render import draw_hang

pytestmark = pytest.mark.waits

PROGRAM = Path(__file__).with_name("faulty_rank.py")
SETTLED_S = 3.5  # the age of a hang at the end of the question


def line_of(comment):
    lines = PROGRAM.read_text().splitlines()
    (found,) = [n for n, text in enumerate(lines, 1) if text.endswith(f"# {comment}")]
    return f"{PROGRAM.name}:{found}"


def ask(socket, before=(), words=""):
    """Return the verdict on the next hang once it has settled, and its text.

    The text contains the words.
    """
    ends_s, earlier = time.monotonic() + HANG_S, None
    while time.monotonic() < ends_s:
        inspected = inspect_workers(next(watch(socket)))
        verdict = explain_hang(inspected.status, inspected.inspections)
        faults = faults_of(verdict)
        age_s = max((wait.age_s for wait in verdict.waits), default=0.0)
        # A program that reports nothing has no waits.
        is_settled = age_s >= SETTLED_S if verdict.waits else faults == earlier != []
        text = draw_hang(inspected, verdict)
        if is_settled and faults != list(before) and words in flat(text):
            return faults, text
        earlier = faults
        time.sleep(0.5)
    return pytest.fail("the job does not hang")


def job_id(socket):
    return next(watch(socket)).job.job_id


def pid_of(socket, rank):
    return next(watch(socket)).workers[rank].pid


def faults_of(verdict):
    return [(fault.kind, fault.ranks) for fault in verdict.faults]


def flat(text):
    return " ".join(text.split())


def test_each_planted_fault_is_named_with_its_line(ronde, tmp_path):
    """On named collectives, Gloo and shared memory, in one job."""
    words = ("-n", "4", "--", sys.executable, str(PROGRAM), str(tmp_path))
    with running(ronde, *words) as (_, socket):
        # Until all ranks have joined, others wait for them.
        until((tmp_path / "ready").exists)
        faults, text = ask(socket)
        assert faults == [("busy", (2,))], text
        assert line_of("loop") in text
        (tmp_path / "loop").touch()

        faults, text = ask(socket, faults)
        assert faults == [("stopped", (2,))]
        assert line_of("stopped") in text
        stopped = pid_of(socket, 2)
        assert f"kill -CONT {stopped}" in flat(text)
        os.kill(stopped, signal.SIGCONT)

        faults, text = ask(socket, faults)
        assert faults == [("input", (0,)), ("stopped", (1,))]
        assert line_of("input") in text
        assert line_of("second") in text
        (tmp_path / "input").touch()
        os.kill(pid_of(socket, 1), signal.SIGCONT)

        for call in ("all_reduce", "barrier"):  # of Gloo and of ronde
            faults, text = ask(socket, words=f"is not in {call}")
            assert faults == [("sleeping", (3,))]
            assert line_of("has skipped one") in text
            os.kill(pid_of(socket, 3), signal.SIGUSR1)

        faults, text = ask(socket, faults)
        assert faults == [("mismatch", (2, 3)), ("order", (0, 1))], text
        assert f"ank 2 is in broadcast at {PROGRAM}" in flat(text)
        assert "either may be wrong" in flat(text)
        assert_cycle(text)


def assert_cycle(text):
    assert "waits for rank 1; rank 1 is in" in flat(text)
    caller = line_of("first group").partition(":")[2]
    assert f"called from line {caller}" in flat(text)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["ronde", "gloo"])
def test_groups_used_in_another_order_are_a_cycle(ronde, tmp_path, backend):
    program = (sys.executable, str(PROGRAM), str(tmp_path), backend)
    with running(ronde, "-n", "2", "--", *program) as (_, socket):
        faults, text = ask(socket)
        assert faults == [("order", (0, 1))]
        assert_cycle(text)


def test_a_command_line_names_the_job(ronde, ronde_here):
    with running(ronde, "-n", "2", "/bin/sleep", "1001") as (_, socket):
        name = job_id(socket)
        answer = json.loads(ronde_here("why", name, "--json").stdout)
        assert [
            inspection["problem"] != "" for inspection in answer["inspections"]
        ] == [True, True]
        assert answer["verdict"]["faults"] == []
        text = ronde_here("why", "sleep 1001", "--stacks").stdout.decode()
        assert "reports no collectives" in flat(text)
    refused = ronde_here("why", name)
    assert refused.returncode == 64


HANGS = """
import os, signal, time
from ronde.launch import own_environment
from ronde.status import Part, PendingCollective, add_source
rank, begun_s = int(own_environment().get("RANK", 0)), time.monotonic()
class Rank:
    def report(self):
        age_s = time.monotonic() - begun_s
        call = PendingCollective("x", "all", "allreduce", 1, 4, age_s)
        return Part([call] * (rank == 0))
source = Rank()
add_source(source.report)
if own_environment().get("RONDE_EPOCH") == "0" and rank == 1:
    time.sleep(1000)
elif own_environment().get("RONDE_EPOCH") == "0":
    signal.pause()
"""


def test_a_hang_ends_a_start_with_its_verdict_and_the_next_one_goes_on(ronde, tmp_path):
    """The ranks do not import torch, and report a collective that they do not make."""
    script = tmp_path / "train.py"
    script.write_text(HANGS)
    words = ("-n", "2", "--hang-timeout", "5s")
    done = ronde("run", *words, "--max-restarts", "1", "--", str(script))
    text = flat(done.stderr.decode().replace("|", ""))
    assert done.returncode == 0, text
    assert "--hang-timeout ended the job, exit code 124" in text
    assert text.count(f"sleeps or waits at {script}:14 (") == 2
    assert "restart 1 of 1: the ranks hung." in text


def test_a_short_hang_timeout_is_refused(ronde_here):
    done = ronde_here("run", "--hang-timeout", "1s", "true")
    assert done.returncode == 64
    assert b"--hang-timeout must be at least 5s, got 1s." in done.stderr


WAITS = """
import threading, time
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
def load():
    print("there", flush=True)
    time.sleep(1000)
load()
"""


def lines_of(pid):
    return [(each.function, each.line) for each in read_by_signal(pid)]


def test_a_stack_is_read_without_the_right_to_read_memory():
    taker = StackTaker()
    env = clean_environment()
    with subprocess.Popen(
        [sys.executable, "-c", WAITS],
        env=env | taker.environment(0, env),
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout.readline() == b"there\n"
            # It may still be in the line that prints.
            until(lambda: lines_of(process.pid) == [("load", 6), ("<module>", 7)])
            os.kill(process.pid, signal.SIGSTOP)
            assert read_by_signal(process.pid) == ()
        finally:
            process.kill()
    taker.close()
    assert read_by_signal(os.getpid()) == ()
