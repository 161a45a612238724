"""One recording on one rank, from its beginning to the file that it becomes."""

import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ronde.errors import UsageError
from ronde.timeline.chrome import write_trace
from ronde.timeline.clocks import ClockBound, clock_identity
from ronde.timeline.gathering import Gathering, SharedStore
from ronde.timeline.live import LiveFile
from ronde.timeline.part import PartHeader, read_parts
from ronde.timeline.part_files import PartFiles
from ronde.timeline.recording import Sink, ThreadedRecorder

DEFAULT_LIMIT_BYTES = 32 << 20
PACKED_RATIO = 2
"""A part is about so much smaller than what becomes of it in a packed trace."""

_MIN_PART_BYTES = 64 << 10
_GATHER_S = 0.5
_LIVE_GATHER_S = 0.05

_logger = logging.getLogger("ronde")


@dataclass(frozen=True, slots=True)
class Place:
    """Who records.

    Attributes:
        rank: Among all.
        size: Number of ranks.
        host: This rank's host.
        session: How many recordings this process had begun before, as all others had.
    """

    rank: int
    size: int
    host: str
    session: int

    def header(self) -> PartHeader:
        """Return what heads the rank's records."""
        return PartHeader(
            rank=self.rank,
            size=self.size,
            host=self.host,
            clock=clock_identity(),
            wall_ns=time.time_ns() - time.monotonic_ns(),
            session=self.session,
        )


def part_limit_bytes(limit_bytes: int, size: int) -> int:
    """Return how large one rank's part may grow for a trace of ``limit_bytes``."""
    return max(limit_bytes // (PACKED_RATIO * size), _MIN_PART_BYTES)


class RankRecording:
    """Records one rank; the part stays in a directory, or becomes rank 0's file.

    Args:
        place: Who records.
        store: Shared with the other ranks and this object's alone; None for one rank.
        directory: Where the part is kept; whoever named it merges.
        limit_bytes: Of the file that all ranks' records become.

    Raises:
        OSError: The part cannot be made there.
    """

    def __init__(
        self,
        place: Place,
        store: SharedStore | None,
        directory: Path,
        *,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        live: LiveFile | None = None,
        has_cycles: bool = False,
    ) -> None:
        header = place.header()
        self._place = place
        self._files = PartFiles(
            directory, header, part_limit_bytes(limit_bytes, place.size)
        )
        sinks: list[Sink] = [self._files, *([live] if live else [])]
        self.recorder = ThreadedRecorder(
            sinks,
            gather_s=_LIVE_GATHER_S if live else _GATHER_S,
            has_cycles=has_cycles,
        )
        self._gathering: Gathering | None = None
        if store is not None:
            self._gathering = Gathering(
                store,
                place.rank,
                place.size,
                clock=header.clock,
                # Not a method: a circle would keep the store's connection open.
                on_bound=partial(_take_bound, self._files),
            )
            self._gathering.start()

    def close(self) -> None:
        """End the recording; the part stays where it is."""
        if self._gathering is not None:
            try:
                self._gathering.compare_again()
            except RuntimeError as error:
                _logger.warning("clocks could not be compared at the end: %s", error)
        self.recorder.close()

    def bring_together(self, path: Path, limit_bytes: int) -> None:
        """After ``close``: have rank 0 write the trace of all ranks.

        The parts are removed once they are in it. What cannot be brought together is
        warned of; the parts stay then.

        Args:
            path: Rank 0's file.
            limit_bytes: Of the file.
        """
        place, gathering = self._place, self._gathering
        try:
            if place.rank != 0 and gathering is not None:
                # Else rank 0 removes them, where it can, once it comes to it.
                if gathering.hand_in(self._files.read()):
                    self._files.remove()
                return
            parts: dict[int, bytes] = {}
            missing: list[int] = []
            if gathering is not None:
                parts, missing = gathering.collect()
            blobs = [self._files.read(), *parts.values()]
            write_merged(path, blobs, limit_bytes, _remarks(missing, place.size, parts))
            self._files.remove(parts)
        except (OSError, RuntimeError, UsageError) as error:
            self._warn(str(error))

    def _warn(self, why: str) -> None:
        _logger.warning(
            "timeline of rank %d is not in rank 0's file: %s. Its records are in %s; "
            "join them with: ronde trace merge",
            self._place.rank,
            why,
            self._files.directory,
        )


def _take_bound(files: PartFiles, bound: ClockBound) -> None:
    try:
        files.take_bound(bound)
    except OSError as error:
        _logger.warning("a clock's offset could not be written down: %s", error)


def write_merged(
    path: Path, blobs: Sequence[bytes], limit_bytes: int, remarks: Sequence[str] = ()
) -> int:
    """Write parts as one trace.

    Args:
        path: Packed with gzip where its name ends in ``.gz``.
        blobs: Bytes of the parts.
        limit_bytes: Of the file.
        remarks: Sentences to put into the file.

    Returns:
        How many operations were left out for the limit.

    Raises:
        UsageError: The parts are none, or the file cannot be written.
    """
    return write_trace(
        path, read_parts(blobs), limit_bytes=limit_bytes, remarks=remarks
    )


def _remarks(missing: Sequence[int], size: int, parts: dict[int, bytes]) -> list[str]:
    remarks: list[str] = []
    if missing:
        remarks.append(f"The records of ranks {list(missing)} did not come in time.")
    silent = [r for r in range(1, size) if r not in parts and r not in missing]
    if silent:
        remarks.append(f"Ranks {silent[:16]} recorded nothing: no timeline ran there.")
    return remarks


def open_horovod_recording(
    place: Place,
    store: SharedStore | None,
    path: Path,
    *,
    limit_bytes: int,
    has_cycles: bool,
) -> RankRecording:
    """Begin a timeline as Horovod has it: rank 0 writes ``path`` while it runs.

    Args:
        place: Who records.
        store: See ``RankRecording``.
        path: Of the file on rank 0; parts lie in a directory beside it meanwhile.
        limit_bytes: Of the file.
        has_cycles: Whether to mark cycles.

    Raises:
        OSError: Rank 0 cannot write the file.
    """
    live = None
    if place.rank == 0:
        live = LiveFile(
            path,
            place.rank,
            start_ns=time.monotonic_ns(),
            wall_us=time.time_ns() // 1000,
            limit_bytes=limit_bytes,
        )
    directory = path.parent / f"{path.name}.parts"
    if place.rank != 0 and not path.parent.is_dir():
        # The path is of rank 0's host.
        directory = Path(tempfile.mkdtemp(prefix="ronde-timeline-"))
    return RankRecording(
        place,
        store,
        directory,
        limit_bytes=limit_bytes,
        live=live,
        has_cycles=has_cycles,
    )
