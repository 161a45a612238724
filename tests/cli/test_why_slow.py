"""``ronde why --slow`` on planted faults: the slow ranks, and the reasons."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.test_ps import running
from tests.cli.test_why import flat
from tests.limits import until

from ronde.launch import watch
from ronde.monitor import explain_slow, observe_job
from ronde.render import draw_slow

pytestmark = pytest.mark.waits

PROGRAM = Path(__file__).with_name("slow_rank.py")


def line_of(comment):
    lines = PROGRAM.read_text().splitlines()
    (found,) = [n for n, text in enumerate(lines, 1) if text.endswith(f"# {comment}")]
    return f"{PROGRAM.name}:{found}"


def observe(socket, kinds, words=""):
    """Return texts of verdicts by kind and ranks, until all kinds have been found.

    One of the texts must contain the words.
    """
    found = {}

    def is_found():
        seen = observe_job(next(watch(socket)))
        faults = explain_slow(seen)
        text = draw_slow(seen.view, faults)
        found.update({(fault.kind, fault.ranks): flat(fault.text) for fault in faults})
        return kinds <= found.keys() and words in text

    until(is_found, lambda: found)
    return found


@contextmanager
def busy():
    """Keep the first core busy."""
    program = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    words = [sys.executable, "-c", f"{program}while True: pass"]
    with subprocess.Popen(words) as process:
        try:
            yield
        finally:
            process.kill()


def test_slow_ranks_are_named_with_their_reasons(ronde, tmp_path):
    (tmp_path / "phase").write_text("several")
    words = ("-n", "4", "--", sys.executable, str(PROGRAM), str(tmp_path))
    with running(ronde, *words) as (_, socket):
        kinds = {("tokens", (0,)), ("input", (1,)), ("gc", (3,))}
        found = observe(socket, kinds)
        assert "It has 1.8 times as many tokens per step." in found["tokens", (0,)]
        assert "for its DataLoader" in found["input", (1,)]
        assert "gc.freeze()" in found["gc", (3,)]

        (tmp_path / "phase").write_text("code")
        text = observe(socket, {("compute", (2,))}, line_of("slow"))["compute", (2,)]
        assert text.startswith("On the other ranks ")

        (tmp_path / "phase").write_text("cpu")
        with busy():
            text = observe(socket, {("cpu", (3,))})["cpu", (3,)]
        assert "other processes use its cores and it has nice 5." in text
