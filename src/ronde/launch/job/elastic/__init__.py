"""Elastic jobs. A plain job does not import this package."""
