"""What ``ronde check --json`` prints."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ronde import __version__
from ronde.check.check import Check, Finding
from ronde.check.facts import HostFacts
from ronde.check.history import Changes
from ronde.check.judging import Judgement, Readiness
from ronde.plain_values import to_plain
from ronde.render.check_findings import fix_of

FORM = "ronde-check"
SCHEMA = 1
"""Changes when a field changes its meaning or goes."""


def checked_as_json(
    hosts: Sequence[HostFacts],
    judgement: Judgement,
    verdict: Readiness,
    checks: Mapping[str, Check],
    *,
    exit_code: int,
    changes: Changes | None = None,
) -> str:
    """Return one object of JSON, in several lines.

    Args:
        hosts: What is known of each.
        judgement: What was found.
        verdict: What comes of it.
        checks: By id; a finding without a fix of its own has the check's.
        exit_code: What the command ends with.
        changes: Since an earlier run, where there is one to compare with.
    """
    content: dict[str, Any] = {
        "form": FORM,
        "schema": SCHEMA,
        "ronde": __version__,
        "hosts": [facts._asdict() for facts in hosts],
        "findings": [_finding(each, checks) for each in judgement.findings],
        "unread": [each._asdict() for each in judgement.unread],
        "verdict": {
            "exit_code": exit_code,
            "ready": verdict.ready,
            "warned": verdict.warned,
            "not_ready": verdict.faulty,
            "warned_pairs": verdict.warned_pairs,
            "not_ready_pairs": verdict.faulty_pairs,
        },
    }
    if changes is not None:
        content["changes"] = to_plain(changes)
    return json.dumps(content, indent=1) + "\n"


def _finding(finding: Finding, checks: Mapping[str, Check]) -> dict[str, Any]:
    return {**finding._asdict(), "fix": fix_of(finding, checks)}
