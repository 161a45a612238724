"""All checks on all hosts: what is found, what is unread, and which hosts are ready."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ronde.check.check import Check, Family, Finding, Severity, why_unread
from ronde.check.facts import Fleet

# Two hosts by name, between which something is found that neither has by itself.
HostPair = tuple[str, str]


class Unread(NamedTuple):
    """A check that could not be made on a host, and why."""

    check: str
    host: str
    reason: str


class Judgement(NamedTuple):
    """What was found."""

    # The worst first; what differs from most hosts before what breaks a threshold.
    findings: tuple[Finding, ...]
    unread: tuple[Unread, ...]
    # How many checks were made, by host and family.
    made: dict[tuple[str, Family], int]


def judge(fleet: Fleet, checks: Sequence[Check]) -> Judgement:
    findings: list[Finding] = []
    unread: list[Unread] = []
    made: Counter[tuple[str, Family]] = Counter()
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
        made.update((host, check.family) for host in able)
    order = list(Severity)
    places = {facts.host: n for n, facts in enumerate(fleet.hosts)}

    def badness(finding: Finding) -> tuple[int, bool, str, int]:
        place = places.get(finding.host, len(places))
        return order.index(finding.severity), not finding.usual, finding.check, place

    return Judgement(tuple(sorted(findings, key=badness)), tuple(unread), dict(made))


class Readiness(NamedTuple):
    """Which hosts are ready; each is in one of these, in the user's order."""

    ready: tuple[str, ...]
    # Ready as well, unless warnings count.
    warned: tuple[str, ...]
    faulty: tuple[str, ...]
    # Hosts that gave any answer.
    num_asked: int
    # Not ready together, whatever each is by itself.
    faulty_pairs: tuple[HostPair, ...] = ()
    # Ready together, unless warnings count.
    warned_pairs: tuple[HostPair, ...] = ()

    @property
    def num_hosts(self) -> int:
        return len(self.ready) + len(self.warned) + len(self.faulty)

    @property
    def is_faulty(self) -> bool:
        return bool(self.faulty or self.faulty_pairs)

    @property
    def is_warned(self) -> bool:
        return bool(self.warned or self.warned_pairs)


def decide(
    hosts: Sequence[str], findings: Sequence[Finding], num_asked: int
) -> Readiness:
    """Sort all hosts, and pairs of them, by the worst that was found there."""
    found: dict[tuple[str, ...], set[Severity]] = defaultdict(set)
    for each in findings:
        found[each.hosts].add(each.severity)

    def worst_of(where: tuple[str, ...]) -> Severity | None:
        return next(
            (s for s in (Severity.FAIL, Severity.WARN) if s in found[where]), None
        )

    faulty = tuple(name for name in hosts if worst_of((name,)) is Severity.FAIL)
    warned = tuple(name for name in hosts if worst_of((name,)) is Severity.WARN)
    ready = tuple(name for name in hosts if name not in (*faulty, *warned))
    pairs = {(w[0], w[1]): worst_of(w) for w in tuple(found) if len(w) > 1}
    bad = tuple(pair for pair, worst in pairs.items() if worst is Severity.FAIL)
    slow = tuple(pair for pair, worst in pairs.items() if worst is Severity.WARN)
    return Readiness(ready, warned, faulty, num_asked, bad, slow)


def fit_together(
    hosts: Sequence[str], readiness: Readiness, *, is_strict: bool
) -> tuple[str, ...]:
    """Return hosts that are ready, and no two of which are not ready together.

    The host that is in most such pairs is left out first; in a draw, the later one.
    """
    left_out = {*readiness.faulty, *(readiness.warned if is_strict else ())}
    pairs = {*readiness.faulty_pairs, *(readiness.warned_pairs if is_strict else ())}
    left = [name for name in hosts if name not in left_out]
    while pairs := {pair for pair in pairs if {*pair} <= {*left}}:
        counts = Counter(name for pair in pairs for name in pair)
        left.pop(max(range(len(left)), key=lambda place: (counts[left[place]], place)))
    return tuple(left)
