"""``benchmarks/elastic.py`` with few faults ends well, and its records are whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "elastic.py"


@pytest.mark.parametrize("kind", ["kill", pytest.param("plan", marks=pytest.mark.long)])
def test_a_fault_of_each_kind(kind: str, tmp_path: Path) -> None:
    records = tmp_path / "records"
    words = ["--kinds", kind, "--engines", "shared_memory", "--faults", "1"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *words, "--json", records],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line)["values"] for line in records.read_text().splitlines()]
    for what in ["join", "leave"] if kind == "plan" else [kind]:
        [row] = [row for row in rows if row["what"] == what]
        assert row["survivors_s"] > 0
