"""Output that cannot be written: a full disk, or nobody who reads."""

import subprocess
from pathlib import Path

import pytest
from tests.cli.conftest import Ronde
from tests.limits import HANG_S

FULL = Path("/dev/full")
"""The kernel's file that is always full."""

WORDS = [["--help"], ["check", "--json", "--only", "host-answers"]]

ronde = Ronde()


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_full_disk_is_told_in_a_sentence(words):
    with FULL.open("wb") as full, ronde.start(*words, stdout=full) as process:
        _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == 74
    assert said == (
        b"ronde: output cannot be written: No space left on device. "
        b"Make room, or write elsewhere.\n"
    )


def test_a_full_disk_ends_a_job():
    words = ("run", "-n", "2", "yes")
    with FULL.open("wb") as full, ronde.start(*words, stdout=full) as process:
        _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == 74
    assert (
        b"ronde: standard output cannot be written (disk full), so the job was" in said
    )


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_closed_pipe_ends_quietly(words):
    with ronde.start(*words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, said = process.communicate(timeout=HANG_S)
    assert (process.returncode, said) == (141, b"")
