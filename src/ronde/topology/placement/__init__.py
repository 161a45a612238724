"""Placement of ranks: cores, memory, GPUs and adapters."""
