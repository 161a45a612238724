"""The benchmarks of the backend run, and print every row."""

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
        (("pipeline_idle.py",), ["GPipe", "1F1B", "Interleaved1F1B"]),
    ],
)
def test_prints_its_rows(words: tuple[str, ...], rows: list[str]) -> None:
    script = str(FOLDER / words[0])
    done = subprocess.run(
        [*RUN, sys.executable, script, "--rounds", "1", *words[1:]],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {line[:26].split("   ")[0].strip() for line in done.stdout.splitlines()}
    assert found >= set(rows)
