"""Layouts of sharded training, and what each costs in memory, bytes and idle time."""
