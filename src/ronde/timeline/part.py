"""One rank's records: format, reader, and files of limited size.

Note [The form of a part]
    A part is one or more *segments*, each a gzip stream of lines of JSON. The first
    line of a segment is an object, its header. The others are arrays::

        ["d", number, set_id, name, kind, dtype, [shape]]     defines the number
        [number, sequence, ended, submitted, agreed, begun, num_fused, ...activities]
        ["c", at]                                              a cycle
        ["b", at, low, high]                                   a bound of the clock
        ["e", num_recorded, num_lost]                          the end of a recording

    ``ended`` is the time since the previous ``ended``. ``submitted``, ``agreed`` and
    ``begun`` are times before ``ended``, or -1 for none. An activity is a name, a time
    after ``begun`` and a length. Times are in ns. A truncated stream is read up to its
    last whole line.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from ronde.errors import UsageError
from ronde.timeline.events import Activity, ClockBound, Recorded

FORMAT = 1  # incremented by incompatible changes
MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class PartHeader:
    """The rank, host, clock and session of the records in a segment."""

    rank: int
    size: int  # number of ranks
    host: str
    clock: str
    wall_ns: int  # time of day minus monotonic time
    session: int = 0  # number of the recording
    num_before: int = 0  # records in earlier segments


@dataclass(slots=True)
class Track:
    """All records of one rank in one recording."""

    header: PartHeader
    operations: list[Recorded] = field(default_factory=list[Recorded])
    cycles: list[int] = field(default_factory=list[int])
    # Bounds of the offset of the rank's clock to rank 0's.
    bounds: list[ClockBound] = field(default_factory=list[ClockBound])
    num_dropped: int = 0  # recorded operations that are missing
    is_whole: bool = False  # the recording was closed
    num_recorded: int = 0

    def add_line(self, line: list[Any], kinds: list[list[Any]], last_ns: int) -> int:
        """Add a line; return the time to which the next line is relative."""
        match line:
            case ["d", _, *kind]:
                kinds.append(kind)
            case ["c", at]:
                self.cycles.append(at)
            case ["b", at, low, high]:
                self.bounds.append(ClockBound(at, low, high))
            case ["e", num_recorded, num_lost]:
                self.num_recorded, self.is_whole = num_recorded + num_lost, True
            case _:
                self.operations.append(_decode(line, kinds, last_ns))
                self.num_recorded = self.header.num_before + len(self.operations)
                return self.operations[-1].ended_ns
        return last_ns

    def extend(self, later: "Track", source: str) -> None:
        if later.header.num_before == self.header.num_before:
            raise UsageError(
                f"{source} has records of rank {self.header.rank} twice. They may be "
                "from two jobs. Leave one of them out."
            )
        self.operations += later.operations
        self.cycles += later.cycles
        # Each segment repeats the bounds of the previous segments.
        self.bounds += [b for b in later.bounds if b not in self.bounds]
        self.is_whole, self.num_recorded = later.is_whole, later.num_recorded


class Encoder:
    """Encoder of the lines of one segment."""

    def __init__(self, header: PartHeader) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._last_ns = 0
        self.head = encode_line({"ronde_timeline": FORMAT, **asdict(header)})

    def operations(self, records: Iterable[Recorded]) -> bytes:
        lines: list[str] = []
        # Tensors of a fused collective have the same activities.
        activities, begun_ns, parts = (), 0, ""
        for record in records:
            if (record.activities, record.begun_ns) != (activities, begun_ns):
                activities, begun_ns = record.activities, record.begun_ns
                parts = "".join(
                    f",{json.dumps(name)},{begun - begun_ns},{ended - begun}"
                    for name, begun, ended in activities
                )
            kind = (record[0], record[2], record[3], *record[8:10])
            number = self._numbers.get(kind)
            if number is None:
                number = self._numbers[kind] = len(self._numbers)
                lines.append(json.dumps(["d", number, *kind]))
            ended = record.ended_ns
            submitted = ended - record.submitted_ns if record.submitted_ns else -1
            agreed = ended - record.agreed_ns if record.agreed_ns else -1
            lines.append(
                f"[{number},{record.sequence},{ended - self._last_ns},{submitted},"
                f"{agreed},{ended - begun_ns},{record.num_fused}{parts}]"
            )
            self._last_ns = ended
        return "\n".join([*lines, ""]).encode()


def encode_line(content: object) -> bytes:
    return json.dumps(content).encode() + b"\n"


def is_part(data: bytes) -> bool:
    if not data.startswith(MAGIC):
        return False
    text = zlib.decompressobj(wbits=31).decompress(data, 64)
    return text.startswith(b'{"ronde_timeline": ') and b'"rank"' in text


def read_parts(blobs: Iterable[bytes], source: str = "part") -> list[Track]:
    """Read segments of any ranks, in any order; truncated lines are ignored."""
    segments = [s for blob in blobs for s in _segments(blob, source)]
    segments.sort(key=lambda s: (s.header.session, s.header.rank, s.header.num_before))
    tracks: dict[tuple[int, int], Track] = {}
    for segment in segments:
        track = tracks.setdefault(
            (segment.header.session, segment.header.rank), segment
        )
        if track is not segment:
            track.extend(segment, source)
    for track in tracks.values():
        track.num_dropped = track.num_recorded - len(track.operations)
    return list(tracks.values())


def _segments(blob: bytes, source: str) -> Iterator[Track]:
    segment: Track | None = None
    kinds: list[list[Any]] = []
    last_ns = 0
    for line in _lines(blob, source):
        try:
            content: Any = json.loads(line)
            if isinstance(content, dict):
                if segment is not None:
                    yield segment
                header = _header(cast("dict[str, Any]", content), source)
                segment, kinds, last_ns = Track(header), [], 0
                segment.num_recorded = header.num_before
            elif segment is not None:
                last_ns = segment.add_line(content, kinds, last_ns)
        except (ValueError, TypeError, IndexError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"{source} has a damaged line: {line[:60]!r}. Leave that file out."
            ) from error
    if segment is not None:
        yield segment


def _lines(blob: bytes, source: str) -> Iterator[bytes]:
    """Yield the lines of a part's streams, each up to its last whole line."""
    while blob:
        unpacker = zlib.decompressobj(wbits=31)
        try:
            text = unpacker.decompress(blob)
        except zlib.error as error:
            raise UsageError(
                f"cannot decompress {source}: {error}. Give files that ranks of ronde "
                "wrote."
            ) from error
        yield from text[: text.rfind(b"\n") + 1].splitlines()
        blob = unpacker.unused_data


def _header(content: dict[str, Any], source: str) -> PartHeader:
    if content.get("ronde_timeline") != FORMAT:
        raise UsageError(
            f"{source}: these records have version {content.get('ronde_timeline')!r}, "
            f"but this ronde reads version {FORMAT}. Read them with the version of "
            "ronde that wrote them."
        )
    return PartHeader(**{each.name: content[each.name] for each in fields(PartHeader)})


def _decode(
    line: Sequence[Any], kinds: Sequence[Sequence[Any]], last_ns: int
) -> Recorded:
    number, sequence, since, submitted, agreed, begun, num_fused, *rest = line
    set_id, name, kind, dtype, shape = kinds[number]
    ended_ns = last_ns + since
    begun_ns = ended_ns - begun
    submitted_ns = ended_ns - submitted if submitted >= 0 else 0
    agreed_ns = ended_ns - agreed if agreed >= 0 else 0
    starts = [begun_ns + start for start in rest[1::3]]
    activities = tuple(
        Activity(name, start, start + length)
        for name, start, length in zip(rest[::3], starts, rest[2::3], strict=True)
    )
    times = (submitted_ns, agreed_ns, begun_ns, ended_ns)
    about = (dtype, tuple(shape), num_fused, activities)
    return Recorded(set_id, sequence, name, kind, *times, *about)


NUM_SEGMENTS = 4  # a full recording keeps at least 3/4 of its limit
SUFFIX = ".ronde-part"


class PartFiles:
    """One rank's records in compressed files of a directory, within a size limit.

    The oldest file is removed at the limit. A crash loses no record that was added.
    """

    def __init__(self, directory: Path, header: PartHeader, limit_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._header = header
        self._segment_bytes = max(limit_bytes // NUM_SEGMENTS, 1)
        self._finished: list[Path] = []
        self._bounds: list[ClockBound] = []
        self._num_segments = 0
        self._num_recorded = 0
        self._open()

    @property
    def paths(self) -> list[Path]:
        return [*self._finished, self._path]

    def add(self, records: Sequence[Recorded], cycles: Sequence[int] = ()) -> None:
        if self._size_bytes >= self._segment_bytes:
            self._rotate()
        lines = self._new_bounds() + self._encoder.operations(records)
        self._num_recorded += len(records)
        lines += b"".join(encode_line(["c", at_ns]) for at_ns in cycles)
        self._write(lines)

    def add_bound(self, bound: ClockBound) -> None:
        """Add a bound, to be written with the next records; any thread may do this."""
        self._bounds.append(bound)

    def close(self, num_lost: int) -> None:
        end = encode_line(["e", self._num_recorded, num_lost])
        self._finish(self._new_bounds() + end)

    def read(self) -> bytes:
        return b"".join(path.read_bytes() for path in self.paths)

    def remove(self, others: Iterable[int] = ()) -> None:
        stems = [_stem(rank, self._header) for rank in others]
        theirs = (p for stem in stems for p in self.directory.glob(f"{stem}*{SUFFIX}"))
        for path in [*self.paths, *theirs]:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # other ranks' parts are still there
            self.directory.rmdir()

    def _open(self) -> None:
        header = self._header
        name = f"{_stem(header.rank, header)}{self._num_segments}{SUFFIX}"
        self._path = self.directory / name
        self._num_segments += 1
        self._file = open(self._path, "wb", 0, opener=_open_private)  # noqa: SIM115
        self._size_bytes = self._num_bounds = 0
        self._packer = zlib.compressobj(1, wbits=31)
        self._encoder = Encoder(replace(header, num_before=self._num_recorded))
        self._write(self._encoder.head + self._new_bounds())

    def _new_bounds(self) -> bytes:
        """Encode the bounds that the current segment lacks."""
        bounds = self._bounds[self._num_bounds :]
        self._num_bounds += len(bounds)
        return b"".join(encode_line(["b", *bound]) for bound in bounds)

    def _rotate(self) -> None:
        self._finish()
        self._finished.append(self._path)
        while len(self._finished) >= NUM_SEGMENTS:
            self._finished.pop(0).unlink(missing_ok=True)
        self._open()

    def _finish(self, lines: bytes = b"") -> None:
        self._write(lines, zlib.Z_FINISH)
        self._file.close()

    def _write(self, lines: bytes, how: int = zlib.Z_SYNC_FLUSH) -> None:
        data = self._packer.compress(lines) + self._packer.flush(how)
        self._size_bytes += len(data)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.close()
            raise


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _stem(rank: int, header: PartHeader) -> str:
    return f"rank-{rank:05}.{header.session}."
