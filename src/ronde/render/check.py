"""Format the output of ``ronde check``."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from ronde import __version__
from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.fleet import HostFacts
from ronde.check.history import Changes
from ronde.check.judging import Judgement, Readiness, Unread
from ronde.plain_values import to_plain
from ronde.render.hosts import fold_hosts
from ronde.render.text import WIDTH, shorten, wrap
from ronde.units import grouped

FORM = "ronde-check"
SCHEMA = 1
"""Version of the JSON; raise it when a field is removed or changes its meaning."""
_FINE, _UNREAD, _NOTHING = "ok", "?", "-"
_MARKS = {Severity.FAIL: "x", Severity.WARN: "!", Severity.INFORM: _FINE}
_GAP = "  "
_NAME = "name"
_MIN_NAME = 16
_MAX_CAUSES = 8
_MAX_NAMES = 12
_MAX_CHARS = 240
_MAX_FINDING = 120
_MAX_VALUE = 60
_CONTEXT_CHARS = 12
_INDENT = 4

SHOWN_FIELDS = (
    *("reads", "threshold", "source", "severity", "needs", "why", "fix", "pod"),
)
_FIELD_WIDTH = 14


def tabulate_hosts(
    hosts: Sequence[str],
    judgement: Judgement,
    checks: Sequence[Check],
    width: int = WIDTH,
) -> str:
    """Format a table of marks; hosts with equal marks share a line."""
    families = [f for f in Family if any(check.family is f for check in checks)]
    marks = _marks(hosts, judgement, {check.id: check.family for check in checks})
    rows: dict[tuple[str, ...], list[str]] = {}
    for host in hosts:
        row = tuple(marks.get((host, family), _NOTHING) for family in families)
        rows.setdefault(row, []).append(host)
    taken = sum(len(_GAP) + len(family) for family in families)
    room = max(_MIN_NAME, width - taken)
    cells = {row: _wrap_names(fold_hosts(names), room) for row, names in rows.items()}
    num_chars = max(len(line) for cell in [[_NAME], *cells.values()] for line in cell)
    lines = [_GAP.join([_NAME.ljust(num_chars), *families]).rstrip()]
    for row, (first, *more) in cells.items():
        shown = (
            mark.ljust(len(name)) for mark, name in zip(row, families, strict=True)
        )
        lines += [_GAP.join([first.ljust(num_chars), *shown]).rstrip(), *more]
    return "".join(f"{line}\n" for line in lines)


def _marks(
    hosts: Sequence[str], judgement: Judgement, families: Mapping[str, Family]
) -> dict[tuple[str, Family], str]:
    """Return each host's worst mark in each family of checks that ran there."""
    marks = dict.fromkeys(judgement.made, _FINE)
    for unread in judgement.unread:
        family = families.get(unread.check)
        # Without any facts there is no mark.
        if family and (unread.host, family) in marks:
            marks[unread.host, family] = _UNREAD
    # The worst is the first, so write it last.
    for each in reversed(judgement.findings):
        for host in hosts if each.check in families else ():
            if host in each.hosts:
                marks[host, families[each.check]] = _MARKS[each.severity]
    return marks


def _wrap_names(text: str, width: int) -> list[str]:
    """Break a list of names into lines at commas; return at least one line."""
    lines = [""]
    for piece in re.split("(?<=,)", text):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece if lines[-1] else piece.lstrip()
    return [line.rstrip() for line in lines]


def draw_findings(findings: Sequence[Finding], width: int = WIDTH) -> str:
    """Format findings, the worst first; a finding on several hosts appears once."""
    groups = grouped(((each.check, each.severity, each.fix), each) for each in findings)
    text = ""
    for (check, severity, fix), same in groups.items():
        mark = "i" if severity is Severity.INFORM else _MARKS[severity]
        where = fold_hosts((each.host for each in same), _MAX_NAMES)
        text += f"{mark} {check}: {where}\n{_draw_causes(same, width)}"
        # On one line, so that it can be pasted.
        text += f"    fix: {fix}\n" if fix else ""
    return text


def _draw_causes(same: Sequence[Finding], width: int) -> str:
    causes: dict[str, list[str]] = {}
    for each in same:
        usual = f", but {each.usual}" if each.usual else ""
        causes.setdefault(f"{each.message}{usual}", []).append(each.host)
    # If all hosts have the same cause, the line above names them.
    is_split = len({frozenset(names) for names in causes.values()}) > 1
    text = ""
    for cause, names in list(causes.items())[:_MAX_CAUSES]:
        label = f"{fold_hosts(names, _MAX_NAMES)}: " if is_split else ""
        shown = label + shorten(cause, _MAX_CHARS)
        text += wrap(" " * _INDENT, shown, width, indent=_INDENT + 2)
    if left := sum(len(names) for names in list(causes.values())[_MAX_CAUSES:]):
        text += f"{' ' * _INDENT}and {left} more\n"
    return text


def draw_unread(unread: Sequence[Unread], width: int = WIDTH) -> str:
    """Format the reasons why checks could not run, each reason once."""
    hosts = grouped(((each.reason, each.check), each.host) for each in unread)
    groups = grouped(
        ((reason, fold_hosts(names, _MAX_NAMES)), check)
        for (reason, check), names in hosts.items()
    )
    text = "could not be read, which is no fault:\n" if groups else ""
    for (reason, where), names in groups.items():
        sentence = f"{where}: {shorten(reason, _MAX_CHARS)} ({', '.join(names)})"
        text += wrap("? ", sentence, width, indent=_INDENT)
    return text


def draw_verdict(
    verdict: Readiness, findings: Sequence[Finding], width: int = WIDTH
) -> str:
    if not verdict.num_asked:
        return "no host answered, so nothing is known\n"
    failed = grouped(
        ((each.host, len(each.hosts) > 1), each.check)
        for each in findings
        if each.severity is Severity.FAIL
    )
    same = grouped(
        ((", ".join(dict.fromkeys(ids)), is_pair), where)
        for (where, is_pair), ids in failed.items()
    )
    text = _draw_ready(verdict)
    if verdict.unknown:
        names = fold_hosts(verdict.unknown, _MAX_NAMES)
        are = "are" if len(verdict.unknown) > 1 else "is"
        why = "nothing was read" if verdict.is_unread else "the GPUs cannot be queried"
        shown = f"unknown whether {names} {are} ready: {why}"
        text += wrap("", shown, width, indent=_INDENT)
    for (ids, is_pair), names in same.items():
        are = "are" if is_pair or len(names) > 1 else "is"
        ready = "ready together" if is_pair else "ready"
        shown = f"{fold_hosts(names, _MAX_NAMES)} {are} not {ready}: {ids}"
        text += wrap("", shown, width, indent=_INDENT)
    return text


def _draw_ready(verdict: Readiness) -> str:
    num, num_warned = verdict.num_hosts, len(verdict.warned)
    num_ready = len(verdict.ready) + num_warned
    if not num_ready:
        return ""
    hosts, are = ("host" if num == 1 else "hosts"), ("is" if num_ready == 1 else "are")
    text = f"{num_ready} of {num} {hosts} {are} ready"
    if verdict.faulty_pairs:
        text += " by itself" if num_ready == 1 else " by themselves"
    if not verdict.is_warned:
        return f"{text}\n"
    warned = [f"on {num_warned} of them"] if 0 < num_warned < num_ready else []
    if (num_pairs := len(verdict.warned_pairs)) and num_warned < num_ready:
        warned.append(f"on {num_pairs} pair{'s' * (num_pairs > 1)}")
    return f"{text}, with warnings {' and '.join(warned)}".rstrip() + "\n"


def draw_changes(changes: Changes, since: str, width: int = WIDTH) -> str:
    """Format changes; a change on several hosts appears once."""
    same: dict[str, list[str]] = {}
    for word, findings in (("new", changes.new), ("gone", changes.gone)):
        for each in findings:
            text = (
                f"{word} on {{}}: {each.check}: {shorten(each.message, _MAX_FINDING)}"
            )
            same.setdefault(text, []).append(each.host)
    for each in changes.facts:
        before, after = _difference(each.before, each.after)
        text = f"{{}}: {each.fact} was {before}, is {after}"
        same.setdefault(text, []).append(each.host)
    if changes.new_hosts:
        same["{}: checked for the first time"] = list(changes.new_hosts)
    if changes.gone_hosts:
        same["{}: not checked this time"] = list(changes.gone_hosts)
    lines = ""
    for text, names in same.items():
        shown = text.replace("{}", fold_hosts(names, _MAX_NAMES), 1)
        lines += wrap("  ", shown, width, indent=4)
    return f"since {since}:\n" + (lines or "  nothing has changed\n")


def _difference(before: str, after: str) -> tuple[str, str]:
    """Cut two long values to the part where they begin to differ."""
    if max(len(before), len(after)) <= _MAX_VALUE:
        return before, after
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    skipped = max(0, sum(1 for _ in same) - _CONTEXT_CHARS)
    dots = "..." if skipped else ""
    was, is_now = (dots + shorten(v[skipped:], _MAX_VALUE) for v in (before, after))
    return was, is_now


def checked_as_json(
    hosts: Sequence[HostFacts],
    judgement: Judgement,
    verdict: Readiness,
    *,
    exit_code: int,
    changes: Changes | None = None,
) -> str:
    content: dict[str, Any] = {
        "form": FORM,
        "schema": SCHEMA,
        "ronde": __version__,
        "hosts": [facts._asdict() for facts in hosts],
        "findings": [each._asdict() for each in judgement.findings],
        "unread": [each._asdict() for each in judgement.unread],
        "verdict": {
            "exit_code": exit_code,
            "ready": verdict.ready,
            "warned": verdict.warned,
            "not_ready": verdict.faulty,
            "unknown": verdict.unknown,
            "warned_pairs": verdict.warned_pairs,
            "not_ready_pairs": verdict.faulty_pairs,
        },
    }
    if changes is not None:
        content["changes"] = to_plain(changes)
    return json.dumps(content, indent=1) + "\n"


def list_checks(checks: Sequence[Check], width: int = WIDTH) -> str:
    text = ""
    for family in Family:
        own = [check for check in checks if check.family is family]
        text += f"{family}:\n" if own else ""
        for check in own:
            text += wrap(f"  {check.id:<24}", check.title, width, indent=26)
    return text


def explain_check(check: Check, width: int = WIDTH) -> str:
    text = wrap(f"{check.id}: ", check.title, width, indent=2)
    for name in SHOWN_FIELDS:
        value = getattr(check, name)
        label = f"  {name:<{_FIELD_WIDTH - 2}}"
        text += wrap(label, value, width, indent=_FIELD_WIDTH) if value else ""
    return text
