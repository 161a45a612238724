"""All checks on all hosts: what is found, what is fine, and what could not be told."""

from collections.abc import Sequence
from typing import NamedTuple

from ronde.check.check import Check, Family, Finding, Severity, describe
from ronde.check.fleet import Fleet


class Unread(NamedTuple):
    """A check that could not be made.

    Attributes:
        check: Its id.
        host: Where.
        reason: Why.
    """

    check: str
    host: str
    reason: str


class Judgement(NamedTuple):
    """What came of it all.

    Attributes:
        findings: The worst first, and what differs from most hosts before what breaks a
            threshold.
        unread: Checks that could not be made.
        made: How many checks were made, by host and family.
    """

    findings: tuple[Finding, ...]
    unread: tuple[Unread, ...]
    made: dict[tuple[str, Family], int]


def judge(fleet: Fleet, checks: Sequence[Check]) -> Judgement:
    """Make all checks on what is known of the hosts."""
    findings: list[Finding] = []
    unread: list[Unread] = []
    made: dict[tuple[str, Family], int] = {}
    for check in checks:
        able: list[str] = []
        for facts in fleet.hosts:
            reason = describe(facts, check.facts)
            if reason is None:
                able.append(facts.host)
            elif reason:
                unread.append(Unread(check.id, facts.host, reason))
        try:
            findings += tuple(check.judge(fleet))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            # A host with another version of ronde may tell facts of another form.
            reason = f"facts are not of the form that is known: {error!r}"
            unread += [Unread(check.id, host, reason) for host in able]
            continue
        for host in able:
            made[host, check.family] = made.get((host, check.family), 0) + 1
    order = list(Severity)
    places = {facts.host: n for n, facts in enumerate(fleet.hosts)}

    def badness(finding: Finding) -> tuple[int, bool, str, int]:
        place = places.get(finding.host, len(places))
        return order.index(finding.severity), not finding.usual, finding.check, place

    return Judgement(tuple(sorted(findings, key=badness)), tuple(unread), made)
