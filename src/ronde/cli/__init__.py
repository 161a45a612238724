"""argv to one library call to an exit code."""

from ronde.cli.entry import main

__all__ = ["main"]
