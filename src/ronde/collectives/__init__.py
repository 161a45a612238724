"""Collectives: one interface, its engines."""
