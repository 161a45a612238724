"""Collectives of the ranks of one machine, through memory that all of them map."""

from ronde.collectives.engines.shared_memory.engine import SharedMemoryEngine

__all__ = ["SharedMemoryEngine"]
