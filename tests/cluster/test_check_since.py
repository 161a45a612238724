"""``ronde check --since``: hosts to which nothing has happened."""

import json
import os
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

pytestmark = pytest.mark.waits

NAMES = "node1,node2,node3"


@pytest.fixture
def look(cluster, tmp_path):
    """Return ``look(*words)``: what one run of the command prints."""
    disk = tmp_path / "disk"
    disk.mkdir()
    environment = {"PATH": os.defpath, "HOME": str(Path.home())}

    def look(*words):
        command = [sys.executable, "-m", "ronde", "check", "-H", NAMES, "--json"]
        command += ["--ssh-args", f"-F {cluster.ssh_config}", "--path", str(disk)]
        done = cluster.run(
            cluster.hosts[0], [*command, *words], env=environment, timeout_s=HANG_S
        )
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    return look


def test_two_looks_one_after_the_other_differ_in_nothing(look, tmp_path):
    kept = tmp_path / "facts"
    measured = ("--burn", "10ms", "--bandwidth", "tcp")
    look(*measured, "--save", str(kept))
    changes = look(*measured, "--since", str(kept))["changes"]
    assert changes["facts"] == []
    assert (changes["new_hosts"], changes["gone_hosts"]) == ([], [])
