"""The program of ``ronde check`` on hosts, spoken with by pipes instead of agents."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from ronde.check import HostSet, all_steps
from ronde.launch import Answer

WORDS = [sys.executable, "-c", "from ronde.check import main; main()"]

Start = Callable[..., "subprocess.Popen[str]"]
"""Starts the program: takes the host's name and the options of ``subprocess.Popen``."""


class PipedPrograms:
    """Asks like ``RemotePrograms`` of ``ronde.launch``; all hosts at once."""

    def __init__(self, programs: Mapping[str, "subprocess.Popen[str]"]) -> None:
        self.programs = programs

    def ask(self, questions: Mapping[str, str], timeout_s: float) -> dict[str, Answer]:
        answers: dict[str, Answer] = {}
        asking = [
            threading.Thread(target=self._ask_one, args=(name, line, answers))
            for name, line in questions.items()
        ]
        for each in asking:
            each.start()
        for each in asking:
            each.join(timeout_s)
        late = Answer("", f"no answer within {timeout_s:g} s")
        return {name: answers.get(name, late) for name in questions}

    def _ask_one(self, name: str, question: str, answers: dict[str, Answer]) -> None:
        program = self.programs[name]
        assert program.stdin
        assert program.stdout
        asked_s = time.monotonic()
        try:
            os.write(program.stdin.fileno(), f"{question}\n".encode())  # keeps no rest
        except BrokenPipeError:
            answers[name] = Answer("", "its program has ended")
            return
        line = program.stdout.readline()
        answers[name] = Answer(line, "", asked_s, time.monotonic())


def start_here(_name: str, **popen: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen(WORDS, **popen)


def start_without_b(name: str, **popen: Any) -> "subprocess.Popen[str]":
    """Start the program, which has ended already on the host ``b``."""
    program = start_here(name, **popen)
    if name == "b":
        program.kill()
        program.wait()
    return program


def run_step(name: str, hosts: HostSet) -> None:
    """Run a step of ``ronde check`` by its name."""
    (step,) = (each for each in all_steps() if each.name == name)
    step.run(hosts)


@contextmanager
def start_hosts(
    addresses: Mapping[str, str],
    settings: dict[str, Any] | None = None,
    start: Start = start_here,
) -> Generator[HostSet]:
    """Start the program for each host; end them all."""
    programs: dict[str, subprocess.Popen[str]] = {}
    with ExitStack() as ending:
        for name in addresses:
            program = start(
                name, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            programs[name] = ending.enter_context(program)
            ending.callback(program.kill)
        yield HostSet(cast("Any", PipedPrograms(programs)), addresses, settings or {})
