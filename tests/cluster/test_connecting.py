"""Agents that are brought to hosts while ranks run: nothing there stops the others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.connecting import CONNECT_S
from tests.cluster.training import assert_nothing_left
from tests.limits import HANG_S

pytestmark = pytest.mark.waits

LATE = f"within {CONNECT_S:g} s"
OFTEN = 10
"""So often a rank is heard while a host is waited for: by a loop that waits for that
host alone, not once."""


@pytest.fixture
def connect(cluster):
    """Return ``connect(*hosts)``: why each has no agent, and who has one at the end.

    Of a host whose time is up the reason has come when all others had an agent.
    """

    def connect(*hosts, around=()):
        words = [sys.executable, "-m", "tests.cluster.connecting"]
        done = cluster.run(
            cluster.hosts[0],
            [*around, *words, str(cluster.ssh_config), "node1", *hosts],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(Path.home())},
            timeout_s=HANG_S,
        )
        assert done.returncode == 0, done.stderr
        *results, names = map(json.loads, done.stdout.splitlines())
        for name, reason, num_heard in results:
            if LATE in reason:
                assert [name, reason, num_heard] == results[-1]
                assert num_heard >= OFTEN
        return {name: reason for name, reason, _ in results}, names

    return connect


def log_in_to(cluster, host, folder, script):
    """Have a host run a script whatever is asked of its sshd."""
    path = folder / f"{host.name}-login"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    cluster.kill_sshd(host)
    cluster.start_sshd(host, "-o", f"ForceCommand={path}")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exec sleep 1000", f"no answer from it {LATE}"),
        ("while sleep 0.05; do echo on >&2; done", f"no agent began {LATE}"),
    ],
)
def test_a_host_without_an_agent_blocks_no_other(
    cluster, connect, tmp_path, script, why
):
    host = cluster.hosts[1]
    log_in_to(cluster, host, tmp_path, script)
    results, names = connect("node2", "node3")
    cluster.kill_sshd(host)
    assert results["node3"] == ""
    assert why in results["node2"]
    assert names == ["node1", "node3"]
    cluster.crash(host)
    cluster.boot(host)
    assert_nothing_left(cluster)


def test_an_agent_that_breaks_the_protocol_is_lost_alone(cluster, connect, tmp_path):
    host = cluster.hosts[1]
    # The hello's sentinel is its own, read backwards, and no frame follows.
    script = (
        "read -r line; line=${line##*bootstrap(\\'}; "
        'echo "$(echo "${line%%\\\'*}" | rev)[]"; exec sleep 1000'
    )
    log_in_to(cluster, host, tmp_path, script)
    results, names = connect("node2", "node3")
    cluster.kill_sshd(host)
    assert results["node3"] == ""
    assert "no agent began" in results["node2"]
    assert names == ["node1", "node3"]
    cluster.crash(host)
    cluster.boot(host)
    assert_nothing_left(cluster)


def test_a_silent_name_server_blocks_no_other_host(cluster, connect, tmp_path):
    resolv = tmp_path / "resolv.conf"
    resolv.write_text("nameserver 127.0.0.1\n")
    script = 'mount --bind "$1" /etc/resolv.conf; shift; exec "$@"'
    around = ["unshare", "--mount", "sh", "-ec", script, "sh", str(resolv)]
    serving = [sys.executable, str(Path(__file__).with_name("answering.py")), "never"]
    with cluster.start(cluster.hosts[0], serving, stdout=subprocess.PIPE) as server:
        assert server.stdout.readline() == b"up\n"
        results, names = connect("absent", "node2", around=around)
        server.kill()
    assert list(results) == ["node2", "absent"]
    assert results["node2"] == ""
    assert results["absent"]
    assert names == ["node1", "node2"]
    assert_nothing_left(cluster)
