"""Folders and files of a host: there, with room, the same everywhere, answering."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ronde.check.check import (
    FAIL,
    WARN,
    Family,
    Problem,
    Problems,
    check,
    each_host,
)
from ronde.check.facts import FactReader, Fleet, Value, Values, find_odd
from ronde.check.path_tasks import run_tasks
from ronde.launch.environments import own_environment
from ronde.launch.process_tree import read_processes
from ronde.units import format_size

# Roles of folders: shared by all hosts, where ranks start, for temporary files.
_SHARED, _DIRECTORY, _TEMPORARY = "shared", "directory", "temporary"
# Of a file system that is free: below, there may be too little,
_LOW_SHARE = 0.05
# but the one is room enough, and the other too little, whatever its size.
_PLENTY_BYTES, _LOW_BYTES = 50 << 30, 1 << 30
# With less, nothing can be written that is worth it.
_FULL_BYTES = 16 << 20
_PATHS, _FILES, _HUNG = "storage.paths", "storage.files", "storage.hung"
_LEFTOVERS = "storage.leftovers"
_HANG_S = 5.0
_MAX_NETWORK_MOUNTS = 16
_NETWORK = re.compile(
    r"nfs4?|cifs|smb3|lustre|gpfs|beegfs|ceph|glusterfs|wekafs|panfs|orangefs|afs|9p"
    r"|fuse\.(sshfs|s3fs|glusterfs|ceph.*|juicefs|gcsfuse|goofys|rclone|beegfs.*|dfuse)"
)
_ELSEWHERE = (
    "start in a folder that is there too, or give ronde check and ronde run the same "
    "--chdir DIR; where ronde run --sync DIR is to copy it there: --skip folder-missing"
)


def read(reader: FactReader) -> None:
    settings, root = reader.settings, reader.root
    mounts = read_mounts(root)
    roles: dict[str, list[str]] = {p: [_SHARED] for p in settings.get("paths", ())}
    if directory := settings.get("directory", ""):
        roles.setdefault(directory, []).append(_DIRECTORY)
    temporary = own_environment().get("TMPDIR") or "/tmp"  # noqa: S108 - looked at only
    roles.setdefault(temporary, []).append(_TEMPORARY)
    files: Sequence[str] = settings.get("files", ())
    network = [point for point, kind in mounts.items() if _NETWORK.fullmatch(kind)]
    others = [point for point in network if point not in roles]
    looks = [*roles, *others[:_MAX_NETWORK_MOUNTS]]
    by_folder: dict[str, list[str]] = {}
    for file in files:
        by_folder.setdefault(file.rpartition("/")[0], []).append(file)
    groups = [
        *([("look", path)] for path in looks),
        *([("sample", file) for file in each] for each in by_folder.values()),
    ]
    outcomes = run_tasks(
        [[{"do": do, "path": f"{root}{path}"} for do, path in g] for g in groups],
        _HANG_S,
    )
    found: dict[tuple[str, str], Any] = {
        task: outcome
        for group, own in zip(groups, outcomes, strict=True)
        for task, outcome in zip(group, own, strict=True)
    }
    reader.values[_HUNG] = sorted(
        {path for (_, path), each in found.items() if each.get("has_hung")}
    )
    reader.values[_FILES] = {file: found["sample", file] for file in files}
    reader.values[_PATHS] = {
        path: {"roles": each} | _locate(found["look", path], root, mounts)
        for path, each in roles.items()
    }
    if not root:
        reader.keep(_LEFTOVERS, find_leftovers)


def _locate(
    found: dict[str, Value], root: str, mounts: dict[str, str]
) -> dict[str, Any]:
    """Add where a folder is mounted, and what kind of file system that is."""
    if "real_path" not in found:
        return found
    point = find_mount(found["real_path"].removeprefix(root), mounts)
    kept = {name: value for name, value in found.items() if name != "real_path"}
    return {**kept, "mount": point, "kind": mounts.get(point, "")}


def find_mount(path: str, mounts: Iterable[str]) -> str:
    above = [m for m in mounts if f"{path}/".startswith(f"{m.rstrip('/')}/")]
    return max(above, key=len, default="")


def read_mounts(root: str) -> dict[str, str]:
    mounts: dict[str, str] = {}
    try:
        table = Path(f"{root}/proc/self/mountinfo").read_text("utf-8", "replace")
    except OSError:
        return mounts
    for line in table.splitlines():
        place, _, system = line.partition(" - ")
        words, kinds = place.split(" "), system.split(" ")
        if len(words) > 4 and kinds[0]:
            # What is mounted later hides what was there; the kernel escapes blanks.
            point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), words[4])
            mounts[point] = kinds[0]
    return mounts


def find_leftovers() -> dict[str, Value]:
    """Find this user's processes of jobs whose agent is gone.

    The processes of a job that runs are all below its agent; others are below nobody.
    """
    lost = [
        process.pid
        for process in read_processes().values()
        if process.parent == 1 and not process.is_zombie and _has_marker(process.pid)
    ]
    return {"num": len(lost), "pids": " ".join(map(str, lost[:8]))}


def _has_marker(pid: int) -> bool:
    try:
        return b"\0RONDE_COOKIE=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _answering(values: Values) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path, each in values[_PATHS].items():
        if not each.get("has_hung"):
            yield path, each


@each_host(Family.STORAGE, FAIL, _PATHS)
def folder_missing(values: Values, _: Fleet) -> Problems:
    """Folders that ranks need are there.

    reads: on each host the folders given with --path, the one that ranks start in:
        where ronde check is typed, or --chdir; and TMPDIR, else /tmp
    threshold: each is a folder that can be entered; a warning where temporary files
        cannot be written
    source: ronde's own: ronde run starts ranks there, and refuses a host without;
        Python and torch need temporary files
    fix: mount it there, or mkdir -p it where it need not be shared
    why: Ranks there cannot start, or do not find their data and checkpoints.
    """
    for path, each in _answering(values):
        wrong = each.get("error", "")
        if not wrong and not each["is_directory"]:
            wrong = "no folder"
        elif not wrong and not each["is_enterable"]:
            wrong = "may not be entered"
        if wrong and each["roles"] != [_TEMPORARY]:
            fix = "" if _SHARED in each["roles"] else _ELSEWHERE
            yield Problem(f"{path}: {wrong}", fix=fix)
        elif _TEMPORARY in each["roles"] and (wrong or not each["is_writable"]):
            fix = "export TMPDIR=, to a folder that can be written to"
            yield Problem(f"{path}: {wrong or 'read-only'}", WARN, fix=fix)


@check(Family.STORAGE, FAIL, _FILES)
def dataset_files(fleet: Fleet) -> Problems:
    """Files are the same on all hosts.

    reads: size and hash of the files given with --file; of one above 1MiB, 16 pieces of
        64KiB, spread evenly, are hashed
    threshold: each is there, with the same size and hash everywhere
    source: ronde's own; what most hosts have, of three or more
    fix: copy it again: rsync -a HOST:FILE FILE
    needs: --file
    why: Ranks train on different data, or take a different number of steps and wait for
        each other forever.
    """
    shown: dict[str, dict[str, str]] = {}
    for host, files in fleet.known(_FILES).items():
        for path, each in files.items():
            if "digest" in each:
                content = f"{each['size_bytes']} bytes, sha256 {each['digest']}"
                shown.setdefault(path, {})[host] = content
            elif not each.get("has_hung"):
                yield Problem(f"{path}: {each['error']}", host=host)
    for path, contents in shown.items():
        for host, value, usual in find_odd(contents):
            yield Problem(f"{path} has {value}", usual=usual, host=host)


@each_host(Family.STORAGE, FAIL, _HUNG)
def hung_mount(values: Values, _: Fleet) -> Problems:
    """All file systems answer.

    reads: statfs of mounted network file systems, the folder that ranks start in, the
        one for temporary files and those given with --path and --file, each in a
        process of its own
    threshold: an answer within 5 s
    source: ronde's own; a quick answer takes milliseconds
    fix: look at its file server; then umount -f -l MOUNT, and mount it again
    why: Every process that touches it hangs, and even kill -9 does not end it.
    """
    hung: list[str] = values[_HUNG]
    for path in hung:
        # What lies below hangs with it.
        if not any(path.startswith(f"{other}/") for other in hung):
            yield Problem(f"{path} does not answer")


@each_host(Family.STORAGE, FAIL, _PATHS)
def disk_space(values: Values, _: Fleet) -> Problems:
    """There is room on disk, for bytes and for files.

    reads: statfs of the folder that ranks start in, the one for temporary files and
        those given with --path, as far as they can be written to
    threshold: 5 % or 50GiB free, and at least 1GiB; below 16MiB nothing can start. 5 %
        of the files that a file system allows
    source: 5 %: Imbue's host health checks; the sizes are ronde's own
    fix: make room there: du -xh FOLDER | sort -h | tail; du --inodes -x FOLDER
    why: Writing a checkpoint fails, after hours of training.
    """
    seen: set[str] = set()
    for path, each in _answering(values):
        mount = each.get("mount") or path
        if not each.get("is_writable") or each["size_bytes"] == 0 or mount in seen:
            continue
        seen.add(mount)
        free, size = each["free_bytes"], each["size_bytes"]
        is_little = free < _LOW_SHARE * size and free < _PLENTY_BYTES
        if is_little or free < _LOW_BYTES:
            what = f"{path} has {format_size(free)} free of {format_size(size)}"
            yield Problem(what, FAIL if free < _FULL_BYTES else WARN)
        free, num = each["free_inodes"], each["num_inodes"]
        # File systems without such a limit have none at all.
        if num > 0 and free < _LOW_SHARE * num:
            what = f"{path} has room for {free} more files, of {num}"
            yield Problem(what, FAIL if free == 0 else WARN)


@each_host(Family.STORAGE, FAIL, _LEFTOVERS)
def leftovers(values: Values, _: Fleet) -> Problems:
    """Nothing of an earlier job is left.

    reads: this user's processes that ronde run started and whose agent is gone
    threshold: none
    source: ronde's own
    fix: kill -9 them
    why: They hold GPUs, memory and ports that the next job needs.
    """
    found = values[_LEFTOVERS]
    if found["num"] > 0:
        what = f"{found['num']} processes of an earlier job are left"
        yield Problem(what, fix=f"kill -9 {found['pids']}")
