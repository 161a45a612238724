"""Collectives by schedules, over another engine's point-to-point calls."""

from ronde.collectives.engines.scheduled.engine import ScheduledEngine

__all__ = ["ScheduledEngine"]
