"""Whether folders are the same on all hosts: each leaves a file, all look for it."""

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ronde.check.check import (
    FAIL,
    INFORM,
    Family,
    Problem,
    Problems,
    check,
    name_some,
)
from ronde.check.facts import MIN_MAJORITY, Fleet, Value
from ronde.check.hosts import HostSet, NodeContext, ProbeStep, Reply
from ronde.check.path_tasks import run_task

# How long a host looks for what another has written.
PATIENCE_S = 3.0
# Fact: by path, by each other host that left a file there, whether it is seen here.
SHARED = "storage.shared"
# For a file system to answer.
DEADLINE_S = 5.0
# For it to remove what was written.
CLEAR_S = 10.0
_SLACK_S = 5.0

# Of each host: whether it sees the file of each other host that left one.
Sight = Mapping[str, Mapping[str, bool]]


def leave_nonce(_: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Leave the file ``nonce`` in the directory ``path``."""
    task = {"do": "leave", "path": question["path"], "name": question["nonce"]}
    return run_task(task, DEADLINE_S)


def find_nonces(_: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Look for the files ``nonces``, for ``patience_s``; return those ``seen``."""
    path, patience_s = question["path"], question["patience_s"]
    task = {"do": "find", "path": path, "names": question["nonces"]}
    return run_task(task | {"patience_s": patience_s}, patience_s + DEADLINE_S)


def clear_folders(_: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Remove files or folders ``names`` in ``path``; return those ``found`` there."""
    task = {"do": "clear", "path": question["path"], "names": question["names"]}
    return run_task(task, CLEAR_S)


def run(hosts: HostSet) -> None:
    """Try all folders of the setting ``paths``, where there are several hosts."""
    if len(hosts.names) < 2:
        return
    for host in hosts.names:
        hosts.note(host, SHARED, {})
    for path in hosts.settings.get("paths", ()):
        for host, sees in _try_path(hosts, path).items():
            hosts.facts[host].values[SHARED][path] = sees


def _try_path(hosts: HostSet, path: str) -> dict[str, dict[str, bool]]:
    """Return whether each host sees each other's file.

    A host that cannot look there is left out.
    """
    token = secrets.token_hex(8)
    nonces = {h: f".ronde-check-{token}.{n}" for n, h in enumerate(hosts.names)}
    try:
        questions = {
            host: {"do": "leave_nonce", "path": path, "nonce": nonce}
            for host, nonce in nonces.items()
        }
        replies = hosts.ask(questions, DEADLINE_S + _SLACK_S)
        left = {host: nonces[host] for host in nonces if not replies[host].failure}
        asked = [h for h in nonces if not replies[h].values.get("has_hung")]
        return _find(hosts, path, left, asked) if left else {}
    finally:
        clear_left(hosts, path, nonces)


def _find(
    hosts: HostSet, path: str, left: Mapping[str, str], asked: Iterable[str]
) -> dict[str, dict[str, bool]]:
    question = {
        "do": "find_nonces",
        "path": path,
        "nonces": list(left.values()),
        "patience_s": PATIENCE_S,
    }
    questions = dict.fromkeys(asked, question)
    replies = hosts.ask(questions, PATIENCE_S + DEADLINE_S + _SLACK_S)
    return {
        host: {
            other: nonce in reply.values["seen"]
            for other, nonce in left.items()
            if other != host
        }
        for host, reply in replies.items()
        if not reply.failure
    }


def clear_left(hosts: HostSet, path: str, left: Mapping[str, str]) -> dict[str, str]:
    """Have hosts remove what they left, by name; of a host that cannot, have all try.

    Return what may still be there: where a host is gone, others may not share the path.
    """

    def ask(asked: Mapping[str, Iterable[str]]) -> dict[str, Reply]:
        questions = {
            host: {"do": "clear_folders", "path": path, "names": list(names)}
            for host, names in asked.items()
        }
        return hosts.ask(questions, CLEAR_S + _SLACK_S)

    own = ask({host: [name] for host, name in left.items()})
    lost = {host: name for host, name in left.items() if own[host].failure}
    able = [host for host in hosts.names if host not in lost] if lost else []
    replies = ask(dict.fromkeys(able, lost.values()))
    found = {name for r in replies.values() for name in r.values.get("found", ())}
    return {host: name for host, name in lost.items() if name not in found}


STEP = ProbeStep("sharing", run, (SHARED,))


def group(sight: Sight) -> list[list[str]]:
    """Return groups of hosts that share a folder, the largest first.

    Two hosts share it if each sees what the other left there, as far as it left
    something; and so do two that share it with a third.
    """
    left = list(sight)
    groups: list[list[str]] = []
    while left:
        members = [left.pop(0)]
        for member in members:
            near = [other for other in left if _share(sight, member, other)]
            members += near
            left = [other for other in left if other not in near]
        groups.append([host for host in sight if host in members])
    return sorted(groups, key=len, reverse=True)


def _share(sight: Sight, one: str, other: str) -> bool:
    seen = [sight[one].get(other), sight[other].get(one)]
    return False not in seen and True in seen


def by_path(fleet: Fleet, fact: str) -> dict[str, dict[str, Value]]:
    """Return a fact by path and then by host, where hosts have it by path."""
    found: dict[str, dict[str, Value]] = {}
    for host, paths in fleet.known(fact).items():
        for path, value in paths.items():
            found.setdefault(path, {})[host] = value
    return found


@check(Family.STORAGE, FAIL, SHARED)
def shared_folder(fleet: Fleet) -> Problems:
    """A shared folder is the same one on all hosts.

    reads: files that each host leaves in the folders given with --path, and that all
        hosts look for; they are removed again
    threshold: each host sees those of all others within 3 s
    source: ronde's own; what most hosts share, of three or more
    fix: findmnt -T FOLDER on each host; mount the same file system there
    needs: several hosts, --path, and permission to write there
    why: A checkpoint is not found where a rank is restarted, or half of it is; where
        a mount is missing, ranks write to the disk below its mount point.
    """
    for path, sight in by_path(fleet, SHARED).items():
        if not any(sight.values()):
            for host in sight if len(sight) > 1 else ():
                what = f"unknown whether {path} is shared: no host can write there"
                yield Problem(what, INFORM, host=host)
            continue
        for host, usual in _outside(group(sight)):
            seen = [other for other, is_seen in sight[host].items() if is_seen]
            sees = (
                f"files of {name_some(seen)} only" if seen else "no other host's files"
            )
            yield Problem(f"{path} shows {sees}", usual=usual, host=host)


def _outside(groups: Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield each host that differs, and what most others have; of a draw, all."""
    if len(groups) < 2:
        return
    first, second = groups[:2]
    is_draw = len(first) == len(second) or sum(map(len, groups)) < MIN_MAJORITY
    for each in groups:
        usual = f"shared by {name_some(list(first))}"
        if is_draw:
            others = [o for o in groups if o is not each and len(o) > 1]
            shares = " and by ".join(name_some(list(other)) for other in others)
            usual = f"shared by {shares or 'none'}"
        if is_draw or each is not first:
            for host in each:
                yield host, usual
