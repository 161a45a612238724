"""Operations as events of Chrome's trace format, as text: pure."""

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence

from ronde.timeline.events import Recorded
from ronde.timeline.lanes import Lanes, nest
from ronde.timeline.lateness import Arrival, Key, waited_ns

Timed = tuple[int, int, str]
"""Begin in ns; minus the length, so that who holds comes before what it holds; what
follows the time in the event."""

Keyed = tuple[Key, Recorded]


class RankEvents:
    """Lays out one rank's operations.

    Args:
        rank: Becomes the ``pid``.
        host: Its name.

    Attributes:
        records: Operations, to be added before ``events``.
        cycles: When submissions were sent off, likewise.
    """

    def __init__(self, rank: int, host: str) -> None:
        self.records: list[Keyed] = []
        self.cycles: list[int] = []
        self._rank = rank
        self._host = host
        self._lanes: dict[int, Lanes] = {}
        self._tids: dict[tuple[int, int], int] = {}

    def events(self, arrivals: Mapping[Key, Arrival]) -> Iterator[Timed]:
        """Yield everything that happened, in order; it is never all in memory."""
        return heapq.merge(self._operations(arrivals), self._cycle_marks())

    def names(self) -> Iterator[str]:
        """Yield what names the rank."""
        name = f"rank {self._rank} ({self._host})"
        yield self._name("process_name", {"name": name})
        yield self._name("process_sort_index", {"sort_index": self._rank})

    def lane_names(self) -> Iterator[str]:
        """Yield what names the lanes, once ``events`` has found out which it needs."""
        for (set_id, lane), tid in self._tids.items():
            what = {"name": f"process set {set_id}, lane {lane}"}
            yield self._name("thread_name", what, tid)
            yield self._name("thread_sort_index", {"sort_index": tid}, tid)

    def _operations(self, arrivals: Mapping[Key, Arrival]) -> Iterator[Timed]:
        waiting: list[Timed] = []
        for key, record in sorted(self.records, key=lambda pair: begin_ns(pair[1])):
            first_ns = begin_ns(record)
            # Nothing that comes now begins before that.
            while waiting and waiting[0][0] < first_ns:
                yield heapq.heappop(waiting)
            lanes = self._lanes.setdefault(key.set_id, Lanes())
            lane = lanes.place(first_ns, record.ended_ns)
            tid = self._tids.setdefault((key.set_id, lane), len(self._tids) + 1)
            place = f'"pid": {self._rank}, "tid": {tid}'
            for event in _spans(key, record, arrivals.get(key), place):
                heapq.heappush(waiting, event)
        while waiting:
            yield heapq.heappop(waiting)

    def _cycle_marks(self) -> Iterator[Timed]:
        place = f'"pid": {self._rank}, "tid": 0, "s": "p"'
        for at_ns in sorted(self.cycles):
            yield at_ns, 0, f'"ph": "i", "name": "CYCLE_START", {place}'

    def _name(self, name: str, args: Mapping[str, str | int], tid: int = 0) -> str:
        place = {"ph": "M", "pid": self._rank, "tid": tid}
        return json.dumps({"name": name, **place, "args": args})


def begin_ns(record: Recorded) -> int:
    """Return when an operation is first heard of on its rank."""
    return min(record.submitted_ns or record.begun_ns, record.begun_ns)


def _spans(
    key: Key, record: Recorded, arrival: Arrival | None, place: str
) -> Iterator[Timed]:
    """Yield an operation's events on one rank."""
    first_ns = begin_ns(record)
    tensor = json.dumps(record.name)
    late = "" if arrival is None else _late(record, arrival)
    if record.agreed_ns and record.submitted_ns:
        span = (first_ns, min(max(record.agreed_ns, first_ns), record.begun_ns))
        args = f'"tensor": {tensor}{late}'
        yield _x(span, f'"NEGOTIATE_{record.kind}"', place, args)
    else:
        span = (record.begun_ns, record.ended_ns)
    yield from _tick(arrival, span, place)
    since_us = _since(record, record.submitted_ns), _since(record, record.agreed_ns)
    what = (
        f'"tensor": {tensor}, "set": {key.set_id}, "sequence": {key.sequence}, '
        f'"session": {key.session}, "dtype": "{record.dtype}", '
        f'"shape": {json.dumps(record.shape)}, "fused": {record.num_fused}, '
        f'"submitted_us": {since_us[0]}, "agreed_us": {since_us[1]}{late}'
    )
    span = (record.begun_ns, record.ended_ns)
    yield _x(span, f'"{record.kind}"', place, what)
    yield from _parts(record, span, place)


def _parts(record: Recorded, span: tuple[int, int], place: str) -> Iterator[Timed]:
    inner: Sequence[tuple[int, int]] = nest([a[1:] for a in record.activities], span)
    for activity, part in zip(record.activities, inner, strict=True):
        yield _x(part, json.dumps(activity.name), place)


def _since(record: Recorded, at_ns: int) -> str:
    """Return a time as one relative to the begin; null for what never was."""
    return us(at_ns - record.begun_ns) if at_ns else "null"


def _late(record: Recorded, arrival: Arrival) -> str:
    return (
        f', "late_rank": {arrival.late_rank}, '
        f'"waited_us": {us(waited_ns(record, arrival))}, '
        f'"late_by_us": {us(arrival.margin_ns)}'
    )


def _tick(
    arrival: Arrival | None, span: tuple[int, int], place: str
) -> Iterator[Timed]:
    if arrival is not None:
        at_ns = min(max(arrival.late_ns, span[0]), span[1])
        yield _x((at_ns, at_ns), f'"{arrival.late_rank}"', place)


def _x(span: tuple[int, int], name: str, place: str, args: str = "") -> Timed:
    length = span[1] - span[0]
    more = f', "args": {{{args}}}' if args else ""
    text = f'"dur": {us(length)}, "ph": "X", "name": {name}, {place}{more}'
    return span[0], -length, text


def us(ns: int) -> str:
    """Write nanoseconds as microseconds, exactly."""
    sign = "-" if ns < 0 else ""
    return f"{sign}{abs(ns) // 1000}.{abs(ns) % 1000:03}"
