"""One thing that was seen of a host before ranks start there."""

from typing import NamedTuple

UNREADABLE = -1
"""The amount of what a host does not tell."""


class Finding(NamedTuple):
    """What was seen of one thing on one host.

    Attributes:
        name: Which thing: one of the constants of ``readiness``.
        amount: Bytes, a count, or milliseconds since 1970; ``UNREADABLE`` where the
            host does not tell, which is not the same as bad.
        detail: What belongs to it: a path, an address, pids.
    """

    name: str
    amount: int
    detail: str = ""
