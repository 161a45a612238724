"""How fast folders are that hosts write to, where the user asks for it."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ronde.check.facts import Value
from ronde.check.families.storage_sharing import group
from ronde.check.families.storage_speed import (
    DEADLINE_S,
    LEFT,
    NUM_BYTES,
    NUM_FILES,
    SPEED,
    find_slow,
)
from ronde.check.operations.storing import CLEAR_S
from ronde.check.steps.base import Step
from ronde.check.steps.panel import Panel, Reply
from ronde.check.steps.sharing import SHARED

MAX_ROUNDS = 32
"""Of more hosts that share a folder, several write at the same time."""

_PATIENCE_S = 5.0
_SLACK_S = 5.0
_HUNG = "storage.hung"
_NO_PATH = "--storage-speed measures the folders given with --path, and none is"

Told = dict[str, Value]
"""What ``SPEED`` has of one path."""


def run(panel: Panel) -> None:
    """Measure each folder of the setting ``paths`` on each host."""
    paths: Sequence[str] = panel.settings.get("paths", ())
    found: dict[str, dict[str, Told]] = {name: {} for name in panel.names}
    for path in paths:
        for host, told in _measure(panel, path).items():
            found[host][path] = told
    for host, by_path in found.items():
        if any("error" not in t or "has_hung" in t for t in by_path.values()):
            panel.note(host, SPEED, by_path)
        else:
            # There is nothing to judge, but only why there is not.
            reasons = [f"{path}: {told['error']}" for path, told in by_path.items()]
            panel.note_unread(host, SPEED, "; ".join(reasons) or _NO_PATH)


def _measure(panel: Panel, path: str) -> dict[str, Told]:
    """Return what one folder is like on all hosts."""
    found: dict[str, Told] = {}
    # A host that is gone already has nothing there that might stay.
    for host, reply in panel.ask_all({"do": "clock"}, _SLACK_S).items():
        if reply.failure:
            found[host] = {"error": reply.failure}
        elif path in _values(panel, host).get(_HUNG, ()):
            # That has been told; it would cost its deadline once more.
            found[host] = {"error": "it does not answer"}
    able = [host for host in panel.names if host not in found]
    for hosts in _turns(panel, path, able):
        found |= _fill(panel, path, hosts)
    # Who is slow by chance is not so twice.
    suspected = find_slow(found)
    for hosts in _turns(panel, path, [host for host in able if host in suspected]):
        for host, again in _fill(panel, path, hosts).items():
            found[host] = _better(found[host], again)
    return found


def _values(panel: Panel, host: str) -> dict[str, Any]:
    return panel.facts[host].values


def _turns(panel: Panel, path: str, hosts: Sequence[str]) -> Iterator[list[str]]:
    """Yield who writes at the same time.

    On a folder that they share hosts take turns: all at once would share its speed, and
    who is slow could not be told from who has to wait. Folders that are not shared do
    not wait for each other.
    """
    sight: dict[str, Mapping[str, bool]] = {
        host: _values(panel, host).get(SHARED, {}).get(path, {}) for host in hosts
    }
    groups = group(sight)
    longest = max(map(len, groups), default=0)
    num_at_once = max(1, -(-longest // MAX_ROUNDS))
    for begin in range(0, longest, num_at_once):
        yield [h for each in groups for h in each[begin : begin + num_at_once]]


def _better(one: Told, again: Told) -> Told:
    if "error" in again:
        return again if "has_hung" in again else one
    return {name: max(speed, again[name]) for name, speed in one.items()}


def _fill(panel: Panel, path: str, hosts: Sequence[str]) -> dict[str, Told]:
    """Have hosts write into a folder; whatever comes, nothing of it is to stay."""
    token = secrets.token_hex(8)
    places = {host: number for number, host in enumerate(panel.names)}
    left = {host: f".ronde-check-{token}.{places[host]}" for host in hosts}
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
        replies = panel.ask(questions, DEADLINE_S + CLEAR_S + _SLACK_S)
        left = {
            h: n for h, n in left.items() if not replies[h].values.get("is_cleared")
        }
    finally:
        _clear(panel, path, left)
    return {host: _tell(reply) for host, reply in replies.items()}


def _tell(reply: Reply) -> Told:
    if reply.failure:
        hung: Told = {"has_hung": True} if reply.values.get("has_hung") else {}
        return {"error": reply.failure, **hung}
    values = reply.values
    return {
        "mb_per_s": NUM_BYTES / 1e6 / max(values["write_s"], 1e-9),
        "files_per_s": values["num_files"] / max(values["files_s"], 1e-9),
    }


def _clear(panel: Panel, path: str, left: Mapping[str, str]) -> None:
    """Have hosts take away what they made; of a host that cannot, have all try."""

    def ask(asked: Mapping[str, Sequence[str]]) -> dict[str, Reply]:
        questions = {
            host: {"do": "clear_folders", "path": path, "names": list(names)}
            for host, names in asked.items()
        }
        return panel.ask(questions, CLEAR_S + _SLACK_S)

    if not left:
        return
    own = ask({host: [name] for host, name in left.items()})
    lost = {host: name for host, name in left.items() if own[host].failure}
    if not lost:
        return
    # What a host that is gone has left, others can reach if they share it.
    able = [host for host in panel.names if host not in lost]
    names = tuple(lost.values())
    replies = ask(dict.fromkeys(able, names))
    found = {name for r in replies.values() for name in r.values.get("found", ())}
    for host, name in lost.items():
        if name not in found:
            known: list[str] = _values(panel, host).get(LEFT, [])
            panel.note(host, LEFT, [*known, f"{path}/{name}"])


STEP = Step("storing", run, (SPEED, LEFT), (_HUNG, SHARED), setting="storage_speed")
