"""The module that unmodified scripts import as ``horovod``."""

from ronde.horovod.launcher import run

__version__ = "0.28.1"
"""Horovod's version with the same interface, for scripts that check versions."""

__all__ = ["run"]
