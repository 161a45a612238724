"""``ronde check`` on three hosts: faults whose finding measures no speed."""

import contextlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
from tests.cluster.faults import done_on, firewall, narrowed, replaced
from tests.cluster.test_check import (
    ENVIRONMENT,
    NAMES,
    assert_found,
    run_check,
)
from tests.cluster.training import assert_nothing_left
from tests.limits import HANG_S

pytestmark = pytest.mark.waits

needs_nft = pytest.mark.skipif(
    shutil.which("nft", path="/usr/sbin:/sbin") is None,
    reason="firewalls need nft. Debian: apt-get install nftables",
)


@needs_nft
def test_a_firewall_before_a_host(cluster):
    closed = "tcp dport != 22 tcp flags & (syn | ack) == syn"
    with firewall(cluster, cluster.hosts[1], closed):
        checked = run_check(cluster, "--only", "network")
    assert_found(checked, "reachable", "node2")
    said = checked.said["reachable", "node2"]
    assert "node1, node3 cannot connect to it; the other way it works" in said
    assert "no answer; datagrams arrive" in said


@needs_nft
def test_large_packets_to_a_host_are_lost(cluster):
    # Those of ssh are not: without it nothing could be asked.
    with firewall(cluster, cluster.hosts[2], "ip length > 1400 th dport != 22"):
        checked = run_check(cluster, "--only", "network")
    assert_found(checked, "path-mtu", "node3")
    assert checked.said["path-mtu", "node3"] == (
        "from node1, node2: no packets above 1400 bytes arrive, its MTU is 1500"
    )


def paste(cluster, host, fix, **env):
    """Type a fix on a host, all of it."""
    done = cluster.run(host, ["sh", "-ec", fix], env=ENVIRONMENT | env)
    assert done.returncode == 0, (fix, done.stdout, done.stderr)


def test_a_black_hole_on_the_only_way_to_a_host(cluster):
    """What is larger than the way takes is lost without a word, in either direction."""
    near, far = cluster.hosts[:2]
    # Else the kernel hands on whole messages, and only the wire would cut them.
    whole, cut = (
        ["ip", "link", "set", "eth0", "gso_max_segs", n] for n in ("65535", "1")
    )
    with contextlib.ExitStack() as undoing:
        for host in (near, far):
            undoing.enter_context(done_on(cluster, host, cut, whole))
        undoing.enter_context(narrowed(cluster, far, 1400))
        only = {"names": "node1,node2", "connect_s": 5.0}
        checked = run_check(cluster, "--only", "network", **only)
        assert checked.found == {("host-answers", "node2")}
        said = checked.said["host-answers", "node2"]
        assert said.endswith(
            "packets above 1400 bytes to it are lost, and the MTU of eth0 is 1500"
        )
        usual = ["ip", "link", "set", "eth0", "mtu", "1500"]
        undoing.callback(cluster.run, near, usual)
        paste(cluster, near, checked.fixes["host-answers", "node2"])
        checked = run_check(cluster, "--only", "network", names="node1,node2")
        assert checked.found == {("mtu", "node1"), ("mtu", "node2")}
        undoing.callback(cluster.run, far, usual)
        paste(cluster, far, checked.fixes["mtu", "node2"])
        checked = run_check(cluster, "--only", "network", names="node1,node2")
        assert checked.found == frozenset(), checked.said


def test_ctrl_c_while_a_pair_reduces_ends_its_ranks(cluster):
    words = [sys.executable, "-m", "ronde", "check", "-H", NAMES]
    program = cluster.start(
        cluster.hosts[0],
        [*words, "--ssh-args", f"-F {cluster.ssh_config}", "--bandwidth", "gloo"],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with program:
        due_s = time.monotonic() + HANG_S
        while not ranks_of_pairs(cluster):
            assert program.poll() is None
            assert time.monotonic() < due_s
            time.sleep(0.05)
        program.send_signal(signal.SIGINT)
        assert program.wait(HANG_S) == 130
    assert_nothing_left(cluster)


def ranks_of_pairs(cluster):
    """Return the processes of jobs that the check itself has started."""
    mark = b"RONDE_JOB_ID=check-"
    everyone = (p for host in cluster.hosts for p in cluster.processes(host))
    return [process for process in everyone if mark in process.environment]


def test_folders_that_one_host_lacks(cluster, tmp_path):
    """``ronde run`` refuses the one that lacks the folder to start in."""
    disk = tmp_path / "shared" / "disk"
    job, empty = tmp_path / "tree" / "job", tmp_path / "empty"
    for folder in (disk, job):
        folder.mkdir(parents=True)
    empty.mkdir()
    only = ("--only", "storage")
    with (
        replaced(cluster, cluster.hosts[1], job.parent, empty),
        replaced(cluster, cluster.hosts[2], disk.parent, empty),
    ):
        checked = run_check(cluster, *only, "--path", str(disk), cwd=job)
        elsewhere = run_check(cluster, *only, "--chdir", str(tmp_path), cwd=job)
        words = [sys.executable, "-m", "ronde", "run", "-H", NAMES, "true"]
        words[4:4] = ["--ssh-args", f"-F {cluster.ssh_config}"]
        ran = cluster.run(cluster.hosts[0], words, cwd=job, env=ENVIRONMENT)
    assert checked.said == {
        ("folder-missing", "node2"): f"{job}: No such file or directory",
        ("folder-missing", "node3"): f"{disk}: No such file or directory",
    }
    assert elsewhere.found == frozenset(), elsewhere.said
    assert ran.returncode == 64
    assert "node2: cannot enter --chdir" in ran.stderr
