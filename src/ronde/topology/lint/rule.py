"""What one rule is."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ronde.topology.findings import Finding, Severity
from ronde.topology.lint.host_view import HostView


class Rule(NamedTuple):
    """One thing that may be wrong with a host.

    Attributes:
        name: What findings and options call it.
        meaning: What it looks for, one line.
        find: Yields a finding for every element that is so.
    """

    name: str
    meaning: str
    find: Callable[[HostView], Iterator[Finding]]


def rate_loss(has_gb_per_s: float, should_gb_per_s: float) -> Severity:
    """Return how bad it is that bandwidth is lost: an error where most of it is."""
    if has_gb_per_s < should_gb_per_s / 2:
        return Severity.ERROR
    return Severity.WARNING
