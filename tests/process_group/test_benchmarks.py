"""Benchmarks of calls and steps run, and print every row."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
RUN = (sys.executable, "-m", "ronde", "run", "-n", "2", "--no-prefix", "--")


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (("process_group.py", "--only", "calls"), ["all_reduce 4 B", "new_group"]),
        (("named_tensors.py",), ["4 B", "160 x 16 KiB", "160 copied", "64 MiB"]),
        (("pipeline_idle.py",), ["GPipe", "1F1B", "Interleaved1F1B"]),
    ],
)
def test_prints_its_rows(words: tuple[str, ...], rows: list[str]) -> None:
    script = str(FOLDER / words[0])
    done = subprocess.run(
        [*RUN, sys.executable, script, "--rounds", "2", *words[1:]],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for row in rows:  # its name, then its first figure
        assert re.search(rf"^ *{row} +\d", done.stdout, re.MULTILINE), row
