"""How long tests wait."""

HANG_S = 120.0
"""Ends a test that hangs; never the time that something may take."""
