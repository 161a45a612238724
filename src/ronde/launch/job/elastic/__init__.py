"""Elastic jobs; a plain job imports nothing of it."""
