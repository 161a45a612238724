"""Keeps two generations of a job apart on one host."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_S = 0.05


def await_empty(cookie: str, deadline_s: float) -> list[int]:
    """Wait until no process of a job is left on this host.

    The agent of an earlier generation that lost its controller ends its ranks by
    itself; how soon, depends on when it noticed.

    Args:
        cookie: The job's ``RONDE_COOKIE``.
        deadline_s: How long to wait.

    Returns:
        Processes that are left then.
    """
    ends_at = time.monotonic() + deadline_s
    while True:
        left = list(find_members(cookie))
        if not left or time.monotonic() > ends_at:
            return left
        time.sleep(_POLL_S)


def find_members(cookie: str) -> Iterator[int]:
    """Yield the processes of this host that carry a job's cookie."""
    mark = b"RONDE_COOKIE=" + os.fsencode(cookie)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:
            # Somebody else's, or gone.
            continue
        if mark in environ.split(b"\0"):
            yield int(entry.name)
