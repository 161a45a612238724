"""Collectives on two levels: within each host, and between hosts."""

from ronde.collectives.engines.hierarchical.engine import HierarchicalEngine
from ronde.collectives.engines.hierarchical.places import Places

__all__ = ["HierarchicalEngine", "Places"]
