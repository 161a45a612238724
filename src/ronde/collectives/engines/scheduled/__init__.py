"""Collectives by schedules, over another engine's point-to-point calls."""

from ronde.collectives.engines.scheduled.engine import ScheduledCommunicator

__all__ = ["ScheduledCommunicator"]
