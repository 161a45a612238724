"""``ronde check --storage-speed`` on three hosts that share a folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cluster.digits import assert_nothing_left
from tests.cluster.faults import done_on, in_shell
from tests.cluster.holding import opening_held

pytestmark = pytest.mark.timeout(120)
LIMIT_S = 60.0
NAMES = ["node1", "node2", "node3"]
SPEEDS = {"mb_per_s", "files_per_s"}


@pytest.fixture
def disk(tmp_path) -> Path:
    """Return a folder that all hosts share, with one file."""
    folder = tmp_path / "disk"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    return folder


@pytest.fixture
def start(cluster, disk):
    """Return what starts it on the first host, for the folder and what else is said."""

    def start():
        environment = {"PATH": os.defpath, "HOME": str(Path.home())}
        words = [sys.executable, "-m", "ronde", "check", "-H", ",".join(NAMES)]
        words += ["--ssh-args", f"-F {cluster.ssh_config}", "--json"]
        words += ["--only", "storage", "--path", str(disk), "--storage-speed"]
        return cluster.start(
            cluster.hosts[0],
            words,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start


def finish(process):
    """Return by host what is known of the folders' speeds, and why it is not."""
    said, complaint = process.communicate(timeout=LIMIT_S)
    assert said, complaint
    told = json.loads(said)
    known = {
        host["host"]: host["values"].get("storage.speed", {}) for host in told["hosts"]
    }
    unread = {
        each["host"]: each["reason"]
        for each in told["unread"]
        if each["check"] == "storage-speed"
    }
    return known, unread


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def wait_for(is_done: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_done():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_all_hosts_measure_it_and_nothing_stays(cluster, start, disk):
    seen: set[str] = set()
    most_at_once = 0
    with start() as process:
        while process.poll() is None:
            # Those of ``sharing`` are files, all at once.
            now = {each.name for each in disk.glob(".ronde-check-*") if each.is_dir()}
            seen |= now
            most_at_once = max(most_at_once, len(now))
            time.sleep(0.001)
        known, unread = finish(process)
    assert list(known) == NAMES
    assert all(set(each[str(disk)]) == SPEEDS for each in known.values())
    assert unread == {}
    assert most_at_once == 1
    assert len(seen) >= len(NAMES)
    assert names_in(disk) == ["mine"]
    assert_nothing_left(cluster)


def test_a_folder_that_one_host_may_only_read(cluster, start, disk):
    mount = f"mount -n --bind {disk} {disk}; mount -n -o remount,bind,ro {disk}"
    undo = f"umount -n -l {disk}"
    with in_shell(cluster, cluster.hosts[1], mount, undo), start() as process:
        known, unread = finish(process)
    assert unread == {"node2": f"{disk}: Read-only file system"}
    assert [name for name, each in known.items() if each] == ["node1", "node3"]
    assert names_in(disk) == ["mine"]


def test_a_disk_that_it_would_fill(cluster, start, disk):
    small = ["mount", "-n", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)]
    undo = ["umount", "-n", "-l", str(disk)]
    with done_on(cluster, cluster.hosts[1], small, undo), start() as process:
        known, unread = finish(process)
    assert unread == {"node2": f"{disk}: it has 32MiB free, and 323MiB are wanted"}
    assert [name for name, each in known.items() if each] == ["node1", "node3"]


def test_ctrl_c(cluster, start, disk):
    with start() as process:
        wait_for(lambda: any(each.is_dir() for each in disk.iterdir()))
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 128 + signal.SIGINT
    assert names_in(disk) == ["mine"]
    assert_nothing_left(cluster)


def test_a_host_that_is_lost_while_it_writes(cluster, start, disk):
    """The others, who share the folder, take away what it cannot any more."""
    host = cluster.hosts[1]
    with opening_held(host, disk, "0") as wait_until_held, start() as process:
        wait_until_held(process)
        (left,) = disk.glob(".ronde-check-*.1")
        assert names_in(left) == ["0", "data"]
        cluster.crash(host)
        known, unread = finish(process)
    assert list(unread) == ["node2"]
    assert [name for name, each in known.items() if each] == ["node1", "node3"]
    assert names_in(disk) == ["mine"]
