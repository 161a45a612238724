"""Checks of directories, files and mounts."""

import re
import secrets
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ronde.check.check import FAIL, INFORM, WARN, Problem, Problems, check, each_host
from ronde.check.fleet import Fleet, Value, Values
from ronde.check.hosts import HostSet, NodeContext, ProbeStep, Reply
from ronde.check.majority import find_odd
from ronde.check.path_tasks import run_tasks
from ronde.check.probing import MOST_WAIT_S, FactReader
from ronde.launch.environments import own_environment
from ronde.units import format_size

# Roles of folders: shared (--path), the ranks' working directory, temporary files.
_SHARED, _DIRECTORY, _TEMPORARY = "shared", "directory", "temporary"
_LOW_SHARE = 0.05
_PLENTY_BYTES, _LOW_BYTES, _FULL_BYTES = 50 << 30, 1 << 30, 16 << 20
_PATHS, _FILES, _HUNG = "storage.paths", "storage.files", "storage.hung"
# Fact: True if a file is seen here, by its path and the other host that wrote it.
SHARED = "storage.shared"
_HANG_S, _CLEAR_S, _SLACK_S = 5.0, 10.0, 5.0
_PATIENCE_S = 3.0  # for a file of another host to appear
_MAX_NETWORK_MOUNTS = 16
_NETWORK = re.compile(
    r"nfs4?|cifs|smb3|lustre|gpfs|beegfs|ceph|glusterfs|wekafs|panfs|orangefs|afs|9p"
    r"|fuse\.(sshfs|s3fs|glusterfs|ceph.*|juicefs|gcsfuse|goofys|rclone|beegfs.*|dfuse)"
)
_ELSEWHERE = (
    "start in a folder that exists there too, or give ronde check and ronde run the "
    "same --chdir DIR; if it will be copied there before the job: --skip folder-missing"
)


def read(reader: FactReader) -> None:
    settings, root = reader.settings, reader.root
    mounts = read_mounts(root)
    roles: dict[str, list[str]] = {p: [_SHARED] for p in settings.get("paths", ())}
    if directory := settings.get("directory", ""):
        roles.setdefault(directory, []).append(_DIRECTORY)
    temporary = own_environment().get("TMPDIR") or "/tmp"  # noqa: S108 - read only
    roles.setdefault(temporary, []).append(_TEMPORARY)
    network = [point for point, kind in mounts.items() if _NETWORK.fullmatch(kind)]
    others = [point for point in network if point not in roles]
    paths = [*roles, *others[:_MAX_NETWORK_MOUNTS]]
    tasks = [[{"do": "inspect", "path": f"{root}{path}"}] for path in paths]
    outcomes = (outcome for [outcome] in run_tasks(tasks, _HANG_S))
    found = dict(zip(paths, outcomes, strict=True))
    hung = [path for path, each in found.items() if "has_hung" in each]
    above = {path: find_mount(path, mounts) for path in hung}
    # Name the mount point of a network file system, since it can be unmounted.
    named = {
        m if _NETWORK.fullmatch(mounts.get(m, "")) else p for p, m in above.items()
    }
    reader.values[_HUNG] = sorted(named)
    reader.values[_PATHS] = {
        path: {"roles": each} | _locate(found[path], root, mounts)
        for path, each in roles.items()
    }


def _locate(
    found: dict[str, Value], root: str, mounts: dict[str, str]
) -> dict[str, Any]:
    """Replace ``real_path`` by its mount point and the type of the file system."""
    if "real_path" not in found:
        return found
    point = find_mount(found.pop("real_path").removeprefix(root), mounts)
    return {**found, "mount": point, "kind": mounts.get(point, "")}


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
        words, _, kinds = (part.split(" ") for part in line.partition(" - "))
        if len(words) > 4 and kinds[0]:
            # A later mount hides an earlier one. The kernel escapes blanks.
            point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), words[4])
            mounts[point] = kinds[0]
    return mounts


def _answering(values: Values) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path, each in values[_PATHS].items():
        if not each.get("has_hung"):
            yield path, each


@each_host(FAIL, _PATHS)
def folder_missing(values: Values, _: Fleet) -> Problems:
    """Folders that ranks need exist.

    reads: the folders of --path; the folder where ranks start (the current one, or
        --chdir); TMPDIR, else /tmp
    threshold: each can be entered; only a warning if temporary files cannot be written
    source: ronde's choice: ronde run refuses such a host; Python needs temporary files
    fix: mount it there, or, if it need not be shared, mkdir -p
    why: Ranks there cannot start, or do not find their data and checkpoints.
    """
    for path, each in _answering(values):
        wrong = each.get("error", "")
        if not wrong and not each["is_directory"]:
            wrong = "not a folder"
        elif not wrong and not each["is_enterable"]:
            wrong = "no permission to enter it"
        if wrong and each["roles"] != [_TEMPORARY]:
            fix = f"mkdir -p {shlex.quote(path)}  # if it may be empty; else mount it"
            if wrong == "not a folder":
                fix = f"ls -l {shlex.quote(path)}  # it is a file: name a folder"
            fix = fix if _SHARED in each["roles"] else _ELSEWHERE
            yield Problem(f"{path}: {wrong}", fix=fix)
        elif _TEMPORARY in each["roles"] and (wrong or not each["is_writable"]):
            fix = "export TMPDIR=/var/tmp  # or another folder that can be written to"
            yield Problem(f"{path}: {wrong or 'read-only'}", WARN, fix=fix)


def digest_files(_: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    groups: dict[str, list[str]] = {}
    for path in question["paths"]:
        groups.setdefault(path.rpartition("/")[0], []).append(path)
    tasks = [[{"do": "digest", "path": p} for p in group] for group in groups.values()]
    found = run_tasks(tasks, _HANG_S * len(question["paths"]))
    pairs = zip(groups.values(), found, strict=True)
    return {p: o for group, each in pairs for p, o in zip(group, each, strict=True)}


def compare_files(hosts: HostSet) -> None:
    paths: Sequence[str] = hosts.settings["files"]
    limit_s = MOST_WAIT_S + _HANG_S * len(paths) + _SLACK_S
    question = {"do": "digest_files", "paths": paths}
    for host, reply in hosts.ask_all(question, limit_s).items():
        if reply.failure:
            hosts.note_unread(host, _FILES, reply.failure)
            continue
        hosts.note(host, _FILES, reply.values)
        hung = [path for path, each in reply.values.items() if "has_hung" in each]
        hosts.facts[host].values.setdefault(_HUNG, []).extend(hung)


FILES_STEP = ProbeStep("files", compare_files, (_FILES,), setting="files")


@check(FAIL, _FILES)
def dataset_files(fleet: Fleet) -> Problems:
    """The files of --file are the same on all hosts.

    reads: size and SHA-256 of each file: of the whole file up to 1GiB, of a larger one
        64 pieces of 1MiB from the first byte to the last
    threshold: each file exists, with the same size and hash everywhere
    source: ronde's choice: the value of most hosts, of three or more; 1GiB takes
        seconds, since a disk reads 150 MB/s or more, and a processor hashes 400 MB/s or
        more
    fix: copy it again: rsync -ac HOST:FILE FILE
    needs: --file
    why: Ranks train on different data, or take fewer steps than the others and hang.
    """
    known: dict[str, dict[str, Mapping[str, Any]]] = {}
    for host, files in fleet.known(_FILES).items():
        for path, each in files.items():
            known.setdefault(path, {})[host] = each
    for path, files in known.items():
        yield from _compare_file(path, files)


def _compare_file(path: str, files: Mapping[str, Mapping[str, Any]]) -> Problems:
    shown = {h: _show_file(each) for h, each in files.items() if "digest" in each}
    odd = {host: (value, usual) for host, value, usual in find_odd(shown)}
    sound = [host for host in shown if host not in odd]

    def copy_to(host: str) -> str:
        if files[host].get("error") == "Is a directory":
            return f"ls {shlex.quote(path)}  # it is a folder: name a file"
        sources = sound or [other for other in shown if other != host]
        if not sources:
            folder = shlex.quote(str(Path(path).parent))
            return f"ls -l {folder}  # no host could read it: name another, or copy it"
        return shlex.join(("rsync", "-ac", f"{sources[0]}:{path}", path))

    for host, each in files.items():
        if host in odd:
            value, usual = odd[host]
            message = f"{path} has {value}"
            yield Problem(message, usual=usual, fix=copy_to(host), host=host)
        elif host in shown:
            yield Problem(f"{path} has {shown[host]}", INFORM, host=host)
        elif not each.get("has_hung"):
            yield Problem(f"{path}: {each['error']}", fix=copy_to(host), host=host)


def _show_file(file: Mapping[str, Any]) -> str:
    size, num_read = file["size_bytes"], file["read_bytes"]
    content = f"{size} bytes, sha256 {file['digest']}"
    if size == num_read:
        return f"{content}, read whole"
    return f"{content}, read {format_size(num_read)} of {format_size(size)}"


@each_host(FAIL, _HUNG)
def hung_mount(values: Values, _: Fleet) -> Problems:
    """All file systems answer.

    reads: statfs of network file systems, the folder where ranks start, TMPDIR and
        --path
    threshold: an answer within 5 s
    source: ronde's choice: an answer usually takes milliseconds
    fix: look at the file server of the mount; then umount -f -l MOUNT, and mount it
        again
    why: Every process that uses the file system hangs, and even kill -9 does not end
        it.
    """
    hung: list[str] = values[_HUNG]
    for path in hung:
        # Mounts below it hang as well.
        if not any(path.startswith(f"{other}/") for other in hung):
            fix = f"umount -f -l {shlex.quote(path)}  # there, or the mount above it, "
            fix += "after a look at its file server; then mount it again"
            yield Problem(f"{path} does not answer", fix=fix)


@each_host(FAIL, _PATHS)
def disk_space(values: Values, _: Fleet) -> Problems:
    """The disk has free space and free inodes.

    reads: statfs of the folder where ranks start, of TMPDIR and of --path
    threshold: 5 % or 50GiB free, and 1GiB; 5 % of the inodes. Below 16MiB, or without a
        free inode, it is a failure
    source: 5 % of the bytes: Imbue's cluster-health 8f5964a (health_checks.py); of the
        inodes: the kubelet's default for evicting pods; ronde's choice: the sizes
    fix: remove files there: du -xh FOLDER | sort -h | tail; du --inodes -x FOLDER
    why: Writing a checkpoint fails after hours of training.
    """
    seen: set[str] = set()
    for path, each in _answering(values):
        mount = each.get("mount") or path
        if not each.get("is_writable") or each["size_bytes"] == 0 or mount in seen:
            continue
        seen.add(mount)
        folder = shlex.quote(path)
        fix = f"du -xh {folder} | sort -h | tail  # there, and make room"
        free, size = each["free_bytes"], each["size_bytes"]
        is_little = free < _LOW_SHARE * size and free < _PLENTY_BYTES
        if is_little or free < _LOW_BYTES:
            message = f"{path} has {format_size(free)} free of {format_size(size)}"
            yield Problem(message, FAIL if free < _FULL_BYTES else WARN, fix=fix)
        free, num = each["free_inodes"], each["num_inodes"]
        # Without a limit on inodes the number is 0.
        if num > 0 and free < _LOW_SHARE * num:
            message = f"{path} has room for {free} more files, of {num}"
            fix = f"du --inodes -x {folder} | sort -n | tail  # there; remove files"
            yield Problem(message, FAIL if free == 0 else WARN, fix=fix)


def try_path(_: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Run a ``task`` of ``path_tasks`` on ``path``, with the timeout ``limit_s``."""
    task = {**question["task"], "path": question["path"]}
    [[outcome]] = run_tasks([[task]], question["limit_s"])
    return outcome


def find_shared(hosts: HostSet, patience_s: float = _PATIENCE_S) -> None:
    """Make each host write a file to each folder and look for the others' files."""
    if len(hosts.names) < 2:
        return
    for host in hosts.names:
        hosts.note(host, SHARED, {})
    for path in hosts.settings.get("paths", ()):
        for host, sees in _try_path(hosts, path, patience_s).items():
            hosts.facts[host].values[SHARED][path] = sees


def _try_path(
    hosts: HostSet, path: str, patience_s: float
) -> dict[str, dict[str, bool]]:
    """Return, for each host and each other host, True if it sees the other's file.

    Hosts that fail are left out.
    """
    token = secrets.token_hex(8)
    files = {h: f".ronde-check-{token}.{n}" for n, h in enumerate(hosts.names)}

    def ask(
        do: str, limit_s: float, of: Mapping[str, Mapping[str, Value]]
    ) -> dict[str, Reply]:
        common = {"do": "try_path", "path": path, "limit_s": limit_s}
        questions = {h: {**common, "task": {"do": do, **t}} for h, t in of.items()}
        return hosts.ask(questions, MOST_WAIT_S + limit_s + _SLACK_S)

    try:
        own = {host: {"name": name} for host, name in files.items()}
        replies = ask("mark", _HANG_S, own)
        left = {host: files[host] for host in files if not replies[host].failure}
        looking = [h for h in files if left and not replies[h].values.get("has_hung")]
        sought = {"names": list(left.values()), "patience_s": patience_s}
        found = ask("find", patience_s + _HANG_S, dict.fromkeys(looking, sought))
    finally:
        own = {host: {"names": [name]} for host, name in files.items()}
        replies = ask("remove", _CLEAR_S, own)
        # If a host cannot remove its file, hosts that share the folder remove it.
        lost = [name for host, name in files.items() if replies[host].failure]
        able = [host for host in files if lost and not replies[host].failure]
        ask("remove", _CLEAR_S, {host: {"names": lost} for host in able})
    return {
        host: {o: n in reply.values["seen"] for o, n in left.items() if o != host}
        for host, reply in found.items()
        if not reply.failure
    }


STEP = ProbeStep("sharing", find_shared, (SHARED,))


@check(FAIL, SHARED)
def shared_folder(fleet: Fleet) -> Problems:
    """A shared folder is the same folder on all hosts.

    reads: a file that each host writes to each --path and later removes
    threshold: each host sees the files of all others within 3 s
    fix: findmnt -T FOLDER on each host; mount the same file system there
    needs: several hosts, --path, and permission to write there
    why: Checkpoints are not found at a restart, or ranks write below a missing mount.
    """
    by_path: dict[str, dict[str, Mapping[str, bool]]] = {}
    for host, paths in fleet.known(SHARED).items():
        for path, seen in paths.items():
            by_path.setdefault(path, {})[host] = seen
    for path, sight in by_path.items():
        if not any(sight.values()):
            for host in sight if len(sight) > 1 else ():
                message = f"unknown whether {path} is shared: no host can write there"
                yield Problem(message, INFORM, host=host)
            continue
        # Hosts that share the folder see the same files, even if they cannot write.
        left = sorted({other for seen in sight.values() for other in seen})
        shown: dict[str, str] = {}
        for host, seen in sight.items():
            names = [other for other in left if other == host or seen.get(other)]
            shown[host] = f"files of {', '.join(names) or 'no host'}"
        for host, value, usual in find_odd(shown):
            fix = f"findmnt -T {shlex.quote(path)}  # there; mount the same one on all"
            yield Problem(f"{path} shows {value}", usual=usual, fix=fix, host=host)
