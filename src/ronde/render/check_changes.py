"""What has changed on hosts since an earlier look, in words."""

from collections.abc import Sequence

from ronde.check.check import Finding
from ronde.check.keeping import Changes
from ronde.render.check_hosts import fold_hosts
from ronde.render.wrapping import WIDTH, wrap

_MAX_NAMES = 12
_MAX_CHARS = 60


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
        key = each.fact, _cut(each.before), _cut(each.after)
        same.setdefault(key, []).append(each.host)
    for (fact, before, after), names in same.items():
        label = f"  {fold_hosts(names, _MAX_NAMES)}: "
        text += wrap(label, f"{fact} was {before}, is {after}", width, indent=4)
    for what, hosts in (
        ("looked at for the first time", changes.new_hosts),
        ("not looked at this time", changes.gone_hosts),
    ):
        if hosts:
            text += wrap(f"  {fold_hosts(hosts, _MAX_NAMES)}: ", what, width, indent=4)
    return f"since {since}:\n" + (text or "  nothing has changed\n")


def _tell_findings(word: str, findings: Sequence[Finding], width: int) -> str:
    same: dict[tuple[str, str], list[str]] = {}
    for each in findings:
        same.setdefault((each.check, each.what), []).append(each.host)
    return "".join(
        wrap(
            f"  {word} on {fold_hosts(names, _MAX_NAMES)}: ", f"{check}: {what}", width
        )
        for (check, what), names in same.items()
    )


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
