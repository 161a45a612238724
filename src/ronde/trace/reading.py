"""Reads timelines: merged ones, parts of ranks, and Horovod's own."""

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

from ronde.errors import UsageError
from ronde.timeline.lateness import AlignedTrack, align, errors_ns, find_arrivals
from ronde.timeline.part import MAGIC, Track, is_part, read_parts
from ronde.timeline.part_files import SUFFIX
from ronde.trace.horovod_file import read_horovod
from ronde.trace.merged_file import read_merged
from ronde.trace.value import RankTrace, Trace


def read_trace(path: Path) -> Trace:
    """Read a timeline.

    Args:
        path: A merged trace, a rank's part, a directory of parts, or what Horovod
            wrote.

    Raises:
        UsageError: It cannot be read, or is none of them.
    """
    try:
        if path.is_dir():
            return trace_of(read_part_files([path]))
        with path.open("rb") as file:
            head = file.read(4096)
        if is_part(head):
            return trace_of(read_part_files([path]))
        with _open(path, is_packed=head.startswith(MAGIC)) as lines:
            return _read_json(lines, path)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(
            f"timeline must be a file that can be read whole, got {str(path)!r}: "
            f"{error}."
        ) from error


def read_part_files(paths: Sequence[Path]) -> list[Track]:
    """Read parts of ranks.

    Args:
        paths: Files, or directories that hold them.

    Raises:
        UsageError: A file cannot be read or is no part, or there is none.
    """
    files = [file for path in paths for file in _part_files(path)]
    tracks: list[Track] = []
    try:
        blobs = [(str(file), file.read_bytes()) for file in dict.fromkeys(files)]
    except OSError as error:
        raise UsageError(
            f"part must be a file that can be read, got {error.filename!r}: "
            f"{error.strerror}."
        ) from error
    for name, blob in blobs:
        if not is_part(blob):
            raise UsageError(
                f"part must be a file that a rank wrote (*{SUFFIX}), got {name!r}. "
                "A merged trace cannot be merged again."
            )
    tracks = read_parts([blob for _, blob in blobs], "the parts")
    if not tracks:
        raise UsageError(
            f"parts must be there, got none in {', '.join(map(str, paths))}. They are "
            f"files that end in {SUFFIX}."
        )
    return tracks


def _part_files(path: Path) -> list[Path]:
    return sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]


def trace_of(tracks: Sequence[Track]) -> Trace:
    """Return what parts hold, on one clock."""
    aligned = align(tracks)
    size = max((track.header.size for track in tracks), default=0)
    ranks: dict[int, RankTrace] = {}
    for track in aligned:
        own, before = _rank_of(track), ranks.get(track.rank)
        ranks[track.rank] = own if before is None else before.joined(own)
    return Trace(
        size=size,
        ranks=[ranks[rank] for rank in sorted(ranks)],
        arrivals=find_arrivals((track.rank, track.keyed) for track in aligned),
        remarks=[],
    )


def _rank_of(track: AlignedTrack) -> RankTrace:
    return RankTrace(
        track.rank,
        track.track.header.host,
        errors_ns(track) / 1000 if track.clock.is_measured else None,
        track.track.num_dropped,
        is_whole=track.track.is_whole,
        operations=track.keyed,
    )


def _open(path: Path, *, is_packed: bool) -> "IO[str]":
    if is_packed:
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _read_json(lines: "IO[str]", path: Path) -> Trace:
    """Tell by the beginning whose file it is; only ours may be too large to hold."""
    try:
        first, second = lines.readline(), lines.readline()
        if second.startswith('"otherData": '):
            return read_merged(json.loads(second.partition(": ")[2][:-2]), lines)
        content: Any = _json(first + second + lines.read())
        if isinstance(content, list):
            return read_horovod(cast("list[dict[str, Any]]", content))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"timeline must be JSON of Chrome's trace format, got {str(path)!r}: "
            f"{error}. It may be damaged."
        ) from error
    raise UsageError(
        f"timeline must be one of ronde's or Horovod's, got {str(path)!r}, which is "
        "neither. Other traces open in ui.perfetto.dev."
    )


def _json(text: str) -> Any:  # noqa: ANN401  whatever it holds
    try:
        return json.loads(text)
    except ValueError:
        # Horovod before 0.21 never wrote the end.
        return json.loads(text.rstrip().rstrip(",") + "]")
