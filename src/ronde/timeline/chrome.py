"""Writer of a merged trace in Chrome's trace format.

Note [The form of the file]
    A JSON object: first ``otherData`` with the ranks and their clocks, then
    ``traceEvents``, one per line, sorted by time. A rank is a ``pid``. A process set
    has several lanes, each a ``tid``, if its operations overlap. An operation is an
    ``X`` named ``NEGOTIATE_<OP>`` from its submission to the agreement, and an ``X``
    named ``<OP>`` with its activities inside. At the last rank's submission an ``X`` of
    zero length shows that rank's number. Arguments are the tensor (``tensor``), the
    last rank (``late_rank``) and the wait of this rank's tensor for that rank
    (``waited_us``). Times are in us since the first event, with three decimals.
"""

import gzip
import heapq
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from ronde.errors import UsageError
from ronde.timeline.alignment import (
    AlignedTrack,
    Arrival,
    OperationKey,
    align,
    find_arrivals,
    waited_ns,
)
from ronde.timeline.events import Recorded
from ronde.timeline.part import FORMAT, Track

Span = tuple[int, int]  # begin and end


class Lanes:
    """Allocator of lanes: a span gets the lowest lane in which it overlaps no other.

    Spans must be given in order of their begin.
    """

    def __init__(self) -> None:
        self._ends: list[int] = []  # end of each lane's last span

    def allocate(self, begin: int, end: int) -> int:
        free = (lane for lane, last in enumerate(self._ends) if last <= begin)
        lane = next(free, len(self._ends))
        self._ends[lane : lane + 1] = [max(end, begin + 1)]
        return lane


def nest(spans: Iterable[Span], within: Span) -> Sequence[Span]:
    """Cut spans so that each lies within the spans in which it begins."""
    given = list(spans)
    cut: list[Span] = [within] * len(given)
    open_ends: list[int] = [within[1]]
    order = sorted(range(len(given)), key=lambda i: (given[i][0], -given[i][1]))
    for index in order:
        begin, end = given[index]
        begin = min(max(begin, within[0]), within[1])
        while len(open_ends) > 1 and open_ends[-1] <= begin:
            open_ends.pop()
        end = min(max(end, begin), open_ends[-1])
        cut[index] = (begin, end)
        open_ends.append(end)
    return cut


Timed = tuple[int, int, str]
"""Begin in ns, negative length, to sort a span before those inside it, and event."""
Keyed = tuple[OperationKey, Recorded]


class RankEvents:
    """Generator of the trace events of one rank."""

    def __init__(self, rank: int, host: str) -> None:
        self.records: list[Keyed] = []
        self.cycles: list[int] = []
        self._rank = rank
        self._host = host
        self._lanes: dict[int, Lanes] = {}
        self._tids: dict[tuple[int, int], int] = {}

    def events(self, arrivals: Mapping[OperationKey, Arrival]) -> Iterator[Timed]:
        """Yield all events in order, without holding all of them in memory."""
        mark = f'"ph": "i", "name": "CYCLE_START", "pid": {self._rank}, "tid": 0'
        marks = ((at_ns, 0, f'{mark}, "s": "p"') for at_ns in sorted(self.cycles))
        return heapq.merge(self._operations(arrivals), marks)

    def names(self) -> list[str]:
        name = f"rank {self._rank} ({self._host})"
        ids = {"pid": self._rank, "tid": 0}
        return name_events("process", ids, {"name": name}, self._rank)

    def lane_names(self) -> Iterator[str]:
        """Yield the names of the lanes that ``events`` has used."""
        for (set_id, lane), tid in self._tids.items():
            name = {"name": f"process set {set_id}, lane {lane}"}
            ids = {"pid": self._rank, "tid": tid}
            yield from name_events("thread", ids, name, tid)

    def _operations(self, arrivals: Mapping[OperationKey, Arrival]) -> Iterator[Timed]:
        waiting: list[Timed] = []
        for key, record in sorted(self.records, key=lambda pair: begin_ns(pair[1])):
            first_ns = begin_ns(record)
            # No later event begins before this time.
            while waiting and waiting[0][0] < first_ns:
                yield heapq.heappop(waiting)
            lanes = self._lanes.setdefault(key.set_id, Lanes())
            lane = lanes.allocate(first_ns, record.ended_ns)
            tid = self._tids.setdefault((key.set_id, lane), len(self._tids) + 1)
            ids = f'"pid": {self._rank}, "tid": {tid}'
            for event in _spans(key, record, arrivals.get(key), ids):
                heapq.heappush(waiting, event)
        while waiting:
            yield heapq.heappop(waiting)


def name_events(
    kind: str, ids: Mapping[str, int], name: Mapping[str, object], index: int
) -> list[str]:
    """Return events that set the name and order of a ``process`` or ``thread``."""
    about = {f"{kind}_name": name, f"{kind}_sort_index": {"sort_index": index}}
    return [
        json.dumps({"name": each, "ph": "M", **ids, "args": args})
        for each, args in about.items()
    ]


def begin_ns(record: Recorded) -> int:
    return min(record.submitted_ns or record.begun_ns, record.begun_ns)


def _spans(
    key: OperationKey, record: Recorded, arrival: Arrival | None, ids: str
) -> Iterator[Timed]:
    def since(at_ns: int) -> str:
        return us(at_ns - record.begun_ns) if at_ns else "null"

    first_ns = begin_ns(record)
    tensor, late = json.dumps(record.name), ""
    if arrival is not None:
        late = (
            f', "late_rank": {arrival.late_rank}, '
            f'"waited_us": {us(waited_ns(record, arrival))}, '
            f'"late_by_us": {us(arrival.margin_ns)}'
        )
    whole = span = (record.begun_ns, record.ended_ns)
    if record.agreed_ns and record.submitted_ns:
        span = (first_ns, min(max(record.agreed_ns, first_ns), record.begun_ns))
        args = f'"tensor": {tensor}{late}'
        yield _x(span, f'"NEGOTIATE_{record.kind}"', ids, args)
    if arrival is not None:
        at_ns = min(max(arrival.late_ns, span[0]), span[1])
        yield _x((at_ns, at_ns), f'"{arrival.late_rank}"', ids)
    facts = (
        f'"tensor": {tensor}, "set": {key.set_id}, "sequence": {key.sequence}, '
        f'"session": {key.session}, "dtype": "{record.dtype}", '
        f'"shape": {json.dumps(record.shape)}, "fused": {record.num_fused}, '
        f'"submitted_us": {since(record.submitted_ns)}, '
        f'"agreed_us": {since(record.agreed_ns)}{late}'
    )
    yield _x(whole, f'"{record.kind}"', ids, facts)
    inner = nest([(a.begun_ns, a.ended_ns) for a in record.activities], whole)
    for activity, part in zip(record.activities, inner, strict=True):
        yield _x(part, json.dumps(activity.name), ids)


def _x(span: tuple[int, int], name: str, ids: str, args: str = "") -> Timed:
    length = span[1] - span[0]
    more = f', "args": {{{args}}}' if args else ""
    text = f'"dur": {us(length)}, "ph": "X", "name": {name}, {ids}{more}'
    return span[0], -length, text


def us(ns: int) -> str:
    sign = "-" if ns < 0 else ""
    return f"{sign}{abs(ns) // 1000}.{abs(ns) % 1000:03}"


_TRIES = 8


def write_trace(
    path: Path,
    tracks: Sequence[Track],
    *,
    limit_bytes: int,
    remarks: Sequence[str] = (),
) -> int:
    """Write a trace, leaving out the oldest operations if it exceeds the limit.

    An existing file is replaced once the new file is complete. Return the number of
    operations that were left out.
    """
    aligned = align(tracks)
    records = sorted(r.ended_ns for track in aligned for _, r in track.keyed)
    num_kept = len(records)
    try:
        for _ in range(_TRIES):
            since_ns = records[len(records) - num_kept] if num_kept else None
            lines = _text(aligned, since_ns, remarks)
            share = _replace(path, lines, limit_bytes)
            if share == 1:
                return len(records) - num_kept
            num_kept = int(num_kept * 0.9 * min(share, 0.9))
    except OSError as error:
        raise UsageError(
            f"cannot write the timeline {str(path)!r}: {error.strerror}. Name a file "
            "in a directory that exists."
        ) from error
    raise UsageError(
        f"the timeline's limit of {limit_bytes} bytes is too small even for the names "
        "of the ranks. Give a larger --timeline-limit."
    )


def _replace(path: Path, lines: Iterator[tuple[float, str]], limit_bytes: int) -> float:
    """Write a file; return 1, or the share that fits if the file exceeds the limit."""
    # A temporary file first, so that ``path`` is never incomplete.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    draft, is_packed = Path(name), path.name.endswith(".gz")
    try:
        with os.fdopen(descriptor, "wb") as raw:
            file = gzip.GzipFile("", "wb", 5, raw, mtime=0) if is_packed else raw
            with TextIOWrapper(file, "utf-8") as text:
                for done, line in lines:
                    text.write(line)
                    if raw.tell() > limit_bytes:
                        return limit_bytes / raw.tell() * done
        if (size_bytes := draft.stat().st_size) > limit_bytes:
            return limit_bytes / size_bytes
        draft.replace(path)
        return 1
    finally:
        draft.unlink(missing_ok=True)


def _text(
    tracks: Sequence[AlignedTrack], since_ns: int | None, remarks: Sequence[str]
) -> Iterator[tuple[float, str]]:
    """Yield the lines of the file, each with the share of the events before it."""
    arrivals = find_arrivals((track.rank, track.keyed) for track in tracks)
    kept: list[list[Keyed]] = [
        [] if since_ns is None else [k for k in t.keyed if k[1].ended_ns >= since_ns]
        for t in tracks
    ]
    begins = [begin_ns(record) for records in kept for _, record in records]
    start_ns = min(begins, default=0)
    facts = _facts(tracks, [len(records) for records in kept], start_ns)
    yield 0.0, '{"displayTimeUnit": "ms",\n"otherData": '
    yield 0.0, json.dumps({**facts, "remarks": remarks}) + ',\n"traceEvents": [\n'
    ranks: dict[int, RankEvents] = {}
    for track, records in zip(tracks, kept, strict=True):
        host = track.track.header.host
        own = ranks.setdefault(track.rank, RankEvents(track.rank, host))
        own.records += records
        own.cycles += [at_ns for at_ns in track.cycles if at_ns >= start_ns]
    yield 0.0, ",\n".join(name for own in ranks.values() for name in own.names())
    num_done, num_records = 0, max(len(begins), 1)
    for at_ns, _, rest in heapq.merge(*(o.events(arrivals) for o in ranks.values())):
        num_done += '"fused"' in rest
        yield num_done / num_records, f',\n{{"ts": {us(at_ns - start_ns)}, {rest}}}'
    for own in ranks.values():
        yield 1.0, "".join(f",\n{name}" for name in own.lane_names())
    yield 1.0, "\n]}\n"


def _facts(
    tracks: Sequence[AlignedTrack], counts: Sequence[int], start_ns: int
) -> dict[str, Any]:
    ranks: list[dict[str, Any]] = []
    for track, num_kept in zip(tracks, counts, strict=True):
        own, clock = track.track, track.clock
        ranks.append(
            asdict(own.header)
            | {
                "operations": num_kept,
                "dropped": own.num_dropped + len(track.keyed) - num_kept,
                "is_whole": own.is_whole,
                "clock_offset_us": clock.points[0][1] / 1000 if clock.points else 0.0,
                "clock_error_us": track.error_us,
                "clock_points": [list(point) for point in clock.points],
            }
        )
    wall_ns = tracks[0].track.header.wall_ns + start_ns if tracks else 0
    return {
        "ronde_timeline": FORMAT,
        "start_time_since_epoch_in_micros": wall_ns // 1000,
        "start_ns": start_ns,
        "ranks": ranks,
    }
