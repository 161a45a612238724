"""Clocks of several machines, brought to one: offsets between them, with their errors.

Ranks on one kernel share ``CLOCK_MONOTONIC``; which they are, ``clock_identity`` tells.
Between others an offset is bounded by exchanges: who asks another for its time, at
``asked_ns`` by its own clock, and has the answer at ``answered_ns``, knows that the
answer was true at some moment between the two.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ronde.world.environment import boot_identity

DRIFT = 1e-4
"""How fast a clock may run away from another where nobody measured: 100 ppm."""


def clock_identity() -> str:
    """Name the clock that ``time.monotonic_ns()`` reads here.

    Equal in two processes means that they read the same clock: the same boot of the
    same kernel, in the same time namespace.
    """
    try:
        space = Path("/proc/self/ns/time").readlink()
    except OSError:
        return platform.node()
    number = "".join(filter(str.isdigit, str(space)))
    return f"{boot_identity()}-{number}"


@dataclass(frozen=True, slots=True)
class ClockBound:
    """What was measured of an offset at one time.

    Attributes:
        at_ns: When, by the own clock.
        low_ns: The reference's clock is ahead of the own by at least this.
        high_ns: And by at most this.
    """

    at_ns: int
    low_ns: int
    high_ns: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question for the reference's time, and its answer.

    Attributes:
        asked_ns: By the own clock.
        reference_ns: The answer, by the reference's clock.
        answered_ns: By the own clock.
    """

    asked_ns: int
    reference_ns: int
    answered_ns: int


def bound_offset(exchanges: Sequence[Exchange]) -> ClockBound:
    """Return what a quick series of exchanges says together.

    Args:
        exchanges: At least one.
    """
    first, last = exchanges[0].asked_ns, exchanges[-1].answered_ns
    middle = (first + last) // 2
    slack = int((last - first) * DRIFT / 2)
    low = max(each.reference_ns - each.answered_ns for each in exchanges)
    high = min(each.reference_ns - each.asked_ns for each in exchanges)
    return ClockBound(middle, low - slack, high + slack)


@dataclass(frozen=True, slots=True)
class ClockMap:
    """Brings times of one clock to the reference's.

    Attributes:
        points: Time, offset and error, all in ns, ascending in time; linear between
            them. No points: the clocks are one.
        is_measured: False where only the hosts' times of day were compared, whose
            error nobody knows.
    """

    points: tuple[tuple[int, int, int], ...] = ()
    is_measured: bool = True

    @classmethod
    def of_bounds(cls, bounds: Sequence[ClockBound]) -> "ClockMap":
        """Run straight through the middles of what was measured.

        Args:
            bounds: At least one; their order does not matter.
        """
        points = [
            (b.at_ns, (b.low_ns + b.high_ns) // 2, -((b.low_ns - b.high_ns) // 2))
            for b in sorted(bounds, key=lambda bound: bound.at_ns)
        ]
        return cls(tuple(points))

    @classmethod
    def of_wall_clocks(cls, own_ns: int, reference_ns: int) -> "ClockMap":
        """Trust the hosts' times of day.

        Args:
            own_ns: Time of day less monotonic time.
            reference_ns: The same of the reference.
        """
        return cls(((0, own_ns - reference_ns, 0),), is_measured=False)

    def offset_ns(self, at_ns: int) -> int:
        """Return what to add to a time of this clock."""
        if not self.points:
            return 0
        before, after = self._around(at_ns)
        return before[1] + _part(at_ns, before, after, before[1], after[1])

    def error_ns(self, at_ns: int) -> int:
        """Return how far the offset may be wrong; beyond what was measured it grows."""
        if not self.points or not self.is_measured:
            return 0
        first, last = self.points[0], self.points[-1]
        if at_ns <= first[0]:
            return first[2] + int((first[0] - at_ns) * DRIFT)
        if at_ns >= last[0]:
            return last[2] + int((at_ns - last[0]) * DRIFT)
        before, after = self._around(at_ns)
        return before[2] + _part(at_ns, before, after, before[2], after[2])

    def _around(self, at_ns: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Return the points to draw a line through."""
        pairs = list(zip(self.points, self.points[1:], strict=False))
        if not pairs:
            return self.points[0], self.points[0]
        for pair in pairs:
            if at_ns < pair[1][0]:
                return pair
        return pairs[-1]


def _part(
    at_ns: int,
    before: tuple[int, int, int],
    after: tuple[int, int, int],
    low: int,
    high: int,
) -> int:
    span = after[0] - before[0]
    return (high - low) * (at_ns - before[0]) // span if span else 0
