"""The timelines of a session, one for the launcher and one for the program."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, cast

from torch.distributed import Store

from ronde.membership.view import NO_VIEW
from ronde.timeline.events import Recorded, Recorder
from ronde.timeline.gathering import SharedStore
from ronde.timeline.part import PartHeader
from ronde.timeline.recording import (
    DEFAULT_LIMIT_BYTES,
    RankRecording,
    open_horovod_recording,
    part_header,
)
from ronde.units import parse_size_bytes
from ronde.world.environment import select_variables

_DIRECTORY = "RONDE_TIMELINE"
_LIMIT = "RONDE_TIMELINE_LIMIT"
_WRITABLE = "writable"
_ANSWER = timedelta(minutes=5)  # limit for rank 0 to open the file

# Recordings are numbered across sessions, equally on all ranks.
_launched = count()
_requested = count()

_logger = logging.getLogger("ronde")


@dataclass(slots=True)
class Recordings:
    """The timelines of one rank in one session."""

    rank: int
    size: int
    host: str
    store: Callable[[str], Store | None]  # returns the ranks' shared store of a name
    view: int = NO_VIEW  # of an elastic job; part of the number of a recording
    _launcher: RankRecording | None = None
    _own: RankRecording | None = None
    _path: Path = field(default_factory=Path)
    _numbers: "count[int] | None" = None
    _limit_bytes: int = DEFAULT_LIMIT_BYTES

    @property
    def recorder(self) -> Recorder | None:
        """The recorder for coordinators: this object itself if both timelines run."""
        if self._launcher and self._own:
            return self
        recording = self._launcher or self._own
        return recording and recording.recorder

    def operation(self, recorded: Recorded) -> None:
        for recording in filter(None, (self._launcher, self._own)):
            recording.recorder.operation(recorded)

    def cycle(self, at_ns: int) -> None:
        for recording in filter(None, (self._launcher, self._own)):
            recording.recorder.cycle(at_ns)

    def open(self) -> None:
        """Begin the timeline of ``ronde run --timeline``, if it is requested."""
        variables = select_variables([_DIRECTORY, _LIMIT])
        if variables.get(_LIMIT):
            self._limit_bytes = parse_size_bytes(variables[_LIMIT])
        if not variables.get(_DIRECTORY):
            return
        header, shared = self._begin("launched", _launched)
        folder, limit = Path(variables[_DIRECTORY]), self._limit_bytes
        try:
            self._launcher = RankRecording(header, shared, folder, limit_bytes=limit)
        except OSError as error:
            _logger.warning(
                "Cannot write the timeline: %s. The job continues without one.",
                error,
            )

    def start(self, path: Path, *, has_cycles: bool, on_all: bool = False) -> None:
        """Begin the program's own timeline, which rank 0 writes to ``path``.

        With ``on_all`` every rank must call this, and an unwritable path only causes a
        warning, as in Horovod.
        """
        header, shared = self._begin("", _requested)
        self._path, limit_bytes = path, self._limit_bytes
        if self.view > 0:
            first, dot, rest = path.name.partition(".")
            self._path = path = path.with_name(f"{first}.view{self.view}{dot}{rest}")
        if on_all and not self._is_writable(path, shared):
            return
        self._own = open_horovod_recording(
            header, shared, path, limit_bytes=limit_bytes, has_cycles=has_cycles
        )

    def _is_writable(self, path: Path, shared: SharedStore | None) -> bool:
        """Return rank 0's answer on all ranks: True if it can write its file."""
        is_writable = True
        if self.rank == 0:
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            except OSError as error:
                is_writable = False
                _logger.warning(
                    "Cannot write HOROVOD_TIMELINE=%s: %s. The job continues without a "
                    "timeline.",
                    path,
                    error.strerror,
                )
            if shared is not None:
                shared.set(_WRITABLE, b"1" if is_writable else b"0")
        elif shared is not None:
            shared.wait([_WRITABLE], _ANSWER)
            is_writable = shared.get(_WRITABLE) == b"1"
        return is_writable

    def stop(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            own.close()
            own.merge(self._path, self._limit_bytes)

    def break_off(self) -> None:
        """End both timelines without waiting for other ranks.

        The program's own timeline keeps only rank 0's operations.
        """
        own, self._own = self._own, None
        launcher, self._launcher = self._launcher, None
        if own is not None:
            own.abort()
            own.remove_part()
        if launcher is not None:
            launcher.abort()

    def close(self) -> None:
        self.stop()
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.close()

    def mark(self, name: str) -> None:
        now = time.monotonic_ns()
        self.operation(Recorded(0, 0, name, "VIEW", now, now, now, now, "", (), 1))

    def _begin(
        self, kind: str, numbers: "count[int]"
    ) -> tuple[PartHeader, SharedStore | None]:
        if self.view != NO_VIEW:  # ranks that join have had fewer recordings
            numbers = self._numbers = self._numbers or count(self.view << 16)
        number = next(numbers)
        header = part_header(self.rank, self.size, self.host, number)
        store = self.store(f"timeline/{kind}{number}")
        # Its own connection, as a store serves one thread of a process at a time.
        return header, None if store is None else cast("Any", store).clone()
