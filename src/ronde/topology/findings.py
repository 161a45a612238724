"""What is wrong with a topology: said of an element, with its cost and its remedy."""

from enum import StrEnum
from typing import NamedTuple


class Level(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """It breaks something, or most of the bandwidth is lost."""

    WARNING = "warning"
    """Bandwidth is lost, or may be."""

    NOTE = "note"
    """Worth knowing; nothing need be lost."""


class Diagnostic(NamedTuple):
    """One thing that is wrong, or looks wrong."""

    rule: str  # Its name, in words joined by hyphens: ``slow-bridge``.
    severity: Level  # How bad it is.
    element: str  # What it is about, by name; for files also the line: ``line 12``.
    what: str  # What is seen, one sentence.
    consequence: str  # What comes of it, one sentence, in GB/s where that follows.
    remedy: str  # What to do, one sentence.
    # What the element reaches in one direction; 0 where that does not follow.
    has_gb_per_s: float = 0.0
    should_gb_per_s: float = 0.0  # What it would reach; 0 where that does not follow.
