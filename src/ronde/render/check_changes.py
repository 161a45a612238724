"""What has changed on hosts since an earlier look, in words."""

from collections.abc import Sequence
from itertools import takewhile

from ronde.check.check import Finding
from ronde.check.history import Changes
from ronde.render.check_findings import shorten
from ronde.render.check_hosts import fold_hosts
from ronde.render.wrapping import WIDTH, wrap

_MAX_NAMES = 12
_MAX_CHARS = 60
_MAX_TOLD = 120
_CONTEXT_CHARS = 12


def tell_changes(changes: Changes, since: str, width: int = WIDTH) -> str:
    """Return what has changed; hosts that have changed alike are told together.

    Args:
        changes: Any.
        since: When it was otherwise, or what says so.
        width: Columns to keep to.
    """
    text = _tell_findings("new", changes.new, width)
    text += _tell_findings("gone", changes.gone, width)
    same: dict[tuple[str, str, str], list[str]] = {}
    for each in changes.facts:
        key = each.fact, *_show_difference(each.before, each.after)
        same.setdefault(key, []).append(each.host)
    for (fact, before, after), names in same.items():
        told = f"{fold_hosts(names, _MAX_NAMES)}: {fact} was {before}, is {after}"
        text += wrap("  ", told, width, indent=4)
    for what, hosts in (
        ("looked at for the first time", changes.new_hosts),
        ("not looked at this time", changes.gone_hosts),
    ):
        if hosts:
            told = f"{fold_hosts(hosts, _MAX_NAMES)}: {what}"
            text += wrap("  ", told, width, indent=4)
    return f"since {since}:\n" + (text or "  nothing has changed\n")


def _tell_findings(word: str, findings: Sequence[Finding], width: int) -> str:
    same: dict[tuple[str, str], list[str]] = {}
    for each in findings:
        same.setdefault((each.check, each.what), []).append(each.host)
    text = ""
    for (check, what), names in same.items():
        where = fold_hosts(names, _MAX_NAMES)
        told = f"{word} on {where}: {check}: {shorten(what, _MAX_TOLD)}"
        text += wrap("  ", told, width, indent=4)
    return text


def _show_difference(before: str, after: str) -> tuple[str, str]:
    """Return both values; of long ones the part where they begin to differ."""
    if max(len(before), len(after)) <= _MAX_CHARS:
        return before, after
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    skipped = max(0, sum(1 for _ in same) - _CONTEXT_CHARS)
    dots = "..." if skipped else ""
    return (
        dots + shorten(before[skipped:], _MAX_CHARS),
        dots + shorten(after[skipped:], _MAX_CHARS),
    )
