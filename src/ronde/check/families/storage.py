"""Folders and files: there, with room, and the same on every host that shares them."""

from collections.abc import Iterator
from typing import Any

from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.facts import HostFacts
from ronde.check.families import storage_speed
from ronde.check.families.storage_sharing import judge_late, judge_shared
from ronde.check.fleet import Fleet, Odd
from ronde.check.probes.storage import SHARED, TEMPORARY
from ronde.units import format_size

LOW_SHARE = 0.05
"""Of a file system that is free: below, there may be too little."""

PLENTY_BYTES = 50 << 30
"""That much is room enough, however large the file system is."""

LOW_BYTES = 1 << 30
"""That little is too little, however small the file system is."""

FULL_BYTES = 16 << 20
"""With less, nothing can be written that is worth it."""

_ELSEWHERE = (
    "start in a folder that is there too, or give ronde check and ronde run the same "
    "--chdir DIR; where ronde run --sync DIR is to copy it there: --skip folder-missing"
)


def _folders(facts: HostFacts, role: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield folders of a host that answer, those of one role if it is given."""
    told: dict[str, dict[str, Any]] = facts.values["storage.paths"]
    for path, each in told.items():
        if (not role or role in each["roles"]) and not each.get("has_hung"):
            yield path, each


def _judge_there(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having("storage.paths"):
        for path, told in _folders(facts):
            wrong = told.get("error") or _refusal(told)
            if wrong and told["roles"] != [TEMPORARY]:
                what = f"{path}: {wrong}"
                fix = "" if SHARED in told["roles"] else _ELSEWHERE
                yield Finding(
                    "folder-missing", Severity.FAIL, facts.host, what, fix=fix
                )


def _refusal(told: dict[str, Any]) -> str:
    """Return why nothing can start in what is there; empty where it can."""
    if not told["is_directory"]:
        return "no folder"
    return "" if told["is_enterable"] else "may not be entered"


def _judge_temporary(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having("storage.paths"):
        for path, told in _folders(facts, TEMPORARY):
            wrong = told.get("error") or ("" if told["is_writable"] else "read-only")
            if wrong:
                what = f"{path}: {wrong}"
                yield Finding("temporary-folder", Severity.WARN, facts.host, what)


def _judge_kind(fleet: Fleet) -> Iterator[Finding]:
    shown: dict[str, list[HostFacts]] = {}
    for facts in fleet.having("storage.paths"):
        for path, told in _folders(facts, SHARED):
            if told.get("kind"):
                shown.setdefault(path, []).append(_one(facts, path, told["kind"]))
    for path, odd in _odd_by_name(shown):
        what = f"{path} is on {odd.value}"
        yield Finding("folder-kind", Severity.WARN, odd.host, what, odd.usual)


def _judge_hung(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having("storage.hung"):
        hung: list[str] = facts.values["storage.hung"]
        for path in hung:
            # What lies below hangs with it.
            if not any(path.startswith(f"{other}/") for other in hung):
                what = f"{path} does not answer"
                yield Finding("hung-mount", Severity.FAIL, facts.host, what)


def _each_room(facts: HostFacts) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield folders that can be written to, one of each file system."""
    seen: set[str] = set()
    for path, told in _folders(facts):
        if told.get("is_writable") and told["size_bytes"] > 0:
            mount = told["mount"] or path
            if mount not in seen:
                seen.add(mount)
                yield path, told


def _judge_space(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having("storage.paths"):
        for path, told in _each_room(facts):
            free, size = told["free_bytes"], told["size_bytes"]
            is_little = free < LOW_SHARE * size and free < PLENTY_BYTES
            if is_little or free < LOW_BYTES:
                severity = Severity.FAIL if free < FULL_BYTES else Severity.WARN
                what = f"{path} has {format_size(free)} free of {format_size(size)}"
                yield Finding("disk-space", severity, facts.host, what)


def _judge_inodes(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having("storage.paths"):
        for path, told in _each_room(facts):
            free, num = told["free_inodes"], told["num_inodes"]
            # File systems without such a limit say that they have none at all.
            if num > 0 and free < LOW_SHARE * num:
                severity = Severity.FAIL if free == 0 else Severity.WARN
                what = f"{path} has room for {free} more files, of {num}"
                yield Finding("free-inodes", severity, facts.host, what)


def _judge_files(fleet: Fleet) -> Iterator[Finding]:
    shown: dict[str, list[HostFacts]] = {}
    for facts in fleet.having("storage.files"):
        files: dict[str, dict[str, Any]] = facts.values["storage.files"]
        for path, told in files.items():
            if "digest" in told:
                content = f"{told['size_bytes']} bytes, sha256 {told['digest']}"
                shown.setdefault(path, []).append(_one(facts, path, content))
            elif not told.get("has_hung"):
                what = f"{path}: {told['error']}"
                yield Finding("dataset-files", Severity.FAIL, facts.host, what)
    for path, odd in _odd_by_name(shown):
        what = f"{path} has {odd.value}"
        yield Finding("dataset-files", Severity.FAIL, odd.host, what, odd.usual)


def _one(facts: HostFacts, name: str, value: str) -> HostFacts:
    return HostFacts(facts.host, {name: value}, {}, {})


def _odd_by_name(shown: dict[str, list[HostFacts]]) -> Iterator[tuple[str, Odd]]:
    """Yield by its name what is not the same on all hosts that have it."""
    for name, hosts in shown.items():
        for odd in Fleet(tuple(hosts), {}).odd_ones(name):
            yield name, odd


def _judge_leftovers(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having("storage.leftovers"):
        found = facts.values["storage.leftovers"]
        if found["num"] > 0:
            what = f"{found['num']} processes of an earlier job are left"
            fix = f"kill -9 {found['pids']}"
            yield Finding("leftovers", Severity.FAIL, facts.host, what, fix=fix)


CHECKS = (
    Check(
        id="folder-missing",
        family=Family.STORAGE,
        title="folders that ranks need are there",
        reads="on each host the folders given with --path, and the one that ranks "
        "start in: where ronde check is typed, or --chdir",
        threshold="each is a folder that can be entered",
        source="ronde's own: ronde run starts ranks there, and refuses a host without",
        severity=Severity.FAIL,
        fix="mount it there, or mkdir -p it where it need not be shared",
        needs="",
        why="Ranks there cannot start, or do not find their data and checkpoints.",
        facts=("storage.paths",),
        judge=_judge_there,
    ),
    Check(
        id="shared-folder",
        family=Family.STORAGE,
        title="a shared folder is the same one on all hosts",
        reads="files that each host leaves in the folders given with --path, and that "
        "all hosts look for; they are taken away again",
        threshold="each host sees those of all others within 3 s",
        source="ronde's own; what most hosts share, of three or more",
        severity=Severity.FAIL,
        fix="findmnt -T FOLDER on each host; mount the same file system there",
        needs="several hosts, --path, and leave to write there",
        why="A checkpoint is not found where a rank is started anew, or half of it is.",
        facts=("storage.shared",),
        judge=judge_shared,
    ),
    Check(
        id="shared-folder-late",
        family=Family.STORAGE,
        title="a shared folder shows soon what others write",
        reads="when each host sees the files that the others leave there",
        threshold="within 1 s",
        source="ronde's own; NFS clients may keep what they know of a folder for 30 s "
        "and more (acdirmin and acdirmax in nfs(5))",
        severity=Severity.WARN,
        fix="mount it with actimeo=1, or have ranks wait for each other by a barrier",
        needs="several hosts, --path, and leave to write there",
        why="A rank does not find the file that another has just written.",
        facts=("storage.shared", "storage.shared_s"),
        judge=judge_late,
    ),
    Check(
        id="folder-kind",
        family=Family.STORAGE,
        title="a shared folder is on the same kind of file system on all hosts",
        reads="/proc/self/mountinfo, for the folders given with --path",
        threshold="the same kind everywhere",
        source="ronde's own; what most hosts have, of three or more",
        severity=Severity.WARN,
        fix="findmnt -T FOLDER on each host; mount the same file system there",
        needs="several hosts and --path",
        why="Where a mount is missing, ranks write to the disk below its mount point.",
        facts=("storage.paths",),
        judge=_judge_kind,
    ),
    Check(
        id="dataset-files",
        family=Family.STORAGE,
        title="files are the same on all hosts",
        reads="size and hash of the files given with --file; of one above 1MiB, 16 "
        "pieces of 64KiB, spread evenly, are hashed",
        threshold="each is there, with the same size and hash everywhere",
        source="ronde's own; what most hosts have, of three or more",
        severity=Severity.FAIL,
        fix="copy it anew: rsync -a HOST:FILE FILE",
        needs="--file",
        why="Ranks train on different data, or take a different number of steps and "
        "wait for each other for ever.",
        facts=("storage.files",),
        judge=_judge_files,
    ),
    Check(
        id="hung-mount",
        family=Family.STORAGE,
        title="all file systems answer",
        reads="statfs of mounted network file systems, the folder that ranks start in, "
        "the one for temporary files and those given with --path and --file, each in a "
        "process of its own",
        threshold="an answer within 5 s",
        source="ronde's own; a quick answer takes milliseconds",
        severity=Severity.FAIL,
        fix="look at its file server; then umount -f -l MOUNT, and mount it anew",
        needs="",
        why="Whatever touches it hangs, and not even kill -9 ends that.",
        facts=("storage.hung",),
        judge=_judge_hung,
    ),
    Check(
        id="disk-space",
        family=Family.STORAGE,
        title="there is room on disk",
        reads="statfs of the folder that ranks start in, the one for temporary files "
        "and those given with --path, as far as they can be written to",
        threshold="5 % or 50GiB free, and at least 1GiB; below 16MiB nothing can start",
        source="5 %: Imbue's host health checks; the sizes are ronde's own",
        severity=Severity.FAIL,
        fix="make room there: du -xh FOLDER | sort -h | tail",
        needs="",
        why="Writing a checkpoint fails, after hours of training.",
        facts=("storage.paths",),
        judge=_judge_space,
    ),
    Check(
        id="free-inodes",
        family=Family.STORAGE,
        title="there is room for more files",
        reads="statfs of the same folders, where a file system limits their number",
        threshold="5 % of all free",
        source="ronde's own, as for room on disk",
        severity=Severity.FAIL,
        fix="remove small files there: du --inodes -x FOLDER | sort -n | tail",
        needs="",
        why="No file can be made, though there is room: No space left on device.",
        facts=("storage.paths",),
        judge=_judge_inodes,
    ),
    Check(
        id="temporary-folder",
        family=Family.STORAGE,
        title="temporary files can be written",
        reads="TMPDIR, else /tmp",
        threshold="it is there and can be written to",
        source="ronde's own: Python and torch need it",
        severity=Severity.WARN,
        fix="export TMPDIR=, to a folder that can be written to",
        needs="",
        why="Compiling and data loaders' workers fail, or use a folder that is slow.",
        facts=("storage.paths",),
        judge=_judge_temporary,
    ),
    Check(
        id="leftovers",
        family=Family.STORAGE,
        title="nothing of an earlier job is left",
        reads="this user's processes that ronde run started and whose agent is gone",
        threshold="none",
        source="ronde's own",
        severity=Severity.FAIL,
        fix="kill -9 them",
        needs="",
        why="They hold GPUs, memory and ports that the next job needs.",
        facts=("storage.leftovers",),
        judge=_judge_leftovers,
    ),
    *storage_speed.CHECKS,
)
