"""How the ranks of a job find each other: in a store, wherever that is."""

from ronde.collectives.rendezvous.meeting import meet

__all__ = ["meet"]
