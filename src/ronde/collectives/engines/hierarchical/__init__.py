"""Collectives on two levels: within each host, and between hosts."""

from ronde.collectives.engines.hierarchical.engine import HierarchicalCommunicator
from ronde.collectives.engines.hierarchical.places import Places

__all__ = ["HierarchicalCommunicator", "Places"]
