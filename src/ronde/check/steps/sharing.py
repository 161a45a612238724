"""Whether folders are the same on all hosts: each leaves a file, all look for it."""

import secrets
from collections.abc import Iterable, Mapping

from ronde.check.operations.sharing import DEADLINE_S
from ronde.check.steps.base import Step
from ronde.check.steps.panel import Panel

PATIENCE_S = 3.0
"""How long a host looks for what another has written."""

SHARED = "storage.shared"
"""Fact: by path, by each other host that left a file there, whether it is seen here."""

SHARED_S = "storage.shared_s"
"""Fact: by path, the seconds until the last of those that are seen was seen."""

_SLACK_S = 5.0


def run(panel: Panel) -> None:
    """Try all folders of the setting ``paths``, where there are several hosts."""
    if len(panel.names) < 2:
        return
    facts: dict[str, tuple[dict[str, dict[str, bool]], dict[str, float]]]
    facts = {host: ({}, {}) for host in panel.names}
    for path in panel.settings.get("paths", ()):
        for host, seen_s in _try_path(panel, path).items():
            shared, shared_s = facts[host]
            shared[path] = {other: s is not None for other, s in seen_s.items()}
            known_s = [s for s in seen_s.values() if s is not None]
            shared_s[path] = max(known_s, default=0.0)
    for host, (shared, shared_s) in facts.items():
        panel.note(host, SHARED, shared)
        panel.note(host, SHARED_S, shared_s)


def _try_path(panel: Panel, path: str) -> dict[str, dict[str, float | None]]:
    """Return after how long each host sees each other's file; None if it does not.

    A host that cannot look there is left out.
    """
    token = secrets.token_hex(8)
    nonces = {h: f".ronde-check-{token}.{n}" for n, h in enumerate(panel.names)}
    try:
        questions = {
            host: {"do": "leave_nonce", "path": path, "nonce": nonce}
            for host, nonce in nonces.items()
        }
        replies = panel.ask(questions, DEADLINE_S + _SLACK_S)
        left = {host: nonces[host] for host in nonces if not replies[host].failure}
        asked = [h for h in nonces if not replies[h].values.get("has_hung")]
        return _find(panel, path, left, asked) if left else {}
    finally:
        _remove(panel, path, nonces)


def _find(
    panel: Panel, path: str, left: Mapping[str, str], asked: Iterable[str]
) -> dict[str, dict[str, float | None]]:
    question = {
        "do": "find_nonces",
        "path": path,
        "nonces": list(left.values()),
        "patience_s": PATIENCE_S,
    }
    questions = dict.fromkeys(asked, question)
    replies = panel.ask(questions, PATIENCE_S + DEADLINE_S + _SLACK_S)
    return {
        host: {
            other: reply.values["seen_s"].get(nonce)
            for other, nonce in left.items()
            if other != host
        }
        for host, reply in replies.items()
        if not reply.failure
    }


def _remove(panel: Panel, path: str, nonces: Mapping[str, str]) -> None:
    """Have each host take its own file away; of a host that is gone, have all try."""

    def ask(asked: Mapping[str, Iterable[str]]) -> list[str]:
        questions = {
            host: {"do": "remove_nonce", "path": path, "nonces": list(each)}
            for host, each in asked.items()
        }
        replies = panel.ask(questions, DEADLINE_S + _SLACK_S)
        return [host for host, reply in replies.items() if reply.failure]

    lost = ask({host: [nonce] for host, nonce in nonces.items()})
    if lost:
        left = [nonces[host] for host in lost]
        ask({host: left for host in nonces if host not in lost})


STEP = Step("sharing", run, (SHARED, SHARED_S))
