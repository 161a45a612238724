"""Which hosts are ready, by what was found on them."""

from collections.abc import Sequence
from typing import NamedTuple

from ronde.check.check import Finding, Severity


class Verdict(NamedTuple):
    """What comes of the findings; each host is in one of these, in the user's order.

    Attributes:
        ready: Nothing to warn of.
        warned: Ready as well, unless warnings count.
        faulty: Not ready.
        num_asked: Hosts that gave any answer.
        elsewhere: Something is found on what is no host's name, such as a link.
    """

    ready: tuple[str, ...]
    warned: tuple[str, ...]
    faulty: tuple[str, ...]
    num_asked: int
    elsewhere: tuple[Severity, ...] = ()

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return len(self.ready) + len(self.warned) + len(self.faulty)

    @property
    def is_faulty(self) -> bool:
        """Whether training must not start."""
        return bool(self.faulty) or Severity.FAIL in self.elsewhere

    @property
    def is_warned(self) -> bool:
        """Whether there is a warning."""
        return bool(self.warned) or Severity.WARN in self.elsewhere


def decide(
    hosts: Sequence[str], findings: Sequence[Finding], num_asked: int
) -> Verdict:
    """Sort hosts by the worst that was found on them.

    Args:
        hosts: All, those that could not be asked as well.
        findings: All.
        num_asked: How many of the hosts gave any answer.
    """
    found: dict[str, set[Severity]] = {name: set() for name in hosts}
    elsewhere: set[Severity] = set()
    for each in findings:
        found.get(each.host, elsewhere).add(each.severity)
    faulty = tuple(name for name in hosts if Severity.FAIL in found[name])
    warned = tuple(
        name for name in hosts if Severity.WARN in found[name] and name not in faulty
    )
    ready = tuple(name for name in hosts if name not in (*faulty, *warned))
    return Verdict(ready, warned, faulty, num_asked, tuple(sorted(elsewhere)))
