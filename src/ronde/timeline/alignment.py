"""Tracks of all ranks on one clock, and which rank came late; pure.

Ranks on one kernel share ``CLOCK_MONOTONIC``; ``clock_identity`` tells which. Between
others an offset is bounded by exchanges: who asks another for its time, at ``asked_ns``
by its own clock, and has the answer at ``answered_ns``, knows that the answer was true
at some moment between the two.
"""

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ronde.timeline.events import Activity, ClockBound, Recorded
from ronde.timeline.part import Track
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
class ClockReading:
    """One question for the reference's time, and its answer."""

    asked_ns: int  # by the own clock
    reference_ns: int  # the answer, by the reference's clock
    answered_ns: int  # by the own clock


def bound_offset(exchanges: Sequence[ClockReading]) -> ClockBound:
    """Return what a quick series of exchanges says together."""
    first, last = exchanges[0].asked_ns, exchanges[-1].answered_ns
    middle = (first + last) // 2
    slack = int((last - first) * DRIFT / 2)
    low = max(each.reference_ns - each.answered_ns for each in exchanges)
    high = min(each.reference_ns - each.asked_ns for each in exchanges)
    return ClockBound(middle, low - slack, high + slack)


@dataclass(frozen=True, slots=True)
class ClockMap:
    """Brings times of one clock to the reference's."""

    # time, offset and error, all in ns, ascending in time; linear between them. No
    # points: the clocks are one.
    points: tuple[tuple[int, int, int], ...] = ()
    # False where only the hosts' times of day were compared, whose error nobody knows
    is_measured: bool = True

    @classmethod
    def of_bounds(cls, bounds: Sequence[ClockBound]) -> "ClockMap":
        """Run straight through the middles of what was measured."""
        points = [
            (b.at_ns, (b.low_ns + b.high_ns) // 2, -((b.low_ns - b.high_ns) // 2))
            for b in sorted(bounds, key=lambda bound: bound.at_ns)
        ]
        return cls(tuple(points))

    @classmethod
    def of_wall_clocks(cls, own_ns: int, reference_ns: int) -> "ClockMap":
        return cls(((0, own_ns - reference_ns, 0),), is_measured=False)

    def offset_ns(self, at_ns: int) -> int:
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


class OperationKey(NamedTuple):
    """What makes records of several ranks one operation."""

    session: int  # of the recording
    set_id: int  # the process set
    sequence: int  # among the set's operations
    name: str  # on the wire
    turn: int  # how often the rest came before: numbers of sets are used again


@dataclass(frozen=True, slots=True)
class Arrival:
    """When the ranks asked for one operation."""

    late_rank: int  # who asked last; the lowest of those that did
    late_ns: int
    early_ns: int  # when the first did
    num_ranks: int  # how many are known
    margin_ns: int  # how much later than the one before it the last one was

    @classmethod
    def of(cls, times: Iterable[tuple[int, int]]) -> "Arrival":
        ordered = sorted(times)
        late_ns, rank = ordered[-1]
        before_ns, early_ns = ordered[-2][0], ordered[0][0]
        return cls(-rank, late_ns, early_ns, len(ordered), late_ns - before_ns)


@dataclass(slots=True)
class AlignedTrack:
    """A track with its times brought to the common clock."""

    track: Track  # as it was recorded
    clock: ClockMap  # how its times were brought over
    keyed: list[tuple[OperationKey, Recorded]] = field(
        default_factory=list[tuple[OperationKey, Recorded]]
    )
    cycles: list[int] = field(default_factory=list[int])  # on the common clock

    @property
    def rank(self) -> int:
        return self.track.header.rank


def align(tracks: Sequence[Track]) -> list[AlignedTrack]:
    """Bring all tracks to the clock of rank 0, or else of the lowest rank there is."""
    clocks = clock_maps(tracks)
    return [_aligned(track, clocks[track.header.clock]) for track in tracks]


def clock_maps(tracks: Sequence[Track]) -> dict[str, ClockMap]:
    """Return for each clock how it is brought to the reference's."""
    if not tracks:
        return {}
    bounds = {
        name: [b for t in tracks if t.header.clock == name for b in t.bounds]
        for name in dict.fromkeys(track.header.clock for track in tracks)
    }
    first = min(tracks, key=lambda track: track.header.rank).header
    # The reference is rank 0's clock, even where rank 0's own records are missing.
    reference_wall_ns = first.wall_ns
    if bounds[first.clock]:
        own = ClockMap.of_bounds(bounds[first.clock])
        reference_wall_ns -= own.offset_ns(own.points[0][0])
    maps: dict[str, ClockMap] = {}
    for track in tracks:
        name = track.header.clock
        if name in maps:
            continue
        if bounds[name]:
            maps[name] = ClockMap.of_bounds(bounds[name])
        elif name == first.clock:
            maps[name] = ClockMap()
        else:
            maps[name] = ClockMap.of_wall_clocks(
                track.header.wall_ns, reference_wall_ns
            )
    return maps


def find_arrivals(
    ranks: Iterable[tuple[int, Iterable[tuple[OperationKey, Recorded]]]],
) -> dict[OperationKey, Arrival]:
    """Say of each operation that several ranks asked for who asked last."""
    asked: dict[OperationKey, list[tuple[int, int]]] = {}
    for rank, records in ranks:
        for key, record in records:
            if record.submitted_ns:
                asked.setdefault(key, []).append((record.submitted_ns, -rank))
    return {key: Arrival.of(times) for key, times in asked.items() if len(times) > 1}


def _aligned(track: Track, clock: ClockMap) -> AlignedTrack:
    turns: Counter[tuple[int, int, str]] = Counter()
    return AlignedTrack(
        track,
        clock,
        list(_keyed(track, clock, turns)),
        [at_ns + clock.offset_ns(at_ns) for at_ns in track.cycles],
    )


def _keyed(
    track: Track, clock: ClockMap, turns: Counter[tuple[int, int, str]]
) -> Iterator[tuple[OperationKey, Recorded]]:
    session = track.header.session
    for record in track.operations:
        same = (record.set_id, record.sequence, record.name)
        yield OperationKey(session, *same, turns[same]), shift(record, clock)
        turns[same] += 1


def shift(record: Recorded, clock: ClockMap) -> Recorded:
    """Return a record with its times on the common clock; 0 stays "never"."""
    if not clock.points:
        return record
    # One offset for all of it: its parts keep their lengths and stay nested.
    offset = clock.offset_ns(record.ended_ns)
    return record._replace(
        submitted_ns=record.submitted_ns and record.submitted_ns + offset,
        agreed_ns=record.agreed_ns and record.agreed_ns + offset,
        begun_ns=record.begun_ns + offset,
        ended_ns=record.ended_ns + offset,
        activities=tuple(
            Activity(a.name, a.begun_ns + offset, a.ended_ns + offset)
            for a in record.activities
        ),
    )


def waited_ns(record: Recorded, arrival: Arrival | None) -> int:
    """Return how long a rank's tensor waited for the last rank's; 0 where unknown."""
    if arrival is None or not record.submitted_ns:
        return 0
    return max(0, min(arrival.late_ns, record.ended_ns) - record.submitted_ns)


def errors_ns(track: AlignedTrack) -> int:
    """Return how far a track's times may be off, ns, where that is most."""
    ends = [record.ended_ns for _, record in track.keyed]
    if not ends:
        return 0
    # The map takes times of the own clock; the difference is far below its drift.
    offset = track.clock.offset_ns(ends[0])
    return max(track.clock.error_ns(at - offset) for at in (min(ends), max(ends)))
