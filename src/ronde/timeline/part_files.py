"""A part on disk: segments of which the oldest go when there are too many bytes."""

import os
import threading
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ronde.timeline.clocks import ClockBound
from ronde.timeline.events import Recorded
from ronde.timeline.part import Encoder, PartHeader

NUM_SEGMENTS = 4
"""Segments that are kept at most; a recording keeps at least 3 of 4 of its limit."""

SUFFIX = ".ronde-part"

_FLUSH_BYTES = 16 << 10
"""What the packer holds back at most: it is not counted against the limit."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A file that is still there.

    Attributes:
        path: Where.
        size_bytes: When it was finished.
    """

    path: Path
    size_bytes: int


class PartFiles:
    """Writes one rank's records to files of a directory, packed, within a limit.

    What was flushed before a crash can be read.

    Args:
        directory: Is made where it is not there.
        header: Whose records they are.
        limit_bytes: All files together.

    Raises:
        OSError: The directory or the first file cannot be made.
    """

    def __init__(self, directory: Path, header: PartHeader, limit_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._header = header
        self._segment_bytes = max(limit_bytes // NUM_SEGMENTS, 1)
        self._finished: list[Segment] = []
        self._bounds: list[ClockBound] = []
        self._num_segments = 0
        self._num_taken = 0
        self._lock = threading.Lock()
        self._open()

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self._directory

    @property
    def paths(self) -> list[Path]:
        """The files, oldest first."""
        return [*(segment.path for segment in self._finished), self._path]

    def take(self, records: Sequence[Recorded], cycles: Sequence[int] = ()) -> None:
        """Write records down.

        Raises:
            OSError: The disk does not take them.
        """
        if self._size_bytes >= self._segment_bytes:
            with self._lock:
                self._rotate()
        lines = self._encoder.operations(records)
        self._num_taken += len(records)
        lines += b"".join(map(self._encoder.cycle, cycles))
        self._unflushed_bytes += len(lines)
        with self._lock:
            self._put(self._packer.compress(lines))
        if self._unflushed_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand all that was taken to the system.

        Raises:
            OSError: The disk does not take it.
        """
        self._unflushed_bytes = 0
        with self._lock:
            self._put(self._packer.flush(zlib.Z_SYNC_FLUSH))

    def take_bound(self, bound: ClockBound) -> None:
        """Write down what was measured of the clock; any thread may call this.

        Raises:
            OSError: The disk does not take it.
        """
        with self._lock:
            self._bounds.append(bound)
            self._put(self._packer.compress(self._encoder.bound(bound)))
        self.flush()

    def close(self, num_lost: int) -> None:
        """End the recording.

        Args:
            num_lost: Operations that were never given to ``take``.

        Raises:
            OSError: The disk does not take the end.
        """
        end = self._encoder.end(self._num_taken, num_lost)
        with self._lock:
            self._put(self._packer.compress(end))
            self._finish()

    def read(self) -> bytes:
        """Return all that is there, one segment after another.

        Raises:
            OSError: A file cannot be read.
        """
        return b"".join(path.read_bytes() for path in self.paths)

    def remove(self, others: Iterable[int] = ()) -> None:
        """Delete the files, and the directory where nothing else is in it.

        Args:
            others: Ranks whose files of this recording go too, where they lie there.
        """
        theirs = [
            path
            for rank in others
            for path in self._directory.glob(f"{_stem(rank, self._header)}*{SUFFIX}")
        ]
        for path in [*self.paths, *theirs]:
            path.unlink(missing_ok=True)
        try:
            self._directory.rmdir()
        except OSError:
            return  # others' parts are still there

    def _open(self) -> None:
        header = self._header
        name = f"{_stem(header.rank, header)}{self._num_segments}{SUFFIX}"
        self._path = self._directory / name
        self._num_segments += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o600)
        self._size_bytes = self._unflushed_bytes = 0
        self._packer = zlib.compressobj(1, wbits=31)
        self._encoder = Encoder(replace(header, num_before=self._num_taken))
        bounds = map(self._encoder.bound, self._bounds)
        head = self._packer.compress(b"".join([self._encoder.head, *bounds]))
        self._put(head + self._packer.flush(zlib.Z_SYNC_FLUSH))

    def _rotate(self) -> None:
        self._finish()
        self._finished.append(Segment(self._path, self._size_bytes))
        while len(self._finished) >= NUM_SEGMENTS:
            self._finished.pop(0).path.unlink(missing_ok=True)
        self._open()

    def _finish(self) -> None:
        self._put(self._packer.flush())
        self._close()

    def _put(self, data: bytes) -> None:
        self._size_bytes += len(data)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            self._close()
            raise

    def _close(self) -> None:
        # Its number may be another file's next.
        fd, self._fd = self._fd, -1
        os.close(fd)


def _stem(rank: int, header: PartHeader) -> str:
    return f"rank-{rank:05}.{header.session}."
