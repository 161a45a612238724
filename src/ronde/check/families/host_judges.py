"""Judges that several checks of hosts share."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ronde.check.check import Finding, Severity
from ronde.check.facts import Value
from ronde.check.fleet import Fleet

Values = Mapping[str, Value]


class Grade(NamedTuple):
    """What is wrong with a host, and how bad it is; see ``Finding``."""

    severity: Severity
    what: str
    fix: str = ""


class Few(NamedTuple):
    """Hosts that have too little of something.

    Attributes:
        hosts: Their names; all hosts in a draw, for nobody is to be blamed then.
        usual: What most hosts have; in a draw, the most that any of them has.
        is_draw: Whether it is one.
    """

    hosts: tuple[str, ...]
    usual: float
    is_draw: bool


def graded(
    name: str,
    facts: tuple[str, ...],
    grade: Callable[[Values, Values], Grade | None],
) -> Callable[[Fleet], Iterator[Finding]]:
    """Return a judge that looks at each host by itself.

    Args:
        name: Id of the check.
        facts: What a host must have to be looked at.
        grade: Is given the host's facts and the settings.
    """

    def judge(fleet: Fleet) -> Iterator[Finding]:
        for facts_of_host in fleet.having(*facts):
            found = grade(facts_of_host.values, fleet.settings)
            if found is not None:
                host = facts_of_host.host
                yield Finding(name, found.severity, host, found.what, fix=found.fix)

    return judge


def find_few(amounts: Mapping[str, float], share: float) -> Few:
    """Find the hosts that have less than a share of what most have.

    To have more is no fault. Where as many have little as have much, it is a draw; of
    two hosts it always is.

    Args:
        amounts: By name of the host.
        share: Below this share of the upper median, between 0 and 1.
    """
    if not amounts:
        return Few((), 0.0, is_draw=False)
    usual = statistics.median_high(amounts.values())
    few = tuple(host for host, amount in amounts.items() if amount < share * usual)
    is_draw = bool(few) and 2 * len(few) >= len(amounts)
    if is_draw:
        return Few(tuple(amounts), max(amounts.values()), is_draw)
    return Few(few, usual, is_draw)


def tell_usual(
    host: str,
    amounts: Mapping[str, float],
    few: Few,
    show: Callable[[float], str],
) -> str:
    """Return what others have, for ``Finding.usual``."""
    if not few.is_draw:
        return f"{show(few.usual)} on most hosts"
    others = {show(a): None for name, a in amounts.items() if name != host}
    return f"{', '.join(others)} elsewhere"


def fewer_than_most(
    name: str,
    facts: tuple[str, ...],
    amount: Callable[[Values], float],
    show: Callable[[float], str],
    share: float = 1.0,
) -> Callable[[Fleet], Iterator[Finding]]:
    """Return a judge that warns of hosts that have less of something than most.

    Args:
        name: Id of the check.
        facts: What a host must have to be looked at.
        amount: Returns how much a host has.
        show: Writes an amount for people, with its unit and what it is of.
        share: See ``find_few``.
    """

    def judge(fleet: Fleet) -> Iterator[Finding]:
        amounts = {each.host: amount(each.values) for each in fleet.having(*facts)}
        few = find_few(amounts, share)
        for host in few.hosts:
            usual = tell_usual(host, amounts, few, show)
            yield Finding(name, Severity.WARN, host, show(amounts[host]), usual)

    return judge


def both(
    *judges: Callable[[Fleet], Iterator[Finding]],
) -> Callable[[Fleet], Iterator[Finding]]:
    """Return a judge that tells of each host what the first of some judges finds."""

    def judge(fleet: Fleet) -> Iterator[Finding]:
        told: set[str] = set()
        for each in judges:
            found = [finding for finding in each(fleet) if finding.host not in told]
            told |= {finding.host for finding in found}
            yield from found

    return judge


def num_ranks(settings: Values) -> int:
    """Return how many ranks a host is to have: what the user said, else one."""
    return int(settings.get("num_ranks") or 1)
