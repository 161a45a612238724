"""The program of ``ronde check`` on hosts, spoken with by pipes instead of agents."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from ronde.check import HostSet
from ronde.launch import Answer

WORDS = [sys.executable, "-c", "from ronde.check import main; main()"]

Start = Callable[..., "subprocess.Popen[str]"]
"""Starts the program: takes the host's name and what ``subprocess.Popen`` takes."""


class PipedInterview:
    """Asks like ``ronde.launch``; all hosts at once."""

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

    def _ask_one(self, name: str, line: str, answers: dict[str, Answer]) -> None:
        program = self.programs[name]
        assert program.stdin
        assert program.stdout
        asked_s = time.monotonic()
        try:
            os.write(program.stdin.fileno(), f"{line}\n".encode())  # keeps no rest
        except BrokenPipeError:
            answers[name] = Answer("", "its program has ended")
            return
        said = program.stdout.readline()
        answers[name] = Answer(said, "", asked_s, time.monotonic())


def _start_here(name: str, **popen: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen(WORDS, **popen)


@contextmanager
def panel_of(
    addresses: Mapping[str, str],
    settings: dict[str, Any] | None = None,
    start: Start = _start_here,
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
        interview = cast("Any", PipedInterview(programs))
        yield HostSet(interview, addresses, settings or {})
