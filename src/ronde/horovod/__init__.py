"""Horovod's package under its own name: what unmodified scripts import."""
