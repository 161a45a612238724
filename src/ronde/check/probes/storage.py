"""Folders and files of a host: whether they are there, have room, and answer at all."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ronde.check.facts import Reading, Value
from ronde.check.paths import Errand, run_errands
from ronde.launch.environments import own_environment
from ronde.launch.process_tree import read_processes

SHARED = "shared"
"""Role of a folder that the user says all hosts share."""

DIRECTORY = "directory"
"""Role of the folder in which ranks are to start."""

TEMPORARY = "temporary"
"""Role of the folder for temporary files."""

_HANG_S = 5.0
_MAX_NETWORK_MOUNTS = 16
_NETWORK = re.compile(
    r"nfs4?|cifs|smb3|lustre|gpfs|beegfs|ceph|glusterfs|wekafs|panfs|orangefs|afs|9p"
    r"|fuse\.(sshfs|s3fs|glusterfs|ceph.*|juicefs|gcsfuse|goofys|rclone|beegfs.*|dfuse)"
)


def read(reading: Reading) -> None:
    """Take down what folders and files are like, and what an earlier job has left."""
    settings = reading.settings
    root = str(settings.get("root", "/")).rstrip("/")
    mounts = read_mounts(root)
    roles = _find_roles(settings)
    files: Sequence[str] = settings.get("files", ())
    network = [point for point, kind in mounts.items() if _NETWORK.fullmatch(kind)]
    others = [point for point in network if point not in roles]
    looks = [*roles, *others[:_MAX_NETWORK_MOUNTS]]
    by_folder = _group(files)
    told = run_errands(
        [
            *([_errand("look", root, path)] for path in looks),
            *([_errand("sample", root, f) for f in each] for each in by_folder),
        ],
        _HANG_S,
    )
    looked = {path: one for path, [one] in zip(looks, told, strict=False)}
    sampled: dict[str, Any] = {
        file: one
        for names, ones in zip(by_folder, told[len(looks) :], strict=True)
        for file, one in zip(names, ones, strict=True)
    }
    all_told = {**looked, **sampled}
    reading.values["storage.hung"] = sorted(
        path for path, one in all_told.items() if one.get("has_hung")
    )
    reading.values["storage.files"] = {file: sampled[file] for file in files}
    reading.values["storage.paths"] = {
        path: {"roles": each} | _place(looked[path], root, mounts)
        for path, each in roles.items()
    }
    if not root:
        reading.keep("storage.leftovers", find_leftovers)


def _find_roles(settings: dict[str, Value]) -> dict[str, list[str]]:
    """Return what each folder is for."""
    roles: dict[str, list[str]] = {}
    for path in settings.get("paths", ()):
        roles[path] = [SHARED]
    if directory := settings.get("directory", ""):
        roles.setdefault(directory, []).append(DIRECTORY)
    temporary = own_environment().get("TMPDIR") or "/tmp"  # noqa: S108 - looked at only
    roles.setdefault(temporary, []).append(TEMPORARY)
    return roles


def _group(files: Iterable[str]) -> list[list[str]]:
    """Return files by the folder that they are in."""
    by_folder: dict[str, list[str]] = {}
    for file in files:
        by_folder.setdefault(file.rpartition("/")[0], []).append(file)
    return list(by_folder.values())


def _errand(do: str, root: str, path: str) -> Errand:
    return {"do": do, "path": f"{root}{path}"}


def _place(told: dict[str, Value], root: str, mounts: dict[str, str]) -> dict[str, Any]:
    """Add to what was told of a folder where it is mounted, and what file system."""
    if "real_path" not in told:
        return told
    path = told["real_path"].removeprefix(root)
    point = find_mount(path, mounts)
    kept = {name: value for name, value in told.items() if name != "real_path"}
    return {**kept, "mount": point, "kind": mounts.get(point, "")}


def find_mount(path: str, mounts: Iterable[str]) -> str:
    """Return the mount point that a path is below; empty where none is known."""
    above = [m for m in mounts if f"{path}/".startswith(f"{m.rstrip('/')}/")]
    return max(above, key=len, default="")


def read_mounts(root: str) -> dict[str, str]:
    """Return the kinds of the file systems that are mounted, by mount point.

    Args:
        root: Where ``proc`` is; empty for this machine.
    """
    mounts: dict[str, str] = {}
    try:
        table = Path(f"{root}/proc/self/mountinfo").read_text("utf-8", "replace")
    except OSError:
        return mounts
    for line in table.splitlines():
        place, _, system = line.partition(" - ")
        words, kinds = place.split(" "), system.split(" ")
        if len(words) > 4 and kinds[0]:
            # What is mounted later hides what was there.
            mounts[_unescape(words[4])] = kinds[0]
    return mounts


def _unescape(text: str) -> str:
    """Undo what the kernel does to blanks and the like."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def find_leftovers() -> dict[str, Value]:
    """Find this user's processes of jobs whose agent is gone.

    The processes of a job that runs are all below its agent; others are below nobody.
    """
    lost = [
        process.pid
        for process in read_processes().values()
        if process.parent == 1 and not process.is_zombie and _has_cookie(process.pid)
    ]
    return {"num": len(lost), "pids": " ".join(map(str, lost[:8]))}


def _has_cookie(pid: int) -> bool:
    try:
        return b"\0RONDE_COOKIE=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
