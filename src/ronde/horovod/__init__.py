"""Horovod's package under its own name, for unmodified scripts."""

from ronde.horovod.launcher import run

__version__ = "0.28.1"
"""The version of Horovod with this interface, for scripts that compare it."""

__all__ = ["run"]
