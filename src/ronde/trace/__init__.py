"""Timelines of all ranks, read: merged, and told in words."""
