"""How fast a folder takes what a host writes, where the user asks for it."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ronde.check.check import FAIL, INFORM, WARN, Family, Problem, Problems, check
from ronde.check.facts import Fleet, Value, find_few, show_usual
from ronde.check.hosts import HostSet, NodeContext, ProbeStep, Reply
from ronde.check.path_tasks import run_task
from ronde.check.storage.sharing import (
    CLEAR_S,
    SHARED,
    by_path,
    clear_folders,
    clear_left,
    group,
)

SPEED = "storage.speed"
"""Fact: by path, ``mb_per_s`` (1e6 bytes) and ``files_per_s``.

Or ``error``, why they are unknown, with ``has_hung`` where time was up.
"""

# Fact: folders that were made for it and may still be there.
LEFT = "storage.speed_left"
NUM_BYTES, NUM_FILES = 64 << 20, 1000
DEADLINE_S = 30.0
# Of more hosts that share a folder, several write at the same time.
MAX_ROUNDS = 32
# Below this share of what most hosts have, a host is slow.
_SLOW_SHARE = 0.5
_MEASURES: dict[str, tuple[float, Callable[[float], str]]] = {
    "mb_per_s": (30.0, "{:.3g} MB/s".format),
    "files_per_s": (50.0, "{:.3g} small files/s".format),
}
"""By name: what is too slow anywhere, and how to show it."""

_PATIENCE_S, _SLACK_S = 5.0, 5.0
_HUNG = "storage.hung"
_NO_PATH = "--storage-speed measures the folders given with --path, and there is none"
_ARGUMENTS = ("path", "name", "num_bytes", "num_files", "patience_s")


def fill_folder(context: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Write a file and small ones into a new folder ``name`` below ``path``.

    The process that makes it removes it; if that is killed or dies, another one does.
    The answer is that of ``path_tasks.fill``; where it is not ``is_cleared``,
    ``clear_folders`` of another host that shares the folder may do better.
    """
    task = {"do": "fill", **{name: question[name] for name in _ARGUMENTS}}
    outcome = run_task(task, question["deadline_s"])
    if not outcome.get("is_cleared"):
        names = {"path": question["path"], "names": [question["name"]]}
        outcome["is_cleared"] = "error" not in clear_folders(context, names)
    return outcome


def run(hosts: HostSet) -> None:
    """Measure each folder of the setting ``paths`` on each host."""
    found: dict[str, dict[str, Value]] = {name: {} for name in hosts.names}
    for path in hosts.settings.get("paths", ()):
        for host, speed in _measure(hosts, path).items():
            found[host][path] = speed
    for host, speeds in found.items():
        if any("error" not in each or "has_hung" in each for each in speeds.values()):
            hosts.note(host, SPEED, speeds)
        else:
            reasons = [f"{path}: {each['error']}" for path, each in speeds.items()]
            hosts.note_unread(host, SPEED, "; ".join(reasons) or _NO_PATH)


def _measure(hosts: HostSet, path: str) -> dict[str, Value]:
    """Return how fast one folder is on all hosts."""
    found: dict[str, Value] = {}
    # A host that is gone already has nothing there that might stay.
    for host, reply in hosts.ask_all({"do": "clock"}, _SLACK_S).items():
        if reply.failure:
            found[host] = {"error": reply.failure}
        elif path in hosts.facts[host].values.get(_HUNG, ()):
            # It is known, and would cost its deadline once more.
            found[host] = {"error": "it does not answer"}
    able = [host for host in hosts.names if host not in found]
    for turn in _turns(hosts, path, able):
        found |= _fill(hosts, path, turn)
    # A host that is slow by chance is not so twice.
    suspected = find_slow(found)
    for turn in _turns(hosts, path, [host for host in able if host in suspected]):
        for host, again in _fill(hosts, path, turn).items():
            if "has_hung" in again:
                found[host] = again
            elif "error" not in again:
                first = found[host]
                found[host] = {name: max(first[name], s) for name, s in again.items()}
    return found


def _turns(hosts: HostSet, path: str, able: Sequence[str]) -> Iterator[list[str]]:
    """Yield the hosts that write at the same time.

    On a folder that they share hosts take turns: all at once would share its speed, and
    a slow host would look like one that has to wait. Folders that are not shared do not
    wait for each other.
    """
    sight: dict[str, Mapping[str, bool]] = {
        host: hosts.facts[host].values.get(SHARED, {}).get(path, {}) for host in able
    }
    groups = group(sight)
    longest = max(map(len, groups), default=0)
    num_at_once = max(1, -(-longest // MAX_ROUNDS))
    for begin in range(0, longest, num_at_once):
        yield [h for each in groups for h in each[begin : begin + num_at_once]]


def _fill(hosts: HostSet, path: str, writing: Sequence[str]) -> dict[str, Value]:
    """Have hosts write into a folder; whatever comes, nothing of it is to stay."""
    token = secrets.token_hex(8)
    places = {host: number for number, host in enumerate(hosts.names)}
    left = {host: f".ronde-check-{token}.{places[host]}" for host in writing}
    question = {
        "do": "fill_folder",
        "path": path,
        "num_bytes": NUM_BYTES,
        "num_files": NUM_FILES,
        "patience_s": _PATIENCE_S,
        "deadline_s": DEADLINE_S,
    }
    questions = {host: {**question, "name": name} for host, name in left.items()}
    try:
        replies = hosts.ask(questions, DEADLINE_S + CLEAR_S + _SLACK_S)
        left = {
            h: n for h, n in left.items() if not replies[h].values.get("is_cleared")
        }
    finally:
        for host, name in clear_left(hosts, path, left).items():
            known: list[str] = hosts.facts[host].values.get(LEFT, [])
            hosts.note(host, LEFT, [*known, f"{path}/{name}"])
    return {host: _speed_of(reply) for host, reply in replies.items()}


def _speed_of(reply: Reply) -> Value:
    values = reply.values
    if reply.failure:
        hung: dict[str, Any] = {"has_hung": True} if values.get("has_hung") else {}
        return {"error": reply.failure, **hung}
    return {
        "mb_per_s": NUM_BYTES / 1e6 / max(values["write_s"], 1e-9),
        "files_per_s": values["num_files"] / max(values["files_s"], 1e-9),
    }


STEP = ProbeStep(
    "storing", run, (SPEED, LEFT), (_HUNG, SHARED), setting="storage_speed"
)


def find_slow(measured: Mapping[str, Mapping[str, Value]]) -> set[str]:
    return {host for name in _MEASURES for host in _find_slow(name, measured)}


def _find_slow(
    name: str, measured: Mapping[str, Mapping[str, Value]]
) -> dict[str, str]:
    """Return what others have, by the name of each slow host; empty below the floor."""
    least, show = _MEASURES[name]
    speeds: dict[str, float] = {h: e[name] for h, e in measured.items() if name in e}
    few = find_few(speeds, _SLOW_SHARE)
    found = {host: "" for host, speed in speeds.items() if speed < least}
    return found | {h: show_usual(h, speeds, few, show) for h in few.hosts}


@check(Family.STORAGE, FAIL, SPEED, besides=(LEFT,))
def storage_speed(fleet: Fleet) -> Problems:
    """A folder takes bytes and small files fast.

    reads: 64MiB of random bytes, written into each --path as one file and flushed; and
        1000 files of 4KiB that are made there and removed, as far as 5 s suffice for
        making them. Hosts that share the folder write one after the other; a slow one
        is measured twice, and the better counts
    threshold: half of what most hosts have, 30 MB/s, and 50 files a second; a failure
        if all takes more than 30 s
    source: ronde's own: a single hard disk writes 100 to 200 MB/s, 1 Gbit/s Ethernet
        carries 118 MB/s; at 30 MB/s a checkpoint of 10GiB takes 6 minutes. An
        environment with torch has some 20,000 files: 7 minutes at 50 a second
    fix: compare findmnt -T FOLDER with a host that is fast; nfsiostat 1 for NFS, iostat
        -x 1 for a disk; write checkpoints to a local disk first, and pack small files
        into large ones
    needs: --storage-speed, --path, and permission to write there
    why: All ranks wait while a checkpoint is written; data sets of small files are read
        at that pace, and Python starts at it.
    """
    for path, measured in by_path(fleet, SPEED).items():
        for host, each in measured.items():
            if each.get("has_hung"):
                size = f"{NUM_BYTES >> 20}MiB and {NUM_FILES} small files"
                what = f"{path} does not take {size} within {DEADLINE_S:g} s"
                yield Problem(what, host=host)
            elif "error" in each:
                what = f"{path} was not measured: {each['error']}"
                yield Problem(what, INFORM, host=host)
        for name, (_, show) in _MEASURES.items():
            for host, usual in _find_slow(name, measured).items():
                what = f"{path} takes {show(measured[host][name])}"
                yield Problem(what, WARN, usual, host=host)
    for host, left in fleet.known(LEFT).items():
        folders = " ".join(left)
        what = f"what was written to it may still be there: {folders}"
        yield Problem(what, WARN, fix=f"rm -r {folders}", host=host)
