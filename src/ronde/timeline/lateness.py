"""Which rank came late: pure, over the tracks of all ranks, on one clock."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ronde.timeline.clocks import ClockMap
from ronde.timeline.events import Activity, Recorded
from ronde.timeline.part import Track


class Key(NamedTuple):
    """What makes records of several ranks one operation.

    Attributes:
        session: Of the recording.
        set_id: The process set.
        sequence: Among the set's operations.
        name: On the wire.
        turn: How often the rest came before: numbers of sets are used again.
    """

    session: int
    set_id: int
    sequence: int
    name: str
    turn: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """When the ranks asked for one operation.

    Attributes:
        late_rank: Who asked last; the lowest of those that did.
        late_ns: When.
        early_ns: When the first did.
        num_ranks: How many are known.
        margin_ns: How much later than the one before it the last one was.
    """

    late_rank: int
    late_ns: int
    early_ns: int
    num_ranks: int
    margin_ns: int

    @classmethod
    def of(cls, times: Iterable[tuple[int, int]]) -> "Arrival":
        """Find who was last.

        Args:
            times: Time in ns and minus the rank, of at least two.
        """
        ordered = sorted(times)
        late_ns, rank = ordered[-1]
        before_ns, early_ns = ordered[-2][0], ordered[0][0]
        return cls(-rank, late_ns, early_ns, len(ordered), late_ns - before_ns)


@dataclass(slots=True)
class AlignedTrack:
    """A track with its times brought to the common clock.

    Attributes:
        track: As it was recorded.
        clock: How its times were brought over.
        keyed: Each operation with its key.
        cycles: On the common clock.
    """

    track: Track
    clock: ClockMap
    keyed: list[tuple[Key, Recorded]] = field(
        default_factory=list[tuple[Key, Recorded]]
    )
    cycles: list[int] = field(default_factory=list[int])

    @property
    def rank(self) -> int:
        """Whose it is."""
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
    ranks: Iterable[tuple[int, Iterable[tuple[Key, Recorded]]]],
) -> dict[Key, Arrival]:
    """Say of each operation that several ranks asked for who asked last.

    Args:
        ranks: Each with its operations, on the common clock.
    """
    asked: dict[Key, list[tuple[int, int]]] = {}
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
) -> Iterator[tuple[Key, Recorded]]:
    session = track.header.session
    for record in track.operations:
        same = (record.set_id, record.sequence, record.name)
        yield Key(session, *same, turns[same]), shift(record, clock)
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
