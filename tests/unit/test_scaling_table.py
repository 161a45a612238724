import subprocess
import sys
from pathlib import Path

from tests.limits import HANG_S

from ronde.records import Record, append_record

TABLE = Path(__file__).parents[2] / "scripts" / "scaling_table.py"


def training(
    size: int, images_per_s: float, *, is_communicating: bool = True
) -> Record:
    values = {
        "size": size,
        "is_communicating": is_communicating,
        "images_per_s": images_per_s,
        "test_accuracy": 0.987,
    }
    return Record("training", values)


def run(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TABLE), str(path)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, check=False
    )


def test_the_best_of_each_run_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    for record in (
        training(1, 900),
        training(2, 1600),
        training(2, 1000, is_communicating=False),
        training(1, 1000),
        training(2, 1500),
        training(2, 2000, is_communicating=False),
        Record("other", {}),
    ):
        append_record(path, record)
    lines = [line.split() for line in run(path).stdout.strip().splitlines()]
    assert lines[1] == ["1", "rank", "1000", "1.00", "100%", "98.7%"]
    assert lines[2] == ["2", "ranks", "1600", "1.60", "80%", "80%", "98.7%"]
    assert lines[3][-4:] == ["2000", "2.00", "100%", "98.7%"]
