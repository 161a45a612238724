"""Predictions of training speed from measurements of a few ranks."""

from ronde.plan.walk import Walk, even_ready, walk

__all__ = ["Walk", "even_ready", "walk"]
