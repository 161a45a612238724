"""Horovod's package under its own name: what unmodified scripts import.

Its modules lie where Horovod's do; ``aliasing`` makes ``horovod.X`` the same module as
``ronde.horovod.X``, and ``horovod.torch`` the same as ``ronde.torch``.
"""

from ronde.horovod.runner import run

__version__ = "0.28.1"
"""The Horovod whose interface this is, for scripts that compare it."""

__all__ = ["run"]
