"""A program on a host that is spoken with line by line, through the host's agent."""

import time

import pytest

from ronde.launch.boot import start_local_agent
from ronde.launch.controller import Controller
from ronde.launch.conversation import MAX_LINE_BYTES
from ronde.launch.hiring import Hiring
from ronde.launch.hosts.host import Host
from ronde.launch.lineage import children
from ronde.launch.signals import caught_signals
from ronde.launch.sink import Unseen

PROGRAM = """
import os, sys, time

def main():
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "echo":
            print(rest, flush=True)
        elif word == "long":
            print("x" * int(rest), flush=True)
        elif word == "wait":
            # Until the test says that the question is over.
            while not os.path.exists(rest):
                time.sleep(0.01)
            print("late", flush=True)
        elif word == "die":
            sys.exit(7)
        elif word == "leave_child":
            if os.fork() == 0:
                os.setsid()
                time.sleep(600)
            os._exit(0)
        elif word == "path":
            print("site-packages" in str(sys.path), flush=True)
"""


@pytest.fixture
def interview(tmp_path, monkeypatch):
    (tmp_path / "spoken_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # Other tests' hosts may be there for as long as pytest runs.
    before = children()
    with caught_signals() as signal_fd, start_local_agent() as agent:
        controller = Controller(Unseen(), signal_fd, Hiring(agent))
        try:
            nodes, failures = controller.gather_ready([Host("here")])
            assert failures == ()
            yield controller.interview(nodes, "spoken_program")
        finally:
            controller.close()
    assert children() == before


def ask(interview, line, timeout_s=20.0):
    return interview.ask({"here": line}, timeout_s)["here"]


def test_each_question_gets_its_answer(interview):
    for word in ("a", "b \u00e9", "c" * 100_000):
        answer = ask(interview, f"echo {word}")
        assert (answer.line, answer.failure) == (word, "")
        assert answer.asked_s <= answer.answered_s
    assert ask(interview, "path").line == "True"


def test_a_late_answer_is_not_taken_for_the_next(interview, tmp_path):
    assert ask(interview, "echo ready").line == "ready"
    slow = ask(interview, f"wait {tmp_path}/go", timeout_s=0.2)
    assert slow.failure == "no answer within 0.2 s"
    (tmp_path / "go").touch()
    assert ask(interview, "echo next").line == "next"


def test_a_program_that_ends_is_told_and_not_asked_again(interview):
    assert ask(interview, "die").failure == "its program ended with exit code 7"
    begun_s = time.monotonic()
    assert ask(interview, "echo a").failure == "its program ended with exit code 7"
    assert time.monotonic() - begun_s < 5.0


def test_what_a_program_leaves_behind_is_ended(interview):
    # Its child holds its output; the fixture looks for what is left.
    assert ask(interview, "leave_child").failure == "its program ended with exit code 0"


def test_an_answer_without_end_is_cut_off(interview):
    answer = ask(interview, f"long {MAX_LINE_BYTES + (1 << 20)}", timeout_s=3.0)
    assert answer.line == ""
    assert answer.failure


def test_a_program_that_is_not_there_is_told(tmp_path):
    with caught_signals() as signal_fd, start_local_agent() as agent:
        controller = Controller(Unseen(), signal_fd, Hiring(agent))
        try:
            nodes, _ = controller.gather_ready([Host("here")])
            interview = controller.interview(nodes, "no_such_module_at_all")
            assert ask(interview, "echo a").failure == (
                "its program ended with exit code 1"
            )
        finally:
            controller.close()
