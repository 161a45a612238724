"""Horovod's launcher, as a function."""

from ronde.horovod.runner.running import run

__all__ = ["run"]
