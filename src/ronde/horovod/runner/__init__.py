"""Horovod's launcher, as a function."""

from ronde.horovod.runner.runner import run

__all__ = ["run"]
