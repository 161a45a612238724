"""Waits sleep at once beside programs that want the cores."""

import os
import subprocess
import sys

from ronde.collectives import Contention

NUM_POLLS = 7


def test_more_programs_than_cores_are_seen() -> None:
    num_programs = (os.cpu_count() or 1) + 2
    programs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(num_programs)
    ]
    try:
        # They take a moment to start.
        while Contention().num_polls(NUM_POLLS) != 0:
            pass
    finally:
        for program in programs:
            program.kill()
            program.wait()


def test_the_jobs_own_ranks_are_expected() -> None:
    contention = Contention()
    contention.expect(1_000_000)
    assert contention.num_polls(NUM_POLLS) == NUM_POLLS
