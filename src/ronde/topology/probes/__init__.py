"""Readers of topologies, one file a format."""
