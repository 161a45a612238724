"""``benchmarks/compare_commits.py`` measures every path on both trees."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "compare_commits.py"


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_every_path_is_timed_on_both_trees():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(ROOT), "--quick"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *table, result = done.stdout.splitlines()
    medians = json.loads(result)["median_us"]
    assert medians["old"].keys() == medians["new"].keys()
    paths = ["all_reduce 4 B", "all_gather 16 KiB", "named 160 x 16 KiB"]
    paths += ["training step", "start of two /bin/true", "import ronde.torch"]
    assert set(paths) < medians["old"].keys()
    assert all(us > 0 for each in medians.values() for us in each.values())
    assert len(table) == 1 + len(medians["old"])
