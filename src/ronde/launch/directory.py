"""Paths as they are seen from this process's directory, which may be gone."""

import os
from pathlib import Path

from ronde.errors import UsageError


def absolute_path(path: str | Path = "") -> Path:
    """Return a path in full.

    Args:
        path: Relative to this process's directory, or absolute; empty for that
            directory itself.

    Raises:
        UsageError: It is relative, and this process's directory was removed.
    """
    try:
        return Path(path).absolute()
    except OSError as error:
        why = os.strerror(error.errno or 0).lower()
        raise UsageError(
            "current directory must exist, got one that was removed or cannot be "
            f"entered ({why}). Go to another: cd"
        ) from None
