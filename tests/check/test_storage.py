"""Folders and files: read from a tree of files, and judged among hosts."""

import os
from contextlib import ExitStack
from typing import Any

import pytest
from tests.check.fleets import of_family
from tests.check.programs import run_step, start_hosts

from ronde.check import (
    PROBES,
    WHOLE_BYTES,
    Family,
    Fleet,
    HostFacts,
    NodeContext,
    Severity,
    digest_files,
    read_mounts,
    run_probes,
)

GIB = 1 << 30
NO_CONTEXT = NodeContext({}, ExitStack())

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:5 / /proc rw,nosuid shared:2 - proc proc rw
30 22 0:40 / /data rw,relatime - ext4 /dev/sdb1 rw
31 22 0:41 / /data rw,relatime shared:9 - nfs4 server:/export rw,vers=4.2
32 22 0:42 / /my\\040own rw - fuse.sshfs me@host:/ rw
33 22 0:43 / /dead rw - nfs server:/gone rw
a line that is cut
34 22 0:44 / /half rw
"""


@pytest.fixture
def tree(tmp_path):
    """Return a root in which /data is there and /dead is not."""
    for name in ("proc/self", "data/sub", "job", "scratch"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS)
    (tmp_path / "data/train.bin").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    return tmp_path


def read(**settings):
    outcome = run_probes({"storage": PROBES["storage"]}, settings)["storage"]
    assert outcome.failure == ""
    assert outcome.unreadable == {}
    return outcome.values


def test_a_tree_is_read(tree, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/scratch")
    values = read(
        root=str(tree), directory="/job", paths=["/data", "/link/sub", "/none"]
    )
    paths = values["storage.paths"]
    assert list(paths) == ["/data", "/link/sub", "/none", "/job", "/scratch"]
    assert [each["roles"] for each in paths.values()] == [
        *[["shared"]] * 3,
        ["directory"],
        ["temporary"],
    ]
    # The last mount hides earlier ones; links are followed.
    for path in ("/data", "/link/sub"):
        assert (paths[path]["mount"], paths[path]["kind"]) == ("/data", "nfs4")
    assert (paths["/job"]["mount"], paths["/job"]["kind"]) == ("/", "ext4")
    room = os.statvfs(tree)
    assert paths["/job"]["size_bytes"] == room.f_blocks * room.f_frsize
    assert paths["/none"]["error"] == "No such file or directory"
    assert values["storage.hung"] == []


def sparse(path, size, last=b""):
    """Make a file with holes and these bytes in the middle."""
    with path.open("wb") as file:
        file.seek(size // 2)
        file.write(last)
        file.truncate(size)
    return str(path)


def test_files_are_read_and_a_hanging_one_leaves_the_others(tree, monkeypatch):
    # Opening a pipe without a writer waits for ever, as on a dead mount.
    os.mkfifo(tree / "job/pipe")
    data, most = tree / "data", WHOLE_BYTES
    # A change in the middle, which pieces of 64KiB would miss.
    alike = [sparse(data / f"middle{n}", 40 << 20, bytes([n])) for n in range(2)]
    paths = [str(data / "train.bin"), str(data / "none.bin"), str(data / "sub"), *alike]
    large = sparse(data / "large", most + 1)
    with start_hosts({"a": ""}, {"files": [*paths, large]}) as hosts:
        run_step("files", hosts)
    files = hosts.facts["a"].values["storage.files"]
    # echo -n abc | sha256sum
    whole = {"size_bytes": 3, "digest": "ba7816bf8f01cfea", "read_bytes": 3}
    assert [files[path] for path in paths[:3]] == [
        whole,
        {"error": "No such file or directory"},
        {"error": "Is a directory"},
    ]
    assert files[alike[0]]["digest"] != files[alike[1]]["digest"]
    assert files[large]["read_bytes"] == 64 << 20
    monkeypatch.setattr("ronde.check.storage._HANG_S", 0.5)
    pipe = str(tree / "job/pipe")
    answer = digest_files(NO_CONTEXT, {"paths": [pipe, paths[0]]})
    assert answer[pipe]["has_hung"]
    assert answer[paths[0]] == whole


def test_mounts_are_read(tree):
    assert read_mounts(str(tree)) == {
        "/": "ext4",
        "/proc": "proc",
        "/data": "nfs4",
        "/my own": "fuse.sshfs",
        "/dead": "nfs",
    }
    assert read_mounts("/nowhere") == {}


def folder(roles, **changes):
    """Return the facts of a folder with much free space."""
    return {
        "roles": roles,
        "is_directory": True,
        "is_enterable": True,
        "is_writable": True,
        "free_bytes": 100 * GIB,
        "size_bytes": 200 * GIB,
        "free_inodes": 500,
        "num_inodes": 1000,
        "mount": "/",
        "kind": "ext4",
    } | changes


def missing(roles):
    return {"roles": roles, "error": "No such file or directory"}


def file(digest, size_bytes=3, read_bytes=0):
    num_read = read_bytes or size_bytes
    return {"size_bytes": size_bytes, "digest": digest, "read_bytes": num_read}


def facts(**changes):
    healthy: dict[str, Any] = {
        "paths": {
            "/data": folder(["shared"], mount="/data", kind="nfs4"),
            "/job": folder(["directory"]),
            "/scratch": folder(["temporary"]),
        },
        "files": {"/data/a": file("ba78")},
        "hung": [],
    }
    return {f"storage.{name}": value for name, value in (healthy | changes).items()}


def fleet(*each):
    hosts = (HostFacts(f"node{n}", values, {}, {}) for n, values in enumerate(each, 1))
    return Fleet(tuple(hosts), {})


CHECKS = of_family(Family.STORAGE)


def found(of):
    findings = (finding for check in CHECKS for finding in check.find(of))
    return [each for each in findings if each.severity is not Severity.INFORM]


def one_folder(**changes):
    return fleet(facts(paths={"/job": folder(["directory"], **changes)}))


def test_healthy_hosts_give_no_findings():
    for size in (1, 2, 3):
        assert found(fleet(*(facts() for _ in range(size)))) == []


NO_FILES = folder(["temporary"], is_writable=False)


@pytest.mark.parametrize(
    ("path", "seen", "severity", "message", "fix"),
    [
        ("/job", missing(["directory"]), Severity.FAIL, "No such file", "start in a f"),
        ("/data", folder(["shared"], is_directory=False), Severity.FAIL, "not a folder",
         "ls -l /data  # it is a file: name a folder"),
        ("/data", folder(["shared"], is_enterable=False), Severity.FAIL,
         "no permission to enter it", "mkdir -p /data"),
        ("/t", missing(["temporary"]), Severity.WARN, "No such", "export TMPDIR=/var/"),
        ("/t", NO_FILES, Severity.WARN, "read-only", "export TMPDIR=/var/tmp"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_used_is_found(path, seen, severity, message, fix):
    (finding,) = found(fleet(facts(paths={path: seen})))
    assert (finding.check, finding.severity) == ("folder-missing", severity)
    assert finding.message.startswith(f"{path}: {message}")
    assert finding.fix.startswith(fix)


@pytest.mark.parametrize(
    ("free_gib", "size_gib", "severity"),
    [
        (10, 200, None),  # 5 % exactly
        (9.9, 200, Severity.WARN),
        (51, 10_000, None),  # little of much is enough
        (0.9, 4, Severity.WARN),
        (0.01, 4, Severity.FAIL),  # 10.24 MiB
    ],
)
def test_free_space_is_checked(free_gib, size_gib, severity):
    findings = found(
        one_folder(free_bytes=int(free_gib * GIB), size_bytes=int(size_gib * GIB))
    )
    expected = [] if severity is None else [("disk-space", severity)]
    assert [(f.check, f.severity) for f in findings] == expected


def test_a_full_file_system_is_reported_once():
    little = {"free_bytes": 0}
    paths = {
        "/data": folder(["shared"], mount="/data", **little),
        "/job": folder(["directory"], **little),
        "/scratch": folder(["temporary"], **little),
    }
    findings = found(fleet(facts(paths=paths)))
    assert [f.message.split()[0] for f in findings] == ["/data", "/job"]


def test_a_read_only_file_system_may_be_full():
    # A read-only image is always full.
    assert found(one_folder(free_bytes=0, is_writable=False)) == []
    assert found(one_folder(free_bytes=0, size_bytes=0)) == []


@pytest.mark.parametrize(
    ("free", "num", "severity"),
    [
        (50, 1000, None),
        (49, 1000, Severity.WARN),
        (0, 1000, Severity.FAIL),
        (0, 0, None),  # btrfs has no limit
    ],
)
def test_free_inodes_are_checked(free, num, severity):
    findings = found(one_folder(free_inodes=free, num_inodes=num))
    expected = [] if severity is None else [("disk-space", severity)]
    assert [(f.check, f.severity) for f in findings] == expected


def test_a_mount_that_hangs_is_one_finding():
    lost = {"error": "no answer within 5 s", "has_hung": True}
    hung = facts(
        hung=["/data", "/data/a"],
        paths={"/data": {"roles": ["shared"], **lost}},
        files={"/data/a": lost},
    )
    findings = found(fleet(facts(), hung, facts()))
    assert [(f.check, f.host, f.message) for f in findings] == [
        ("hung-mount", "node2", "/data does not answer")
    ]
    assert "umount -f -l /data  #" in findings[0].fix


def test_a_wrong_file_is_found_on_the_host_that_has_it():
    wrong = facts(files={"/data/a": file("0000")})
    (finding,) = found(fleet(facts(), wrong, facts()))
    assert (finding.check, finding.host) == ("dataset-files", "node2")
    assert finding.severity is Severity.FAIL
    assert finding.message == "/data/a has 3 bytes, sha256 0000, read whole"
    assert finding.usual == "3 bytes, sha256 ba78, read whole on 2 hosts"
    assert finding.fix == "rsync -ac node1:/data/a /data/a"


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        ("No such file or directory", "ls -l /data  # no host could read it"),
        ("Is a directory", "ls /data/a  # it is a folder: name a file"),
    ],
)
def test_a_file_that_no_host_has(error, fix):
    gone = facts(files={"/data/a": {"error": error}})
    assert found(fleet(gone, gone))[0].fix.startswith(fix)


def test_equal_files_show_the_bytes_read():
    large = facts(files={"/data/a": file("ba78", 40 * GIB, 64 << 20)})
    (first, second) = (f for c in CHECKS for f in c.find(fleet(large, large)))
    assert first.message == (
        "/data/a has 42949672960 bytes, sha256 ba78, read 64MiB of 40GiB"
    )
    assert (first.severity, first.fix) == (Severity.INFORM, "")
    assert first.message == second.message
