"""``ronde check`` on three hosts: each fault is found where it is, and nothing else."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.cluster.faults import (
    A_TENTH,
    HALF_A_CPU,
    altered,
    done_on,
    find_cpu_groups,
    firewall,
    grouped,
    in_shell,
    limited,
    replaced,
)
from tests.cluster.machines import ROOT
from tests.cluster.training import assert_nothing_left

from ronde.check import REACH

pytestmark = pytest.mark.alone

LIMIT_S = 240.0
"""Of one run; each rank that measures a pair imports torch."""
NAMES = "node1,node2,node3"


class Checked(NamedTuple):
    """What one run of the command came to.

    Attributes:
        found: Failures and warnings: the check's id and the host.
        said: What each of these says; a line each where one says several things.
        values: What is known of each host, in the order of their numbers.
        took_s: How long it ran.
    """

    found: frozenset[tuple[str, str]]
    said: dict[tuple[str, str], str]
    values: tuple[dict[str, Any], ...]
    took_s: float


ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(Path.home())}


def run_check(cluster, *words, config=None, cwd=ROOT):
    program = [sys.executable, "-m", "ronde", "check", "-H", NAMES, "--json"]
    ssh_args = ["--ssh-args", f"-F {config or cluster.ssh_config}"]
    begun_s = time.monotonic()
    done = cluster.run(
        cluster.hosts[0],
        [*program, *ssh_args, *words],
        cwd=cwd,
        env=ENVIRONMENT,
        timeout_s=LIMIT_S,
    )
    took_s = time.monotonic() - begun_s
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    findings = [
        each for each in told["findings"] if each["severity"] in ("fail", "warn")
    ]
    is_ready = all(each["severity"] != "fail" for each in findings)
    assert done.returncode == (0 if is_ready else 2), done.stderr
    said: dict[tuple[str, str], str] = {}
    for each in findings:
        key, what = (each["check"], each["host"]), each["what"]
        said[key] = f"{said[key]}\n{what}" if key in said else what
    return Checked(
        frozenset(said),
        said,
        tuple(each["values"] for each in told["hosts"]),
        took_s,
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


needs_nft = pytest.mark.skipif(
    shutil.which("nft", path="/usr/sbin:/sbin") is None,
    reason="firewalls need nft. Debian: apt-get install nftables",
)


def test_with_nothing_wrong_all_hosts_are_ready(usual):
    assert not usual.found, usual.said
    # It is to take 5 s at most, and takes 1.5 s on two cores that do nothing else. They
    # may have more to do here: what is bounded is how long it waits for nothing.
    assert usual.took_s < 20, usual.took_s


def test_packets_of_full_size_pass_between_all_hosts(usual):
    reached = [(host, told) for v in usual.values for host, told in v[REACH].items()]
    assert sorted(host for host, _ in reached) == sorted(2 * NAMES.split(","))
    for _, told in reached:
        assert (told["own_mtu"], told["mtu"]) == (1500, 1500)


def test_nothing_of_it_stays(cluster, usual, disk):
    assert_nothing_left(cluster)
    assert [path.name for path in disk.iterdir()] == ["train.bin"]


def test_a_host_name_that_is_loopback(cluster, find):
    host = cluster.hosts[1]
    names = host.folder / "hosts"
    text = names.read_text()
    names.write_text(f"127.0.1.1 {host.name}\n" + text.replace(f" {host.name}\n", "\n"))
    try:
        checked = find()
    finally:
        names.write_text(text)
    assert_found(checked, "host-name", "node2")


def test_a_smaller_mtu(cluster, find):
    set_mtu = ["ip", "link", "set", "eth0", "mtu"]
    with done_on(cluster, cluster.hosts[1], [*set_mtu, "1400"], [*set_mtu, "1500"]):
        checked = find()
    assert_found(checked, "mtu", "node2")
    assert checked.said["mtu", "node2"] == "MTU 1400"


@needs_nft
def test_a_firewall_before_a_host(cluster, find):
    closed = "tcp dport != 22 tcp flags & (syn | ack) == syn"
    with firewall(cluster, cluster.hosts[1], closed):
        checked = find()
    assert_found(checked, "reachable", "node2")
    said = checked.said["reachable", "node2"]
    assert "node1, node3 cannot connect to it; the other way it works" in said
    assert "no answer; datagrams arrive" in said


@needs_nft
def test_what_one_host_sends_to_one_other_is_lost(cluster, find):
    """It is told once, of the one that sends; of the other way, that packets arrive."""
    with firewall(cluster, cluster.hosts[1], f"ip saddr {cluster.hosts[2].address}"):
        checked = find()
    assert_found(checked, "reachable", "node3")
    said = checked.said["reachable", "node3"]
    assert "cannot connect to node2; the other way packets arrive" in said


@needs_nft
def test_large_packets_to_a_host_are_lost(cluster, find):
    # Those of ssh are not: without it nothing could be asked.
    with firewall(cluster, cluster.hosts[2], "ip length > 1400 th dport != 22"):
        checked = find()
    assert_found(checked, "path-mtu", "node3")
    assert checked.said["path-mtu", "node3"] == (
        "from node1, node2: no packets above 1400 bytes arrive, its MTU is 1500"
    )


def test_a_link_with_a_tenth_of_the_others(cluster, find):
    with limited(cluster, cluster.hosts[1], "100mbit"):
        checked = find("--bandwidth")
    assert_found(checked, "slow-host-link", "node2")


@pytest.mark.soak
def test_a_slow_link_slows_a_collective(cluster, find):
    """The tournament again, by real jobs of two hosts each."""
    with limited(cluster, cluster.hosts[1], "300mbit"):
        checked = find("--bandwidth", "gloo")
    assert ("slow-host-link", "node2") in checked.found, checked.said
    assert_found(checked, "slow-host-link", "node2")


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
        due_s = time.monotonic() + LIMIT_S
        while not ranks_of_pairs(cluster):
            assert program.poll() is None
            assert time.monotonic() < due_s
            time.sleep(0.05)
        program.send_signal(signal.SIGINT)
        assert program.wait(LIMIT_S) == 130
    assert_nothing_left(cluster)


def ranks_of_pairs(cluster):
    """Return the processes of jobs that the check itself has started."""
    mark = b"RONDE_JOB_ID=check-"
    everyone = (p for host in cluster.hosts for p in cluster.processes(host))
    return [process for process in everyone if mark in process.environment]


def test_little_memory_may_be_locked(cluster, find):
    # The soft limit only: to raise the other again takes more than root has everywhere.
    change = "prlimit --memlock={}: --pid $(cat /run/sshd.pid)"
    tell = (
        "prlimit --memlock --raw --noheadings --output SOFT --pid $(cat /run/sshd.pid)"
    )
    told = cluster.run(cluster.hosts[1], ["sh", "-c", tell])
    before = told.stdout.strip()
    with in_shell(
        cluster, cluster.hosts[1], change.format(65536), change.format(before)
    ):
        checked = find()
    assert_found(checked, "locked-memory", "node2")


def test_a_tiny_shared_memory(cluster, find):
    small = ["mount", "-n", "-t", "tmpfs", "-o", "size=16m", "tmpfs", "/dev/shm"]  # noqa: S108
    undo = ["umount", "-n", "-l", "/dev/shm"]  # noqa: S108
    with done_on(cluster, cluster.hosts[1], small, undo):
        checked = find()
    assert_found(checked, "shared-memory", "node2")


needs_cgroups = pytest.mark.skipif(
    find_cpu_groups() is None,
    reason="limits of CPU time need control groups with the controller cpu. Of version "
    "2: echo +cpu >/sys/fs/cgroup/cgroup.subtree_control",
)


@needs_cgroups
def test_a_quota_of_cpu_time(cluster, find):
    with grouped(cluster, cluster.hosts[1], HALF_A_CPU):
        checked = find()
    assert_found(checked, "cpu-quota", "node2", "slow-host")


def test_another_ronde(cluster, find, tmp_path):
    package = ROOT / "src" / "ronde" / "__init__.py"
    other = altered(package, tmp_path, '__version__ = "', '__version__ = "9.')
    with replaced(cluster, cluster.hosts[1], package, other):
        checked = find()
    assert_found(checked, "taking-part", "node2")
    assert "its ronde is 9." in checked.said["taking-part", "node2"]


def test_another_torch(cluster, find, tmp_path):
    # Not imported: that takes seconds.
    package = Path(sys.prefix, "lib", f"python3.{sys.version_info[1]}", "site-packages")
    version = package / "torch" / "version.py"
    other = altered(version, tmp_path, "__version__ = '", "__version__ = '9.")
    with replaced(cluster, cluster.hosts[1], version, other):
        checked = find()
    assert_found(checked, "torch", "node2")


def test_a_missing_shared_folder(cluster, find, disk, tmp_path):
    with replaced(cluster, cluster.hosts[1], disk.parent, tmp_path):
        checked = find("--path", str(disk))
    assert_found(checked, "folder-missing", "node2")


def test_a_folder_to_start_in_that_one_host_lacks(cluster, find, tmp_path):
    """``ronde run`` refuses that host, and not one whose folder is named."""
    job, empty = tmp_path / "tree" / "job", tmp_path / "empty"
    job.mkdir(parents=True)
    empty.mkdir()
    with replaced(cluster, cluster.hosts[1], job.parent, empty):
        checked = find(cwd=job)
        elsewhere = find("--chdir", str(tmp_path), cwd=job)
        words = [sys.executable, "-m", "ronde", "run", "-H", NAMES, "true"]
        ssh_args = ["--ssh-args", f"-F {cluster.ssh_config}"]
        words[4:4] = ssh_args
        ran = cluster.run(cluster.hosts[0], words, cwd=job, env=ENVIRONMENT)
    assert_found(checked, "folder-missing", "node2")
    said = checked.said["folder-missing", "node2"]
    assert said == f"{job}: No such file or directory"
    assert elsewhere.found == frozenset(), elsewhere.said
    assert ran.returncode == 64
    assert "node2: --chdir must be" in ran.stderr


def test_a_folder_that_one_host_has_for_itself(cluster, find, disk, tmp_path):
    with replaced(cluster, cluster.hosts[1], disk, tmp_path):
        checked = find("--path", str(disk))
    assert_found(checked, "shared-folder", "node2")
    assert [path.name for path in disk.iterdir()] == ["train.bin"]
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_dataset_file(cluster, find, disk, tmp_path):
    right, wrong = disk / "train.bin", tmp_path / "train.bin"
    wrong.write_bytes(right.read_bytes()[:-1] + b"\1")
    with replaced(cluster, cluster.hosts[1], right, wrong):
        checked = find("--file", str(right))
    assert_found(checked, "dataset-files", "node2")


# Limits a control group and wants its processor for itself, both once the probes have
# ended: their deadlines are no part of this fault.
RIVAL = """
import contextlib, json, pathlib, sys, time

def are_probes_there():
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"ronde.check.probing" in path.read_bytes():
                return True
    return False

print("watching", flush=True)
while not are_probes_there():
    time.sleep(0.02)
while are_probes_there():
    time.sleep(0.02)
for name, value in json.loads(sys.argv[2]).items():
    path = pathlib.Path(sys.argv[1], name)
    if path.exists():
        path.write_text(value)
while True:
    pass
"""


@needs_cgroups
def test_a_slow_host(cluster, find, tmp_path):
    """Somebody else wants the only processor on which a host may run, and is preferred.

    However much else runs here, the other hosts have a right to ten times as much.
    """
    host, last = cluster.hosts[1], max(os.sched_getaffinity(0))
    every = ",".join(map(str, os.sched_getaffinity(0)))
    pin = "taskset -p -c {} $(cat /run/sshd.pid)"
    program = tmp_path / "rival.py"
    program.write_text(RIVAL)
    words = ["taskset", "-c", str(last), sys.executable, str(program)]
    with (
        in_shell(cluster, host, pin.format(last), pin.format(every)),
        grouped(cluster, host, {}) as group,
        cluster.start(
            host,
            [*words, str(group), json.dumps(A_TENTH)],
            start_new_session=True,
            stdout=subprocess.PIPE,
        ) as rival,
    ):
        try:
            # It watches before there is anything to see.
            assert rival.stdout.readline() == b"watching\n"
            checked = find()
        finally:
            rival.kill()
    assert ("slow-host", "node2") in checked.found, checked.said
    # Its streams may be slow as well, but nobody else's.
    assert {each[1] for each in checked.found} == {"node2"}, checked.said


def test_a_host_that_is_gone(cluster, find):
    cluster.cut(cluster.hosts[1])
    # It has two addresses, and one is enough to wait for.
    checked = find("--ssh-args", "-4 -o ConnectTimeout=3")
    assert_found(checked, "taking-part", "node2")


def test_a_key_that_is_refused(cluster, find, tmp_path):
    key = tmp_path / "key"
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
    subprocess.run(words, check=True, timeout=LIMIT_S)
    text = cluster.ssh_config.read_text()
    config = tmp_path / "config"
    own = text.replace("Host *", "Host node2").replace(
        f"{cluster.folder}/user_key", str(key)
    )
    config.write_text(own + text.replace("Host *", "Host * !node2"))
    checked = find(config=config)
    assert_found(checked, "taking-part", "node2")
    assert "key refused" in checked.said["taking-part", "node2"]


def test_a_probe_that_hangs(cluster, find, tmp_path):
    """A file that is a pipe into which nobody writes is read for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with replaced(cluster, cluster.hosts[1], Path("/proc/meminfo"), pipe):
        checked = find()
    assert_found(checked, "probe-hung", "node2")
