"""What is wrong with a topology: said of an element, with its cost and its remedy."""

from enum import StrEnum
from typing import NamedTuple


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """It breaks something, or most of the bandwidth is lost."""

    WARNING = "warning"
    """Bandwidth is lost, or may be."""

    NOTE = "note"
    """Worth knowing; nothing need be lost."""


class Finding(NamedTuple):
    """One thing that is wrong, or looks wrong.

    Attributes:
        rule: Its name, in words joined by hyphens: ``slow-bridge``.
        severity: How bad it is.
        element: What it is about, by name; for files also the line: ``line 12``.
        what: What is seen, one sentence.
        consequence: What comes of it, one sentence, in GB/s where that follows.
        remedy: What to do, one sentence.
        has_gb_per_s: What the element reaches in one direction; 0 where that does not
            follow.
        should_gb_per_s: What it would reach; 0 where that does not follow.
    """

    rule: str
    severity: Severity
    element: str
    what: str
    consequence: str
    remedy: str
    has_gb_per_s: float = 0.0
    should_gb_per_s: float = 0.0
