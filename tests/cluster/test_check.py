"""``ronde check`` on three hosts: each fault is found where it is, and nothing else."""

import contextlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.cluster.faults import (
    HALF_A_CPU,
    altered,
    done_on,
    find_cpu_groups,
    grouped,
    in_shell,
    limited,
    replaced,
)
from tests.cluster.machines import ROOT
from tests.cluster.training import assert_nothing_left
from tests.timed import ronde

pytestmark = pytest.mark.alone

LIMIT_S = 240.0
"""Of one run; each rank that measures a pair imports torch."""
NAMES = "node1,node2,node3"


class Checked(NamedTuple):
    """The result of one run of the command."""

    found: frozenset[tuple[str, str]]  # failures and warnings: check and host
    said: dict[tuple[str, str], str]  # the messages of each, a line each
    fixes: dict[tuple[str, str], str]  # the last fix of each


ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(Path.home())}


def run_check(
    cluster,
    *words,
    config=None,
    cwd=ROOT,
    names=NAMES,
    skipped="torch-installed",
    connect_s=0.0,
):
    python = [sys.executable, "-m", "ronde"]
    python = ronde(connect_s=connect_s) if connect_s else python
    program = [*python, "check", "-H", names, "--json"]
    # To import torch takes seconds: only a test of that does it.
    program += ["--skip", skipped] if skipped else []
    ssh_args = ["--ssh-args", f"-F {config or cluster.ssh_config}"]
    done = cluster.run(
        cluster.hosts[0],
        [*program, *ssh_args, *words],
        cwd=cwd,
        env=ENVIRONMENT,
        timeout_s=LIMIT_S,
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    findings = [
        each for each in told["findings"] if each["severity"] in ("fail", "warn")
    ]
    is_ready = all(each["severity"] != "fail" for each in findings)
    assert done.returncode == (0 if is_ready else 2), done.stderr
    said: dict[tuple[str, str], str] = {}
    for each in findings:
        key, what = (each["check"], each["host"]), each["message"]
        said[key] = f"{said[key]}\n{what}" if key in said else what
    return Checked(
        frozenset(said),
        said,
        {(each["check"], each["host"]): each["fix"] for each in findings},
    )


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Path:
    """Return a folder that all hosts share, with one file."""
    folder = tmp_path_factory.mktemp("shared") / "disk"
    folder.mkdir()
    (folder / "train.bin").write_bytes(bytes(5000))
    return folder


@pytest.fixture(scope="module")
def usual(three_hosts, disk) -> Checked:
    """Return what is found where nothing is wrong but this machine itself."""
    return run_check(three_hosts, "--path", str(disk), "--file", f"{disk}/train.bin")


@pytest.fixture
def find(cluster, usual):
    """Return ``find(*words)``: what is found now that was not found without a fault."""

    def find(*words, **where):
        checked = run_check(cluster, *words, **where)
        return checked._replace(found=checked.found - usual.found)

    return find


def assert_found(checked, check, host, *more):
    """Assert that a host is found, by this check and no others than ``more``."""
    assert (check, host) in checked.found, checked.said
    allowed = {(name, host) for name in (check, *more)}
    assert checked.found <= allowed, checked.said


def test_with_nothing_wrong_all_hosts_are_ready(usual):
    assert not usual.found, usual.said


def test_nothing_of_it_stays(cluster, usual, disk):
    assert_nothing_left(cluster)
    assert [path.name for path in disk.iterdir()] == ["train.bin"]


def test_hosts_that_are_all_slow(cluster):
    """Their links' rate is the kernel's invention: it is shown what was measured."""
    words = ("--only", "link-rate,slow-host-link,slow-pair", "--bandwidth")
    with contextlib.ExitStack() as slowing:
        for host in cluster.hosts:
            slowing.enter_context(limited(cluster, host, "20mbit"))
        for names in (NAMES, "node1,node2"):
            checked = run_check(cluster, *words, names=names)
            assert checked.found == {("link-rate", n) for n in names.split(",")}
            said = checked.said["link-rate", "node1"]
            assert re.fullmatch(r"only 0\.00\d+ GB/s \(0\.0\d+ Gbit/s\)", said)
        meant = re.search("--expect .*", checked.fixes["link-rate", "node1"])[0]
        checked = run_check(cluster, *words[:2], *meant.split(), names="node1,node2")
    assert checked.found == frozenset(), checked.said


def test_a_link_with_a_tenth_of_the_others(cluster, find):
    with limited(cluster, cluster.hosts[1], "100mbit"):
        checked = find("--only", "network", "--bandwidth")
    assert_found(checked, "slow-host-link", "node2")


needs_cgroups = pytest.mark.skipif(
    find_cpu_groups() is None,
    reason="limits of CPU time need control groups with the controller cpu. Of version "
    "2: echo +cpu >/sys/fs/cgroup/cgroup.subtree_control",
)


def test_three_hosts_with_a_fault_each_or_two(cluster, find, disk, tmp_path):
    """All in one run: each is found where it is, and nothing else."""
    second, third = cluster.hosts[1:]
    small = ["mount", "-n", "-t", "tmpfs", "-o", "size=16m", "tmpfs", "/dev/shm"]  # noqa: S108
    # The soft limit only: to raise the other again takes more than root has everywhere.
    limit = "prlimit --memlock{} --pid $(cat /run/sshd.pid)"
    told = cluster.run(
        second, ["sh", "-c", limit.format(" --raw --noheadings --output SOFT")]
    )
    locking = (limit.format(f"={n}:") for n in (65536, told.stdout.strip()))
    # Not imported: that takes seconds.
    version = Path(importlib.util.find_spec("torch").origin).with_name("version.py")
    other = altered(version, tmp_path, "__version__ = '", "__version__ = '9.")
    right, wrong, own = (tmp_path / name for name in ("right.bin", "wrong.bin", "own"))
    right.write_bytes(bytes(2 << 20))
    wrong.write_bytes(bytes(1 << 20) + b"\1" + bytes((1 << 20) - 1))
    own.mkdir()
    with (
        renamed(third),
        replaced(cluster, second, version, other),
        replaced(cluster, second, disk, own),
        replaced(cluster, third, right, wrong),
        in_shell(cluster, second, *locking),
        done_on(cluster, third, small, ["umount", "-n", "-l", "/dev/shm"]),  # noqa: S108
    ):
        checked = find("--path", str(disk), "--file", str(right))
    assert checked.found == {
        ("host-name", "node3"),
        ("torch", "node2"),
        ("shared-folder", "node2"),
        ("dataset-files", "node3"),
        ("locked-memory", "node2"),
        ("shared-memory", "node3"),
    }, checked.said
    assert [path.name for path in disk.iterdir()] == ["train.bin"]
    assert list(own.iterdir()) == []


@contextlib.contextmanager
def renamed(host):
    """Let a host's own name be loopback."""
    names = host.folder / "hosts"
    text = names.read_text()
    names.write_text(f"127.0.1.1 {host.name}\n" + text.replace(f" {host.name}\n", "\n"))
    try:
        yield
    finally:
        names.write_text(text)


@needs_cgroups
def test_a_quota_of_cpu_time(cluster, find):
    with grouped(cluster, cluster.hosts[1], HALF_A_CPU):
        checked = find()
    assert_found(checked, "cpu-quota", "node2", "slow-host")


def test_another_ronde_and_a_probe_that_hangs(cluster, find, tmp_path):
    """A file that is a pipe into which nobody writes is read for ever."""
    package = ROOT / "src" / "ronde" / "__init__.py"
    other = altered(package, tmp_path, '__version__ = "', '__version__ = "9.')
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with (
        replaced(cluster, cluster.hosts[1], package, other),
        replaced(cluster, cluster.hosts[2], Path("/proc/meminfo"), pipe),
    ):
        checked = find()
    assert checked.found == {("host-answers", "node2"), ("probe-hung", "node3")}
    assert "its ronde is 9." in checked.said["host-answers", "node2"]
