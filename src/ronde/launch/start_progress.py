"""What the start of a job waits for, said when it takes long."""

import time
from collections.abc import Callable, Sequence

from ronde.units import format_duration

SLOW_S = 10.0
"""After so long a step says once what it waits for."""

_VERBOSE_SLOW_S = _LONG_S = 2.0
_MAX_NAMES = 4


class StartProgress:
    """The steps of one start, one after the other.

    Args:
        say: Shows a sentence of the launcher's own.
        is_verbose: Say of each step how long it took, and more often what it waits for.
    """

    def __init__(self, say: Callable[[str], None], *, is_verbose: bool = False) -> None:
        self._say = say
        self._is_verbose = is_verbose
        self._what = ""
        self._awaited: Callable[[], Sequence[str]] = tuple
        self._begun_s = 0.0
        self.due_s = float("inf")
        """When ``look`` is to be called at the latest, on the monotonic clock."""

    def begin(self, what: str, awaited: Callable[[], Sequence[str]]) -> None:
        """Begin a step.

        Args:
            what: What is waited for: ``to answer``.
            awaited: Returns whose turn it is: names of hosts.
        """
        self._what, self._awaited = what, awaited
        self._begun_s = time.monotonic()
        self.due_s = self._begun_s + (_VERBOSE_SLOW_S if self._is_verbose else SLOW_S)

    def look(self) -> None:
        """Say what is waited for if that is due."""
        if time.monotonic() >= self.due_s:
            self.tell()
            self.due_s += SLOW_S if self._is_verbose else float("inf")

    def tell(self) -> None:
        """Say now what is waited for."""
        names = self._awaited()
        if self._what and names:
            more = len(names) - _MAX_NAMES
            shown = ", ".join(names[:_MAX_NAMES]) + (
                f" and {more} more" if more > 0 else ""
            )
            took_s = time.monotonic() - self._begun_s
            self._say(f"waiting for {shown} {self._what}, {took_s:.0f} s so far")

    def took(self, done: str, took_s: float) -> None:
        """Say what is done where it was long, and nothing else could be said meanwhile.

        Args:
            done: ``node3 was looked up``.
            took_s: How long it took.
        """
        if took_s >= _LONG_S:
            self._say(f"{done} in {format_duration(took_s)}")

    def end(self, done: str) -> None:
        """End the step.

        Args:
            done: What is done now: ``3 hosts answered``.
        """
        self._what, self.due_s = "", float("inf")
        if self._is_verbose:
            took_s = time.monotonic() - self._begun_s
            self._say(f"{done} in {format_duration(took_s)}")
