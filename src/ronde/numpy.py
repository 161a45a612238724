"""Collectives on NumPy arrays."""
