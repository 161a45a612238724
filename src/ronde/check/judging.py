"""All checks on all hosts: what is found, what is unread, and which hosts are ready."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ronde.check.check import Check, Family, Finding, Severity, why_unread
from ronde.check.facts import Fleet

Pair = tuple[str, str]
"""Two hosts by name, between which something is found that neither has by itself."""


class Unread(NamedTuple):
    """A check that could not be made on a host, and why."""

    check: str
    host: str
    reason: str


class Judgement(NamedTuple):
    """What was found.

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
            reason = why_unread(facts, check.facts)
            if reason is None:
                able.append(facts.host)
            elif reason:
                unread.append(Unread(check.id, facts.host, reason))
        try:
            findings += tuple(check.find(fleet))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            # A host with another version of ronde may have facts of another form.
            reason = f"the form of the facts is unknown: {error!r}"
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


class Readiness(NamedTuple):
    """Which hosts are ready; each is in one of these, in the user's order.

    Attributes:
        ready: Nothing to warn of, by themselves.
        warned: Ready as well, unless warnings count.
        faulty: Not ready.
        num_asked: Hosts that gave any answer.
        faulty_pairs: Not ready together, whatever each is by itself.
        warned_pairs: Ready together, unless warnings count.
    """

    ready: tuple[str, ...]
    warned: tuple[str, ...]
    faulty: tuple[str, ...]
    num_asked: int
    faulty_pairs: tuple[Pair, ...] = ()
    warned_pairs: tuple[Pair, ...] = ()

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return len(self.ready) + len(self.warned) + len(self.faulty)

    @property
    def is_faulty(self) -> bool:
        """Whether training must not start on all hosts."""
        return bool(self.faulty or self.faulty_pairs)

    @property
    def is_warned(self) -> bool:
        """Whether there is a warning."""
        return bool(self.warned or self.warned_pairs)


def decide(
    hosts: Sequence[str], findings: Sequence[Finding], num_asked: int
) -> Readiness:
    """Sort hosts, and pairs of them, by the worst that was found there.

    Args:
        hosts: All, those that could not be asked as well.
        findings: All.
        num_asked: How many of the hosts gave any answer.
    """
    found: dict[tuple[str, ...], set[Severity]] = defaultdict(set)
    for each in findings:
        found[each.hosts].add(each.severity)
    faulty = tuple(name for name in hosts if Severity.FAIL in found[name,])
    warned = tuple(
        name for name in hosts if Severity.WARN in found[name,] and name not in faulty
    )
    ready = tuple(name for name in hosts if name not in (*faulty, *warned))
    pairs = {(w[0], w[1]): worst for w, worst in found.items() if len(w) > 1}
    bad = tuple(pair for pair, worst in pairs.items() if Severity.FAIL in worst)
    slow = tuple(
        pair
        for pair, worst in pairs.items()
        if Severity.WARN in worst and pair not in bad
    )
    return Readiness(ready, warned, faulty, num_asked, bad, slow)


def fit_together(
    hosts: Sequence[str], readiness: Readiness, *, is_strict: bool
) -> tuple[str, ...]:
    """Return hosts that are ready, and no two of which are not ready together.

    The host that is in most such pairs is left out first; in a draw, the later one.

    Args:
        hosts: All, in the user's order, which is kept.
        readiness: Of them.
        is_strict: Whether warnings count.
    """
    left_out = {*readiness.faulty, *(readiness.warned if is_strict else ())}
    pairs = {*readiness.faulty_pairs, *(readiness.warned_pairs if is_strict else ())}
    left = [name for name in hosts if name not in left_out]
    while pairs := {pair for pair in pairs if {*pair} <= {*left}}:
        counts = Counter(name for pair in pairs for name in pair)
        left.pop(max(range(len(left)), key=lambda place: (counts[left[place]], place)))
    return tuple(left)
