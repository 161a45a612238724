"""Alignment of all ranks' records to one clock, and the last rank of each operation.

Ranks on one kernel share ``CLOCK_MONOTONIC``; ``clock_identity`` names it. The offset
of another clock is bounded by an exchange: the reference's time in the answer was read
between ``asked_ns`` and ``answered_ns`` on the asking rank's clock.
"""

import platform
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ronde.timeline.events import Activity, ClockBound, Recorded
from ronde.timeline.part import Track
from ronde.world.environment import boot_identity

DRIFT = 1e-4  # bound of the drift between two clocks


def clock_identity() -> str:
    """Return the identity of ``time.monotonic_ns()``: boot ID and time namespace."""
    try:
        space = Path("/proc/self/ns/time").readlink()
    except OSError:
        return platform.node()
    number = "".join(filter(str.isdigit, str(space)))
    return f"{boot_identity()}-{number}"


class ClockReading(NamedTuple):
    """One exchange of timestamps with the reference clock."""

    asked_ns: int  # on this rank's clock
    reference_ns: int  # on the reference's clock
    answered_ns: int  # on this rank's clock


def bound_offset(exchanges: Sequence[ClockReading]) -> ClockBound:
    """Return the bounds of a clock's offset from exchanges in quick succession."""
    first, last = exchanges[0].asked_ns, exchanges[-1].answered_ns
    middle = (first + last) // 2
    slack = int((last - first) * DRIFT / 2)
    low = max(each.reference_ns - each.answered_ns for each in exchanges)
    high = min(each.reference_ns - each.asked_ns for each in exchanges)
    return ClockBound(middle, low - slack, high + slack)


class ClockMap(NamedTuple):
    """Map from one clock to the reference's."""

    # Time, offset and error in ns, in order of time; linear between the points. Without
    # points both clocks are the same.
    points: tuple[tuple[int, int, int], ...] = ()
    is_measured: bool = True  # False: offset from the time of day, error unknown

    @classmethod
    def of_bounds(cls, bounds: Sequence[ClockBound]) -> "ClockMap":
        points = [
            (b.at_ns, (b.low_ns + b.high_ns) // 2, -((b.low_ns - b.high_ns) // 2))
            for b in sorted(bounds, key=lambda bound: bound.at_ns)
        ]
        return cls(tuple(points))

    def offset_ns(self, at_ns: int) -> int:
        return self._interpolate(at_ns, 1) if self.points else 0

    def error_ns(self, at_ns: int) -> int:
        """Return the offset's largest error, which grows outside the measured times."""
        if not self.points or not self.is_measured:
            return 0
        inside_ns = min(max(at_ns, self.points[0][0]), self.points[-1][0])
        drift_ns = int(abs(at_ns - inside_ns) * DRIFT)
        return self._interpolate(inside_ns, 2) + drift_ns

    def _interpolate(self, at_ns: int, column: int) -> int:
        index = bisect_right(self.points, at_ns, key=lambda point: point[0])
        index = min(index, len(self.points) - 1)
        before, after = self.points[max(index - 1, 0)], self.points[index]
        span = after[0] - before[0]
        if not span:
            return before[column]
        rise = after[column] - before[column]
        return before[column] + rise * (at_ns - before[0]) // span


class OperationKey(NamedTuple):
    """Key that the ranks' records of one operation share."""

    session: int  # number of the recording
    set_id: int  # the process set
    sequence: int  # number among the set's operations
    name: str  # on the wire
    turn: int  # number of earlier records with equal fields, as set ids are reused


class Arrival(NamedTuple):
    """The last rank to submit an operation, and the first and last submission times."""

    late_rank: int  # the last rank; of several, the lowest
    late_ns: int
    early_ns: int  # time of the first rank
    margin_ns: int  # between the last rank and the one before it

    @classmethod
    def of(cls, times: Iterable[tuple[int, int]]) -> "Arrival":
        """Make an arrival from at least two pairs of a time and a negated rank."""
        ordered = sorted(times)
        late_ns, rank = ordered[-1]
        return cls(-rank, late_ns, ordered[0][0], late_ns - ordered[-2][0])


class AlignedTrack(NamedTuple):
    """A track with its times on the common clock."""

    track: Track
    clock: ClockMap
    keyed: list[tuple[OperationKey, Recorded]]
    cycles: list[int]

    @property
    def rank(self) -> int:
        return self.track.header.rank

    @property
    def error_us(self) -> float | None:
        """The largest possible error of the track's times; None if unmeasured."""
        if not self.clock.is_measured:
            return None
        ends = [record.ended_ns for _, record in self.keyed]
        if not ends:
            return 0.0
        # The map needs times on the rank's own clock.
        offset = self.clock.offset_ns(ends[0])
        bounds = (min(ends), max(ends))
        return max(self.clock.error_ns(at - offset) for at in bounds) / 1000


def align(tracks: Sequence[Track]) -> list[AlignedTrack]:
    """Align all tracks to rank 0's clock, or to the lowest rank's if it is unknown."""
    clocks = _clock_maps(tracks)
    aligned: list[AlignedTrack] = []
    for track in tracks:
        clock, session = clocks[track.header.clock], track.header.session
        keyed = with_keys((session, _shift(each, clock)) for each in track.operations)
        cycles = [at_ns + clock.offset_ns(at_ns) for at_ns in track.cycles]
        aligned.append(AlignedTrack(track, clock, keyed, cycles))
    return aligned


def with_keys(
    records: Iterable[tuple[int, Recorded]],
) -> list[tuple[OperationKey, Recorded]]:
    """Add keys to one rank's records, which are given in order with their sessions."""
    turns: Counter[tuple[int, int, int, str]] = Counter()
    keyed: list[tuple[OperationKey, Recorded]] = []
    for session, record in records:
        same = (session, record.set_id, record.sequence, record.name)
        keyed.append((OperationKey(*same, turns[same]), record))
        turns[same] += 1
    return keyed


def _clock_maps(tracks: Sequence[Track]) -> dict[str, ClockMap]:
    if not tracks:
        return {}
    bounds: dict[str, list[ClockBound]] = {}
    for track in tracks:
        bounds.setdefault(track.header.clock, []).extend(track.bounds)
    maps = {name: ClockMap.of_bounds(found) for name, found in bounds.items() if found}
    first = min((track.header for track in tracks), key=lambda header: header.rank)
    # The reference is rank 0's clock, even where rank 0's own records are missing.
    own = maps.setdefault(first.clock, ClockMap())
    wall_ns = first.wall_ns
    wall_ns -= own.offset_ns(own.points[0][0]) if own.points else 0
    for track in tracks:
        by_wall = ((0, track.header.wall_ns - wall_ns, 0),)
        maps.setdefault(track.header.clock, ClockMap(by_wall, is_measured=False))
    return maps


def find_arrivals(
    ranks: Iterable[tuple[int, Iterable[tuple[OperationKey, Recorded]]]],
) -> dict[OperationKey, Arrival]:
    """Return the ``Arrival`` of each operation that several ranks submitted."""
    submitted: dict[OperationKey, list[tuple[int, int]]] = {}
    for rank, records in ranks:
        for key, record in records:
            if record.submitted_ns:
                submitted.setdefault(key, []).append((record.submitted_ns, -rank))
    return {
        key: Arrival.of(times) for key, times in submitted.items() if len(times) > 1
    }


def _shift(record: Recorded, clock: ClockMap) -> Recorded:
    """Shift a record's times to the common clock, except 0, which means none."""
    if not clock.points:
        return record
    # One offset for all times, so that activities keep their lengths and stay nested.
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
    """Return the time a rank's tensor waited for the last rank; 0 if unknown."""
    if arrival is None or not record.submitted_ns:
        return 0
    return max(0, min(arrival.late_ns, record.ended_ns) - record.submitted_ns)
