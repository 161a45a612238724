"""Readers of topologies, one module per format."""
