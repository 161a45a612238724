"""What was found on hosts, the worst first, and what comes of it."""

from collections.abc import Mapping, Sequence

from ronde.check.check import Check, Finding, Severity
from ronde.check.judging import Readiness, Unread
from ronde.render.check_hosts import fold_hosts
from ronde.render.check_table import MARKS, paint
from ronde.render.wrapping import WIDTH, wrap

_INFORMATION = "i"
_MAX_CAUSES = 8
_MAX_NAMES = 12
_MAX_CHARS = 240
_INDENT = 4


def tell_findings(
    findings: Sequence[Finding],
    checks: Mapping[str, Check],
    *,
    is_coloured: bool = False,
    width: int = WIDTH,
) -> str:
    """Return findings in their order; what is alike on several hosts is told once.

    Args:
        findings: The worst first; none gives empty text.
        checks: By id; a finding without a fix of its own has the check's.
        is_coloured: Whether marks have colours.
        width: Columns to keep to.
    """
    groups: dict[tuple[str, Severity, str], list[Finding]] = {}
    for each in findings:
        key = each.check, each.severity, fix_of(each, checks)
        groups.setdefault(key, []).append(each)
    return "".join(
        _tell(same, fix, is_coloured=is_coloured, width=width)
        for (_, _, fix), same in groups.items()
    )


def tell_unread(unread: Sequence[Unread], width: int = WIDTH) -> str:
    """Return why checks could not be made, each reason once."""
    hosts: dict[tuple[str, str], list[str]] = {}
    for each in unread:
        hosts.setdefault((each.reason, each.check), []).append(each.host)
    groups: dict[tuple[str, str], list[str]] = {}
    for (reason, check), names in hosts.items():
        where = fold_hosts(names, _MAX_NAMES)
        groups.setdefault((reason, where), []).append(check)
    if not groups:
        return ""
    text = "could not be read, which is no fault:\n"
    for (reason, where), names in groups.items():
        sentence = f"{where}: {shorten(reason, _MAX_CHARS)} ({', '.join(names)})"
        text += wrap("? ", sentence, width, indent=_INDENT)
    return text


def tell_verdict(
    verdict: Readiness, findings: Sequence[Finding], width: int = WIDTH
) -> str:
    """Return how many hosts are ready, and of the others why not."""
    if not verdict.num_asked:
        return "no host could be asked, so nothing is known\n"
    failed: dict[tuple[str, bool], list[str]] = {}
    for each in findings:
        if each.severity is Severity.FAIL:
            is_pair = len(each.hosts) > 1
            failed.setdefault((each.host, is_pair), []).append(each.check)
    same: dict[tuple[str, bool], list[str]] = {}
    for (where, is_pair), ids in failed.items():
        key = ", ".join(dict.fromkeys(ids)), is_pair
        same.setdefault(key, []).append(where)
    text = _tell_ready(verdict)
    for (ids, is_pair), names in same.items():
        are = "are" if is_pair or len(names) > 1 else "is"
        ready = "ready together" if is_pair else "ready"
        told = f"{fold_hosts(names, _MAX_NAMES)} {are} not {ready}: {ids}"
        text += wrap("", told, width, indent=_INDENT)
    return text


def _tell_ready(verdict: Readiness) -> str:
    num, num_warned = verdict.num_hosts, len(verdict.warned)
    num_ready = num - len(verdict.faulty)
    if not num_ready:
        return ""
    hosts, are = ("host" if num == 1 else "hosts"), ("is" if num_ready == 1 else "are")
    told = f"{num_ready} of {num} {hosts} {are} ready"
    if verdict.faulty_pairs:
        told += " by itself" if num_ready == 1 else " by themselves"
    if not verdict.is_warned:
        return f"{told}\n"
    whose = [f"on {num_warned} of them"] if 0 < num_warned < num_ready else []
    if (num_pairs := len(verdict.warned_pairs)) and num_warned < num_ready:
        whose.append(f"on {num_pairs} pair{'s' * (num_pairs > 1)}")
    return f"{told}, with warnings {' and '.join(whose)}".rstrip() + "\n"


def fix_of(finding: Finding, checks: Mapping[str, Check]) -> str:
    """Return what to do about a finding: its own word, else its check's."""
    if finding.fix or finding.check not in checks:
        return finding.fix
    return checks[finding.check].fix


def shorten(text: str, most: int) -> str:
    """Return a text whose end is left out where it is longer than some characters."""
    return text if len(text) <= most else f"{text[:most].rstrip()}..."


def _tell(same: Sequence[Finding], fix: str, *, is_coloured: bool, width: int) -> str:
    first = same[0]
    is_known = first.severity is Severity.INFORM
    mark = _INFORMATION if is_known else MARKS[first.severity]
    causes: dict[str, list[str]] = {}
    for each in same:
        usual = f", but {each.usual}" if each.usual else ""
        causes.setdefault(f"{each.what}{usual}", []).append(each.host)
    where = fold_hosts((each.host for each in same), _MAX_NAMES)
    text = f"{paint(mark, is_coloured=is_coloured)} {first.check}: {where}\n"
    for cause, names in list(causes.items())[:_MAX_CAUSES]:
        label = "" if len(causes) == 1 else f"{fold_hosts(names, _MAX_NAMES)}: "
        told = shorten(cause, _MAX_CHARS)
        text += wrap(" " * _INDENT, label + told, width, indent=_INDENT + 2)
    if len(causes) > _MAX_CAUSES:
        left = sum(len(names) for names in list(causes.values())[_MAX_CAUSES:])
        text += f"{' ' * _INDENT}and {left} more\n"
    return text + (wrap("    fix: ", fix, width, indent=9) if fix else "")
