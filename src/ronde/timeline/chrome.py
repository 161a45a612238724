"""Tracks of all ranks as one file in Chrome's trace format.

Note [The form of the file]
    A JSON object: first ``otherData`` with what is known of the ranks and their clocks,
    then ``traceEvents``, one a line, sorted by time. A rank is a ``pid``; operations of
    a process set that overlap lie in several ``tid``, its lanes. An operation is an
    ``X`` named ``NEGOTIATE_<OP>`` from its submission to the agreement, and one named
    ``<OP>`` with its activities inside. At the moment at which the last rank came an
    ``X`` without length bears that rank's number. Arguments name the tensor
    (``tensor``), who came last (``late_rank``) and how long this rank's tensor waited
    for it (``waited_us``). Times are us since the first event, to the ns.
"""

import gzip
import heapq
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from ronde.errors import UsageError
from ronde.timeline.events import Recorded
from ronde.timeline.lateness import (
    AlignedTrack,
    Key,
    align,
    errors_ns,
    find_arrivals,
)
from ronde.timeline.part import FORMAT, Track
from ronde.timeline.spans import RankEvents, begin_ns, us

_WRITE_BYTES = 1 << 18
_TRIES = 8


class _TooLargeError(Exception):
    """The file would pass its limit."""


def write_trace(
    path: Path,
    tracks: Sequence[Track],
    *,
    limit_bytes: int,
    remarks: Sequence[str] = (),
) -> int:
    """Write a trace; an older file of the name is replaced when it is complete.

    Args:
        path: Packed with gzip where its name ends in ``.gz``.
        tracks: Of all ranks.
        limit_bytes: The file's size; the oldest operations are left out to keep it,
            and the file says how many.
        remarks: Sentences to put into the file.

    Returns:
        How many operations were left out for the limit, over all ranks.

    Raises:
        UsageError: The file cannot be written, or the limit does not even hold the
            names of the ranks.
    """
    aligned = align(tracks)
    records = sorted(r.ended_ns for track in aligned for _, r in track.keyed)
    num_kept = len(records)
    try:
        for _ in range(_TRIES):
            since_ns = records[len(records) - num_kept] if num_kept else None
            try:
                _replace(path, _text(aligned, since_ns, remarks), limit_bytes)
            except _TooLargeError as error:
                num_kept = int(num_kept * 0.9 * min(float(str(error)), 0.9))
            else:
                return len(records) - num_kept
    except OSError as error:
        raise UsageError(
            f"timeline must be a file that can be written, got {str(path)!r}: "
            f"{error.strerror}. Name one in a directory that exists."
        ) from error
    raise UsageError(
        f"timeline's limit must hold the names of all ranks, got {limit_bytes} bytes "
        f"for {len(tracks)}. Give a larger --timeline-limit."
    )


def _replace(path: Path, lines: Iterator[tuple[float, str]], limit_bytes: int) -> None:
    """Write beside ``path`` first, so that nobody ever finds half a file."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as raw:
            if path.name.endswith(".gz"):
                with gzip.GzipFile("", "wb", 5, raw, mtime=0) as packed:
                    _write(packed, raw, lines, limit_bytes)
            else:
                _write(raw, raw, lines, limit_bytes)
            _check_size(raw, limit_bytes)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _write(
    to: "IO[bytes] | gzip.GzipFile",
    raw: IO[bytes],
    lines: Iterator[tuple[float, str]],
    limit_bytes: int,
) -> None:
    """Write in large pieces, and stop once the limit is passed."""
    waiting: list[str] = []
    num_waiting = 0
    for done, line in lines:
        waiting.append(line)
        num_waiting += len(line)
        if num_waiting >= _WRITE_BYTES:
            to.write("".join(waiting).encode())
            waiting.clear()
            num_waiting = 0
            _check_size(raw, limit_bytes, done)
    to.write("".join(waiting).encode())


def _check_size(raw: IO[bytes], limit_bytes: int, done: float = 1.0) -> None:
    if raw.tell() > limit_bytes:
        raise _TooLargeError(limit_bytes / raw.tell() * done)


def _text(
    tracks: Sequence[AlignedTrack], since_ns: int | None, remarks: Sequence[str]
) -> Iterator[tuple[float, str]]:
    """Yield the file line by line, each with the share of events written till then."""
    arrivals = find_arrivals((track.rank, track.keyed) for track in tracks)
    kept = [_since(track, since_ns) for track in tracks]
    begins = [begin_ns(record) for _, records in kept for _, record in records]
    start_ns = min(begins, default=0)
    facts = _facts(tracks, [len(records) for _, records in kept], start_ns, remarks)
    yield 0.0, '{"displayTimeUnit": "ms",\n"otherData": '
    yield 0.0, json.dumps(facts) + ',\n"traceEvents": [\n'
    ranks: dict[int, RankEvents] = {}
    for track, records in kept:
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


def _since(
    track: AlignedTrack, since_ns: int | None
) -> tuple[AlignedTrack, list[tuple[Key, Recorded]]]:
    if since_ns is None:
        return track, []
    return track, [pair for pair in track.keyed if pair[1].ended_ns >= since_ns]


def _facts(
    tracks: Sequence[AlignedTrack],
    counts: Sequence[int],
    start_ns: int,
    remarks: Sequence[str],
) -> dict[str, Any]:
    """Return what stands at the head of the file."""
    first = tracks[0].track.header if tracks else None
    start_us = (first.wall_ns + start_ns) // 1000 if first else 0
    ranks = [
        _facts_of(track, count) for track, count in zip(tracks, counts, strict=True)
    ]
    return {
        "ronde_timeline": FORMAT,
        "start_time_since_epoch_in_micros": start_us,
        "start_ns": start_ns,
        "ranks": ranks,
        "remarks": list(remarks),
    }


def _facts_of(track: AlignedTrack, num_kept: int) -> dict[str, Any]:
    header, clock = track.track.header, track.clock
    error_us = errors_ns(track) / 1000 if clock.is_measured else None
    return asdict(header) | {
        "operations": num_kept,
        "dropped": track.track.num_dropped + len(track.keyed) - num_kept,
        "is_whole": track.track.is_whole,
        "clock_offset_us": clock.points[0][1] / 1000 if clock.points else 0.0,
        "clock_error_us": error_us,
        "clock_points": [list(point) for point in clock.points],
    }
