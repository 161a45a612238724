"""Findings -> words."""

from collections.abc import Sequence

from ronde.render.wrapping import WIDTH, list_some, wrap
from ronde.topology.graph import Diagnostic, Level

_ORDER = {severity: place for place, severity in enumerate(Level)}


def tell_findings(findings: Sequence[Diagnostic], width: int = WIDTH) -> str:
    """Return findings as text, the most severe first.

    Those that say the same of several elements are told once, with all elements.

    Args:
        findings: Any; none gives empty text.
        width: Columns to keep to.
    """
    groups: dict[Diagnostic, list[str]] = {}
    for finding in findings:
        groups.setdefault(finding._replace(element=""), []).append(finding.element)
    ordered = sorted(groups, key=lambda f: (_ORDER[f.severity], _share_left(f)))
    return "\n".join(_tell(each, groups[each], width) for each in ordered)


def count_findings(findings: Sequence[Diagnostic]) -> str:
    """Return how many of each severity there are: ``1 error, 4 warnings``."""
    counts = [(s, sum(f.severity is s for f in findings)) for s in Level]
    told = [f"{num} {s}{'' if num == 1 else 's'}" for s, num in counts if num]
    return ", ".join(told) or "nothing found"


def _share_left(finding: Diagnostic) -> float:
    """Return what share of the bandwidth is left; what tells none comes last."""
    should = finding.should_gb_per_s
    return finding.has_gb_per_s / should if should else 1.0


def _tell(finding: Diagnostic, elements: Sequence[str], width: int) -> str:
    return (
        wrap(f"{finding.severity.upper()} {finding.rule}: ", list_some(elements), width)
        + wrap("  seen ", finding.what, width)
        + wrap("  so   ", finding.consequence, width)
        + wrap("  do   ", finding.remedy, width)
    )
