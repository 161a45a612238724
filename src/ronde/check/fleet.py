"""The hosts, for the families that are still to move."""

from ronde.check.facts import MIN_MAJORITY, Fleet, Odd, spell

__all__ = ["MIN_MAJORITY", "Fleet", "Odd", "spell"]
