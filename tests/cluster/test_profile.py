"""``ronde profile`` of a job on other hosts."""

import json
import os
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

pytestmark = pytest.mark.waits
PROGRAM = Path(__file__).parents[1] / "cli/sampled_rank.py"
ENV = {"PATH": os.defpath, "HOME": str(Path.home())}


def test_ranks_of_other_hosts_are_sampled_to_their_end(cluster, tmp_path):
    path = tmp_path / "profile.json"
    words = [sys.executable, "-m", "ronde", "profile", "-o", str(path)]
    words += ["-H", "node2:1,node3:1", "--ssh-args", f"-F {cluster.ssh_config}"]
    done = cluster.run(
        cluster.hosts[0], [*words, str(PROGRAM)], env=ENV, timeout_s=HANG_S
    )
    assert done.returncode == 0, done.stderr
    profile = json.loads(path.read_text())
    assert [row["host"] for row in profile["status"]["workers"]] == ["node2", "node3"]
    found = {window["worker"]: window for window in profile["windows"]}
    assert sorted(found) == [0, 1]
    for window in found.values():
        assert window["problem"] == ""
        functions = [frame["function"] for frame in window["frames"]]
        assert "spin" in functions
