"""A program on a host that is spoken with line by line, through the host's agent."""

import pytest
from tests.limits import HANG_S

from ronde.launch import (
    AgentStarter,
    Controller,
    Host,
    NoOutput,
    caught_signals,
    start_local_agent,
)
from ronde.processes import children

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
def start_programs(tmp_path, monkeypatch):
    (tmp_path / "spoken_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # Other tests' hosts may be there for as long as pytest runs.
    before = children()
    with caught_signals() as signal_fd, start_local_agent() as agent:
        controller = Controller(NoOutput(), signal_fd, AgentStarter(agent))
        try:
            nodes, failures = controller.connect_ready([Host("here")])
            assert failures == ()
            yield controller.start_programs(nodes, "spoken_program")
        finally:
            controller.close()
    assert children() == before


def ask(start_programs, line, timeout_s=HANG_S):
    return start_programs.ask({"here": line}, timeout_s)["here"]


def test_each_question_gets_its_answer(start_programs):
    for word in ("a", "b \u00e9", "c" * 100_000):
        answer = ask(start_programs, f"echo {word}")
        assert (answer.line, answer.failure) == (word, "")
        assert answer.asked_s <= answer.answered_s
    assert ask(start_programs, "path").line == "True"


def test_a_late_answer_is_not_taken_for_the_next(start_programs, tmp_path):
    assert ask(start_programs, "echo ready").line == "ready"
    slow = ask(start_programs, f"wait {tmp_path}/go", timeout_s=0.2)
    assert slow.failure == "no answer within 0.2 s"
    (tmp_path / "go").touch()
    assert ask(start_programs, "echo next").line == "next"


def test_a_program_that_ended_is_not_asked_again(start_programs):
    assert ask(start_programs, "die").failure == "its program ended with exit code 7"
    # It is not waited for.
    again = ask(start_programs, "echo a", timeout_s=9 * HANG_S)
    assert again.failure == "its program ended with exit code 7"


def test_processes_left_by_a_program_are_killed(start_programs):
    # Its child holds its output; the fixture looks for what is left.
    assert (
        ask(start_programs, "leave_child").failure
        == "its program ended with exit code 0"
    )
