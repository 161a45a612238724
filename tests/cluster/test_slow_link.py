"""Two namespaces joined by a slow line: ranks meet over it, and nothing stays."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

pytestmark = pytest.mark.alone

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "slow_link.py"

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
    reason="network namespaces need root and iproute2",
)


def start(*words):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def namespaces_of(pid):
    command = ("ip", "netns", "list")
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    return [line for line in listed.stdout.split() if f"-{pid}-" in line]


def finish(script):
    """Return what it printed; skip where not even root may make namespaces."""
    out, errors = script.communicate(timeout=HANG_S)
    if "ip netns add" in errors:
        pytest.skip(errors)
    return out, errors


@pytest.mark.soak
@needs_root
def test_all_engines_sum_over_a_slow_line(tmp_path):
    """The script itself checks every engine's sums at every size."""
    path = tmp_path / "records.jsonl"
    script = start("--sizes", "1000", "300000", "--rounds", "1", "--json", str(path))
    out, errors = finish(script)
    assert script.returncode == 0, errors
    assert errors == ""
    records = [json.loads(line)["values"] for line in path.read_text().splitlines()]
    assert [record["ranks_per_side"] for record in records] == [1, 2]
    assert [round(record["bound_gb_per_s"], 4) for record in records] == [0.125, 0.1875]
    engines = [{row["engine"] for row in record["rows"]} for record in records]
    assert engines == [{"gloo", "ring"}, {"gloo", "ring", "hierarchical"}]
    for record in records:
        # A line that lets more through than it may would be no line.
        assert all(row["share_of_line"] < 1.5 for row in record["rows"])
    assert out.count("%line") == 2 * 2 + 2 * 3
    assert namespaces_of(script.pid) == []
