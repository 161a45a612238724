"""Readers of timelines: merged traces, ranks' parts and Horovod's files."""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from ronde.errors import UsageError
from ronde.timeline.alignment import (
    Arrival,
    OperationKey,
    align,
    find_arrivals,
    with_keys,
)
from ronde.timeline.events import Recorded
from ronde.timeline.part import FORMAT, MAGIC, SUFFIX, Track, is_part, read_parts


class RankTrace(NamedTuple):
    """The operations of one rank, and the completeness of its records."""

    rank: int
    host: str  # empty if unknown
    clock_error_us: float | None  # relative to rank 0's clock; None if unmeasured
    num_dropped: int  # number of missing operations
    is_whole: bool  # the recording was closed
    operations: Sequence[tuple[OperationKey, Recorded]]  # times are on the common clock


class Trace(NamedTuple):
    """The records of all ranks that were read from one timeline."""

    size: int  # number of ranks of the job; 0 if unknown
    ranks: Sequence[RankTrace]
    arrivals: Mapping[OperationKey, Arrival]  # if known
    remarks: Sequence[str]  # sentences about missing data


_NEGOTIATE = "NEGOTIATE_"
_ALONE = (
    "This is the timeline of rank 0 alone. It does not show what the other ranks did, "
    "or how long they waited."
)

_Done = tuple[Recorded, dict[int, int]]
"""An operation, and the time in ns at which each rank was ready, by rank."""


@dataclass(slots=True)
class _Tensor:
    """State of one tensor while its events are read."""

    name: str
    depth: int = 0
    ticks: dict[int, int] = field(default_factory=dict[int, int])
    negotiation: tuple[int, int] | None = None
    kind: str = ""
    begun_ns: int = 0
    num_done: int = 0

    def add(self, event: Mapping[str, Any]) -> _Done | None:
        phase, at_ns = event.get("ph"), round(event.get("ts", 0) * 1000)
        if phase == "X" and str(event.get("name")).isdecimal():
            self.ticks[int(event["name"])] = at_ns
        elif phase == "B":
            self.depth += 1
            if self.depth == 1:
                self.kind, self.begun_ns = event["name"], at_ns
        elif phase == "E" and self.depth:
            self.depth -= 1
            if self.depth == 0:
                return self._end(event, at_ns)
        return None

    def _end(self, event: Mapping[str, Any], at_ns: int) -> _Done | None:
        if self.kind.startswith(_NEGOTIATE):
            self.negotiation = (self.begun_ns, at_ns)
            return None
        begin, agreed = self.negotiation or (self.begun_ns, 0)
        about = event.get("args", {})
        shape = tuple(map(int, re.findall(r"\b\d+\b", about.get("shape", ""))))
        times = (self.ticks.get(0, begin) or 1, agreed, self.begun_ns, at_ns)
        head = (0, self.num_done, self.name, self.kind)
        record = Recorded(*head, *times, about.get("dtype", ""), shape, num_fused=1)
        ticks, self.ticks, self.negotiation = self.ticks, {}, None
        self.num_done += 1
        return record, ticks


def _read_horovod(events: Iterable[Mapping[str, Any]]) -> Trace:
    tensors: dict[Any, _Tensor] = {}
    operations: list[tuple[OperationKey, Recorded]] = []
    arrivals: dict[OperationKey, Arrival] = {}
    for event in events:
        pid = event.get("pid")
        if event.get("name") == "process_name" and "name" in event.get("args", {}):
            tensors[pid] = _Tensor(event["args"]["name"])
        elif pid in tensors and (done := tensors[pid].add(event)) is not None:
            record, ticks = done
            key = OperationKey(0, 0, record.sequence, record.name, 0)
            operations.append((key, record))
            if len(ticks) > 1:
                arrivals[key] = Arrival.of((at, -rank) for rank, at in ticks.items())
    if not tensors:
        raise UsageError(
            "the timeline has no names of tensors or ranks. It is not from ronde or "
            "Horovod."
        )
    num_blind = len(operations) - len(arrivals)
    remarks = [_ALONE]
    if num_blind:
        remarks.append(
            f"It does not show which rank came last for {num_blind} of "
            f"{len(operations)} operations: Horovod marks the ranks only where it "
            "negotiates anew."
        )
    rank = RankTrace(0, "", None, 0, is_whole=True, operations=operations)
    return Trace(0, [rank], arrivals, remarks)


def _read_merged(facts: Mapping[str, Any], lines: Iterable[str]) -> Trace:
    if facts["ronde_timeline"] != FORMAT:
        raise UsageError(
            f"this timeline has version {facts['ronde_timeline']!r}, but this ronde "
            f"reads version {FORMAT}. Read it with the version of ronde that wrote it."
        )
    found: dict[int, list[tuple[int, Recorded]]] = {}
    for line in lines:
        if '"tensor"' not in line or '"fused"' not in line:
            continue
        event = json.loads(line.rstrip().rstrip(","))
        own = (event["args"]["session"], _record(event))
        found.setdefault(event["pid"], []).append(own)
    records = {rank: with_keys(own) for rank, own in found.items()}
    arrivals = find_arrivals(records.items())
    recordings = [
        RankTrace(
            rank=each["rank"],
            host=each["host"],
            clock_error_us=each["clock_error_us"],
            num_dropped=each["dropped"],
            is_whole=each["is_whole"],
            # All operations belong to the first recording.
            operations=records.pop(each["rank"], ()),
        )
        for each in facts["ranks"]
    ]
    size = max((each["size"] for each in facts["ranks"]), default=0)
    return Trace(size, _joined(recordings), arrivals, facts["remarks"])


def _joined(recordings: Iterable[RankTrace]) -> list[RankTrace]:
    """Concatenate each rank's recordings; return the ranks in order."""
    ranks: dict[int, RankTrace] = {}
    for own in recordings:
        before = ranks.setdefault(own.rank, own)
        if before is own:
            continue
        one, other = before.clock_error_us, own.clock_error_us
        ranks[own.rank] = before._replace(
            clock_error_us=None if one is None or other is None else max(one, other),
            num_dropped=before.num_dropped + own.num_dropped,
            is_whole=before.is_whole and own.is_whole,
            operations=[*before.operations, *own.operations],
        )
    return [ranks[rank] for rank in sorted(ranks)]


def _record(event: Mapping[str, Any]) -> Recorded:
    args = event["args"]
    begun_ns = round(event["ts"] * 1000)

    def absolute_ns(since_us: float | None) -> int:
        # 0 means none, so a time of 0 becomes 1.
        return 0 if since_us is None else (begun_ns + round(since_us * 1000)) or 1

    return Recorded(
        set_id=args["set"],
        sequence=args["sequence"],
        name=args["tensor"],
        kind=event["name"],
        submitted_ns=absolute_ns(args["submitted_us"]),
        agreed_ns=absolute_ns(args["agreed_us"]),
        begun_ns=begun_ns,
        ended_ns=begun_ns + round(event["dur"] * 1000),
        dtype=args["dtype"],
        shape=tuple(args["shape"]),
        num_fused=args["fused"],
    )


def read_trace(path: Path) -> Trace:
    """Read a merged trace, a rank's part, a directory of parts, or Horovod's file."""
    try:
        head = b""
        if not path.is_dir():
            with path.open("rb") as file:
                head = file.read(4096)
        if path.is_dir() or is_part(head):
            return trace_of(read_part_files([path]))
        opened = gzip.open if head.startswith(MAGIC) else open
        with opened(path, "rt", encoding="utf-8") as lines:
            return _read_json(cast("IO[str]", lines), path)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot read the timeline {str(path)!r}: {error}.") from error


def read_part_files(paths: Sequence[Path]) -> list[Track]:
    """Read ranks' parts from files or from directories of such files."""
    files = [
        file
        for path in paths
        for file in (sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path])
    ]
    try:
        blobs = {str(file): file.read_bytes() for file in dict.fromkeys(files)}
    except OSError as error:
        raise UsageError(
            f"cannot read the timeline part {error.filename!r}: {error.strerror}."
        ) from error
    for name, blob in blobs.items():
        if not is_part(blob):
            raise UsageError(
                f"{name!r} is not a timeline part (*{SUFFIX}), which a rank writes. "
                "A merged trace cannot be merged again."
            )
    tracks = read_parts(blobs.values(), "the parts")
    if not tracks:
        raise UsageError(
            f"found no timeline parts (*{SUFFIX}) in {', '.join(map(str, paths))}."
        )
    return tracks


def trace_of(tracks: Sequence[Track]) -> Trace:
    aligned = align(tracks)
    recordings: list[RankTrace] = []
    for each in aligned:
        host, own = each.track.header.host, each.track
        about = (each.error_us, own.num_dropped, own.is_whole, each.keyed)
        recordings.append(RankTrace(each.rank, host, *about))
    size = max((track.header.size for track in tracks), default=0)
    arrivals = find_arrivals((track.rank, track.keyed) for track in aligned)
    return Trace(size, _joined(recordings), arrivals, [])


def _read_json(lines: "IO[str]", path: Path) -> Trace:
    """Read a merged trace line by line, or Horovod's file at once."""
    try:
        first, second = lines.readline(), lines.readline()
        if second.startswith('"otherData": '):
            return _read_merged(json.loads(second.partition(": ")[2][:-2]), lines)
        text = first + second + lines.read()
        try:
            content: Any = json.loads(text)
        except ValueError:
            # Horovod before 0.21 never wrote the end of the file.
            content = json.loads(text.rstrip().rstrip(",") + "]")
        if isinstance(content, list):
            return _read_horovod(cast("list[dict[str, Any]]", content))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{str(path)!r} is not valid JSON in Chrome's trace format: {error}. "
            "It may be damaged."
        ) from error
    raise UsageError(
        f"{str(path)!r} is JSON, but not a timeline of ronde or Horovod. Open other "
        "traces in ui.perfetto.dev."
    )
