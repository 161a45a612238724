"""Which hosts are ready, by what was found on them."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ronde.check.check import Finding, Severity

Pair = tuple[str, str]
"""Two hosts by name, between which something is found that neither has by itself."""


class Verdict(NamedTuple):
    """What comes of the findings; each host is in one of these, in the user's order.

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
) -> Verdict:
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
    return Verdict(ready, warned, faulty, num_asked, bad, slow)


def fit_together(
    hosts: Sequence[str], verdict: Verdict, *, is_strict: bool
) -> tuple[str, ...]:
    """Return hosts that are ready, and no two of which are not ready together.

    The host that is in most such pairs is left out first; in a draw, the later one.

    Args:
        hosts: All, in the user's order, which is kept.
        verdict: Of them.
        is_strict: Whether warnings count.
    """
    left_out = {*verdict.faulty, *(verdict.warned if is_strict else ())}
    pairs = {*verdict.faulty_pairs, *(verdict.warned_pairs if is_strict else ())}
    left = [name for name in hosts if name not in left_out]
    while pairs := {pair for pair in pairs if {*pair} <= {*left}}:
        counts = Counter(name for pair in pairs for name in pair)
        left.pop(max(range(len(left)), key=lambda place: (counts[left[place]], place)))
    return tuple(left)
