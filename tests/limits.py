"""How long tests wait."""

import time
from collections.abc import Callable

HANG_S = 120.0
"""Ends a test that hangs; never the time that something may take."""


def until(is_so: Callable[[], object], awaited: object = "") -> None:
    """Poll until something is so, which sends no notice of its own."""
    ends_at = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < ends_at, awaited() if callable(awaited) else awaited
        time.sleep(0.01)
