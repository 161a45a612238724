"""What ``ronde bench`` itself writes, by the readers of everybody's results."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from tests.bench.log_writing import load_schema

from ronde.bench import Row, Run, Side, compare, read_log


def bench(folder: Path, *words: str) -> tuple[Run, Run, Run]:
    """Run a benchmark of two ranks; return what text, JSON and record have of it."""
    files = ["-J", "out.json", "--json", "out.jsonl"]
    ended = subprocess.run(
        [sys.executable, "-m", "ronde", "bench", *words, *files],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("#  Rank ") == 2
    (folder / "out.txt").write_text(ended.stdout)
    runs = []
    for name in ("out.txt", "out.json", "out.jsonl"):
        (run,) = read_log((folder / name).read_text(), name).runs
        runs.append(run)
    return runs[0], runs[1], runs[2]


def exact(run: Run) -> list[tuple[Row, list[float | None]]]:
    """Return rows and wrong elements, without the figures that the text rounds."""
    return [
        (
            replace(row, out_of_place=None, in_place=None),
            [side.num_wrong for side in row.sides()],
        )
        for row in run.rows
    ]


def times(run: Run) -> list[float]:
    halves: list[Side | None] = [row.in_place for row in run.rows]
    return [half.time_us or 0.0 for half in halves if half is not None]


SMALL = ("-t", "2", "-b", "256", "-e", "64K", "-f", "16", "-n", "2", "-w", "1")


@pytest.mark.parametrize(
    "words",
    [
        ("all_reduce", *["-S", "1", "-I", "1", "-d", "half", "-M", "1"]),
        ("reduce", "-r", "-1", "-c", "0", "--no-limit"),
        pytest.param(("hypercube", "--no-limit"), marks=pytest.mark.long),
    ],
    ids=lambda words: words[0],
)
def test_text_json_and_record_say_the_same(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    text, whole, record = bench(tmp_path, *words, *SMALL)
    content = json.loads((tmp_path / "out.json").read_text())
    jsonschema.Draft202012Validator(load_schema()).validate(content)
    assert content["args"][-1] == "out.jsonl"
    assert content["ronde"]["call_overhead_us"] > 0
    if "-M" in words:
        printed = (tmp_path / "out.txt").read_text()
        assert "# Host memory usage    : User-Allocated" in printed
    assert record.facts["hosts"] == [2]
    assert (record.facts["fit"] is None) == ("no_fit" in record.facts)
    for run in (text, whole, record):
        assert run.test == words[0]
        assert run.ranks.value == 2
        assert run.is_complete
        assert (run.warnings, run.failures) == ((), ())
        assert exact(run) == exact(text)
        assert times(run) == pytest.approx(times(text), abs=0.06, rel=1e-3)
        assert run.engine == record.engine
    mean = compare([text], [record]).mean_ratio()
    assert mean is None or mean == pytest.approx(1, abs=0.3)
