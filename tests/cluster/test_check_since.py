"""``ronde check --since``: hosts to which nothing has happened."""

import json
import os
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

pytestmark = pytest.mark.waits


@pytest.mark.parametrize(
    ("names", "words"),
    [
        # Each import of torch takes seconds: one host does it, and nothing else.
        ("node1,node2", ["--bandwidth", "tcp", "--skip", "torch-installed"]),
        ("node1", ["--burn", "10ms", "--only", "product-checksum"]),
    ],
    ids=["all facts", "burn"],
)
def test_two_looks_one_after_the_other_differ_in_nothing(
    cluster, tmp_path, names, words
):
    kept = tmp_path / "facts"
    command = [sys.executable, "-m", "ronde", "check", "-H", names, "--json", *words]
    command += ["--ssh-args", f"-F {cluster.ssh_config}", "--path", str(tmp_path)]
    environment = {"PATH": os.defpath, "HOME": str(Path.home())}

    def look(*more):
        done = cluster.run(
            cluster.hosts[0], [*command, *more], env=environment, timeout_s=HANG_S
        )
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    first = look("--save", str(kept))
    assert all(host["values"] for host in first["hosts"])
    changes = look("--since", str(kept))["changes"]
    assert changes["facts"] == []
    assert (changes["new_hosts"], changes["gone_hosts"]) == ([], [])
